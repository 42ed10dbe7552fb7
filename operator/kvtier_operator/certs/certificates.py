"""Issuing of self-signed webhook certificates, and the steps of a rotation. Pure.

At no time does an API server trust one CA while a replica serves a certificate of another. A
rotation has three steps:

1. A new CA signs a new serving certificate. The CA's private key is discarded at once, so that
   nothing else can be signed with it. The new pair is stored as ``next``, and the bundle holds the
   old and the new CA.
2. The bundle is written to the webhook configurations and gets time to reach every API server.
3. The next pair becomes the serving pair. The old CA stays in the bundle until it expires, so that
   replicas may load the new pair at different times.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import ipaddress
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvtier_operator.settings import Settings

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
BUNDLE: Final = "ca.crt"
NEXT_CERTIFICATE: Final = "next.crt"
NEXT_KEY: Final = "next.key"
BACKDATED_SECONDS: Final = 300
"""Certificates are valid from a little before they are issued, to tolerate clock skew."""
SETTLE_SECONDS: Final = 60
"""Time for a bundle to reach every API server. Each watches the webhook configurations."""
MAX_AUTHORITIES: Final = 8
"""Bounds the bundle whatever the Secret holds. With the default lifetimes it has two CAs."""
UNREADABLE: Final = (ValueError, TypeError, UnsupportedAlgorithm)
"""What ``cryptography`` raises for bytes that it cannot parse."""


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A serving certificate, its key and the CA that signed it, each as PEM."""

    certificate: bytes
    key: bytes
    authority: bytes


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The contents of the Secret, as PEM: the serving pair, the bundle of CAs that API servers
    trust, and during a rotation the next pair.
    """

    certificate: bytes
    key: bytes
    bundle: bytes
    next_certificate: bytes = b""
    next_key: bytes = b""


@dataclass(frozen=True, slots=True)
class RotationStep:
    """The desired contents of the Secret, and the seconds until the next step is due.

    ``change`` describes the step for the log; it is empty if nothing changes.
    """

    pair: KeyPair
    change: str
    wait_seconds: float


def server_names(settings: Settings) -> tuple[str, ...]:
    """DNS names and addresses under which API servers reach the webhook."""
    service, namespace = settings.webhook.certificates.service_name, settings.namespace
    name = f"{service}.{namespace}.svc"
    return (name, f"{name}.{settings.cluster_domain}", *settings.webhook.certificates.extra_names)


def issue(names: Sequence[str], now: float, lifetime_seconds: float) -> IssuedCertificate:
    """Creates a CA and a serving certificate for ``names`` (DNS names or addresses)."""
    start, end = _datetime(now - BACKDATED_SECONDS), _datetime(now + lifetime_seconds)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    identity = hashlib.sha256(_public_bytes(authority_key.public_key())).hexdigest()[:12]
    # Verifiers find the issuer by name, so the CAs of a bundle need different names.
    authority_name = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"kvtier-webhook-ca-{identity}")]
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key(), start, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])]),
            authority_name,
            key.public_key(),
            start,
            end,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    return IssuedCertificate(_pem(certificate), _private_pem(key), _pem(authority))


def next_step(
    pair: KeyPair | None,
    names: Sequence[str],
    now: float,
    lifetime_seconds: float,
    renew_before_seconds: float,
    distributed: bool,
) -> RotationStep:
    """The next step of the rotation.

    ``distributed``: every webhook configuration has had the bundle of ``pair`` for at least
    ``settle_seconds``.
    """
    settle = settle_seconds(renew_before_seconds)

    def reissue(change: str) -> RotationStep:
        issued = issue(names, now, lifetime_seconds)
        trusted = _unexpired(pair.bundle, now) if pair is not None else b""
        issued_pair = KeyPair(issued.certificate, issued.key, _join(issued.authority, trusted))
        wait = max(1.0, lifetime_seconds - renew_before_seconds)
        return RotationStep(issued_pair, change, wait)

    if pair is None or not (pair.certificate or pair.key):
        return reissue("created webhook certificate")
    bundle = _unexpired(pair.bundle, now)
    has_next = bool(pair.next_certificate or pair.next_key)
    next_usable = has_next and not problem(
        replace(pair, certificate=pair.next_certificate, key=pair.next_key), names, now
    )
    unusable = problem(pair, names, now)
    if unusable and next_usable:
        change = f"replaced webhook certificate with the renewed one: {unusable}"
        return RotationStep(_promote(pair, bundle), change, settle)
    if unusable:
        return reissue(f"replaced webhook certificate: {unusable}")
    if next_usable:
        if distributed:
            change = "activated renewed webhook certificate"
            return RotationStep(_promote(pair, bundle), change, settle)
        return RotationStep(pair, "", settle)
    due = _expires(pair.certificate) - renew_before_seconds
    if now >= due or has_next:
        issued = issue(names, now, lifetime_seconds)
        renewed = replace(
            pair,
            bundle=_join(issued.authority, bundle),
            next_certificate=issued.certificate,
            next_key=issued.key,
        )
        change = "renewed webhook certificate; it is activated once its CA is distributed"
        return RotationStep(renewed, change, settle)
    if bundle != pair.bundle:
        change = "removed expired CA from the bundle"
        return RotationStep(replace(pair, bundle=bundle), change, due - now)
    return RotationStep(pair, "", due - now)


def settle_seconds(renew_before_seconds: float) -> float:
    """Time for a bundle to reach every API server, at most a quarter of the renewal period."""
    return min(SETTLE_SECONDS, renew_before_seconds / 4)


def problem(pair: KeyPair, names: Sequence[str], now: float) -> str:
    """Why the serving pair cannot be used; empty if it can."""
    if not pair.certificate and not pair.key:
        return "it is missing"
    try:
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        key = serialization.load_pem_private_key(pair.key, None)
        public, usable = _public_bytes(certificate.public_key()), _public_bytes(key.public_key())
    except UNREADABLE:
        return "certificate or key is not valid PEM"
    if public != usable:
        return "the key does not belong to the certificate"
    if (
        not certificate.not_valid_before_utc.timestamp()
        <= now
        < certificate.not_valid_after_utc.timestamp()
    ):
        return "it has expired or is not valid yet"
    missing = [name for name in names if name not in _subject_names(certificate)]
    if missing:
        return f"it is not valid for {missing[0]}"
    if not any(_issued_by(certificate, authority) for authority in _authorities(pair.bundle, now)):
        return "the CA that signed it is not in the bundle"
    return ""


def expiry(certificate: bytes) -> float | None:
    """Expiry of a certificate (PEM) as Unix time; None if it cannot be parsed."""
    try:
        return _expires(certificate)
    except UNREADABLE:
        return None


def from_secret(secret: Mapping[str, Any] | None) -> KeyPair | None:
    """Decodes a Secret; None if it holds no pair."""
    data = (secret or {}).get("data") or {}

    def value(key: str) -> bytes:
        try:
            return base64.b64decode(data.get(key) or "", validate=True)
        except (binascii.Error, TypeError, ValueError):
            return b""

    if not value(CERTIFICATE) and not value(KEY):
        return None
    return KeyPair(
        value(CERTIFICATE), value(KEY), value(BUNDLE), value(NEXT_CERTIFICATE), value(NEXT_KEY)
    )


def secret_data(pair: KeyPair) -> dict[str, str | None]:
    """The Secret's data as a merge patch, which removes the keys that are None."""
    parts = {
        CERTIFICATE: pair.certificate,
        KEY: pair.key,
        BUNDLE: pair.bundle,
        NEXT_CERTIFICATE: pair.next_certificate,
        NEXT_KEY: pair.next_key,
    }
    return {name: base64.b64encode(part).decode() if part else None for name, part in parts.items()}


def decode_bundle(field: str) -> bytes:
    """Decodes a ``clientConfig.caBundle``; empty if it is not base64."""
    try:
        return base64.b64decode(field, validate=True)
    except (binascii.Error, ValueError):
        return b""


def encode_bundle(bundle: bytes) -> str:
    """Encodes a bundle as a ``clientConfig.caBundle``."""
    return base64.b64encode(bundle).decode()


def is_loadable(bundle: bytes) -> bool:
    """Whether a TLS client can load the bundle."""
    try:
        ssl.create_default_context(cadata=bundle.decode("ascii"))
    except (ssl.SSLError, ValueError):
        return False
    return True


def _promote(pair: KeyPair, bundle: bytes) -> KeyPair:
    return KeyPair(pair.next_certificate, pair.next_key, bundle)


def _unexpired(bundle: bytes, now: float) -> bytes:
    """The bundle without expired CAs and without anything that is not a certificate."""
    return b"".join(_pem(authority) for authority in _authorities(bundle, now))


def _authorities(bundle: bytes, now: float) -> list[x509.Certificate]:
    try:
        found = x509.load_pem_x509_certificates(bundle)
        return [
            authority for authority in found if now < authority.not_valid_after_utc.timestamp()
        ][:MAX_AUTHORITIES]
    except UNREADABLE:
        return []


def _join(first: bytes, rest: bytes) -> bytes:
    return first + b"".join(_pem(each) for each in _authorities(rest, 0.0)[: MAX_AUTHORITIES - 1])


def _issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (*UNREADABLE, InvalidSignature):
        return False
    return True


def _expires(certificate: bytes) -> float:
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def _subject_names(certificate: x509.Certificate) -> set[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    found = set(names.get_values_for_type(x509.DNSName))
    return found | {str(address) for address in names.get_values_for_type(x509.IPAddress)}


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    start: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _datetime(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _public_bytes(key: Any) -> bytes:
    raw: bytes = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return raw
