"""Certificates that the operator makes for its own webhook: what they are, when the next step of a rotation is due.

Pure: the clock is passed in, nothing is read or written. A rotation never leaves a moment in which the API server
trusts one certificate and is shown another:

1. A new CA signs a new serving certificate. Its private key is forgotten at once, so that nothing can be signed with it.
   The new pair waits (``next``), and the bundle holds the old CA and the new one.
2. The bundle is written into the webhook configurations, and given time to reach every API server.
3. The waiting pair becomes the serving one. The old CA stays in the bundle until it expires, so it does not matter
   when each replica takes the new pair.
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
"""Certificates hold from a little before they were made, for clocks that differ."""
SPREAD_SECONDS: Final = 60
"""How long a bundle is given to reach every API server; each follows the configurations by a watch."""
MAX_AUTHORITIES: Final = 8
"""Bundles stay small whatever happens to the Secret; with usual lifetimes there are two."""
UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm)
"""What cryptography raises for bytes that are not what they should be."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A serving certificate, its key and the CA that signed it, each as PEM."""

    certificate: bytes
    key: bytes
    authority: bytes


@dataclass(frozen=True, slots=True)
class KeyPair:
    """What the Secret holds: the serving pair, the CAs that clients trust, and in a rotation the pair that waits."""

    certificate: bytes
    key: bytes
    bundle: bytes
    next_certificate: bytes = b""
    next_key: bytes = b""


@dataclass(frozen=True, slots=True)
class Step:
    """What the material should be now, and in how many seconds to look again. ``change``: one sentence, empty where
    nothing is to be written.
    """

    material: KeyPair
    change: str
    wait_seconds: float


def server_names(settings: Settings) -> tuple[str, ...]:
    """Names and addresses that the webhook is asked by."""
    service, namespace = settings.webhook.certificates.service_name, settings.namespace
    name = f"{service}.{namespace}.svc"
    return (name, f"{name}.{settings.cluster_domain}", *settings.webhook.certificates.extra_names)


def issue(names: Sequence[str], now: float, lifetime_seconds: float) -> Issued:
    """A new CA and a serving certificate for ``names`` (DNS names or addresses), both valid for the lifetime."""
    start, end = _moment(now - BACKDATED_SECONDS), _moment(now + lifetime_seconds)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    identity = hashlib.sha256(_public(authority_key)).hexdigest()[:12]
    # Names tell the CAs of a bundle apart: a verifier looks for the issuer by its name first.
    authority_name = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"kvtier-webhook-ca-{identity}")]
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key(), start, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
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
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    return Issued(_pem(certificate), _private(key), _pem(authority))


def step(
    material: KeyPair | None,
    names: Sequence[str],
    now: float,
    lifetime_seconds: float,
    renew_before_seconds: float,
    spread: bool,
) -> Step:
    """The next step. ``spread``: every webhook configuration has held the bundle, as it is in ``material``, for
    ``settle_seconds``.
    """
    settle = settle_seconds(renew_before_seconds)
    if material is None:
        return _reissue(
            None, names, now, lifetime_seconds, renew_before_seconds, "there was no certificate"
        )
    bundle = _living(material.bundle, now)
    waits = bool(material.next_certificate or material.next_key)
    waiting = waits and not problem(
        replace(material, certificate=material.next_certificate, key=material.next_key), names, now
    )
    wrong = problem(material, names, now)
    if wrong and waiting:
        return Step(_promoted(material, bundle), f"{wrong}; the waiting one serves", settle)
    if wrong:
        return _reissue(material, names, now, lifetime_seconds, renew_before_seconds, wrong)
    if waiting:
        if spread:
            return Step(_promoted(material, bundle), "the renewed certificate serves", settle)
        return Step(material, "", settle)
    due = _ends(material.certificate) - renew_before_seconds
    if now >= due or waits:
        fresh = issue(names, now, lifetime_seconds)
        renewed = replace(
            material,
            bundle=_joined(fresh.authority, bundle),
            next_certificate=fresh.certificate,
            next_key=fresh.key,
        )
        return Step(renewed, "a renewed certificate waits until its CA is known", settle)
    if bundle != material.bundle:
        return Step(
            replace(material, bundle=bundle), "an expired CA is no longer trusted", due - now
        )
    return Step(material, "", due - now)


def settle_seconds(renew_before_seconds: float) -> float:
    """How long a bundle is given to reach every API server: a part of the time that is left."""
    return min(SPREAD_SECONDS, renew_before_seconds / 4)


def problem(material: KeyPair, names: Sequence[str], now: float) -> str:
    """Why the serving pair cannot be used, in one sentence; empty where it can."""
    if not material.certificate and not material.key:
        return "there was no certificate"
    try:
        certificate = x509.load_pem_x509_certificate(material.certificate)
        key = serialization.load_pem_private_key(material.key, None)
        public, usable = _raw_public(certificate.public_key()), _raw_public(key.public_key())
    except UNREADABLE:
        return "certificate or key cannot be read"
    if public != usable:
        return "certificate and key do not belong together"
    if (
        not certificate.not_valid_before_utc.timestamp()
        <= now
        < certificate.not_valid_after_utc.timestamp()
    ):
        return "the certificate has expired or is not valid yet"
    missing = [name for name in names if name not in _names(certificate)]
    if missing:
        return f"the certificate lacks the name {missing[0]}"
    if not any(
        _issued_by(certificate, authority) for authority in _authorities(material.bundle, now)
    ):
        return "the CA that signed the certificate is not in the bundle"
    return ""


def expiry(certificate: bytes) -> float | None:
    """When a certificate (PEM) ends, in seconds since 1970; None if it cannot be read."""
    try:
        return _ends(certificate)
    except UNREADABLE:
        return None


def from_secret(secret: Mapping[str, Any] | None) -> KeyPair | None:
    """What a Secret holds; None where it holds no pair."""
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


def secret_data(material: KeyPair) -> dict[str, str | None]:
    """The Secret's data, for a merge patch: what is not there is removed."""
    parts = {
        CERTIFICATE: material.certificate,
        KEY: material.key,
        BUNDLE: material.bundle,
        NEXT_CERTIFICATE: material.next_certificate,
        NEXT_KEY: material.next_key,
    }
    return {name: base64.b64encode(part).decode() if part else None for name, part in parts.items()}


def from_bundle_field(field: str) -> bytes:
    """What a ``clientConfig.caBundle`` holds; empty where it holds nothing that can be read."""
    try:
        return base64.b64decode(field, validate=True)
    except (binascii.Error, ValueError):
        return b""


def bundle_field(bundle: bytes) -> str:
    """A bundle as ``clientConfig.caBundle`` has it."""
    return base64.b64encode(bundle).decode()


def trusts(bundle: bytes) -> bool:
    """Whether a TLS client can read the bundle."""
    try:
        ssl.create_default_context(cadata=bundle.decode("ascii"))
    except (ssl.SSLError, ValueError):
        return False
    return True


def _reissue(
    material: KeyPair | None,
    names: Sequence[str],
    now: float,
    lifetime: float,
    renew_before: float,
    why: str,
) -> Step:
    fresh = issue(names, now, lifetime)
    kept = _living(material.bundle, now) if material is not None else b""
    made = KeyPair(fresh.certificate, fresh.key, _joined(fresh.authority, kept))
    return Step(made, f"{why}: a new one was made", max(1.0, lifetime - renew_before))


def _promoted(material: KeyPair, bundle: bytes) -> KeyPair:
    return KeyPair(material.next_certificate, material.next_key, bundle)


def _living(bundle: bytes, now: float) -> bytes:
    """The bundle without CAs that have expired, and without what is no certificate."""
    return b"".join(_pem(authority) for authority in _authorities(bundle, now))


def _authorities(bundle: bytes, now: float) -> list[x509.Certificate]:
    try:
        found = x509.load_pem_x509_certificates(bundle)
        return [
            authority for authority in found if now < authority.not_valid_after_utc.timestamp()
        ][:MAX_AUTHORITIES]
    except UNREADABLE:
        return []


def _joined(first: bytes, rest: bytes) -> bytes:
    return first + b"".join(_pem(each) for each in _authorities(rest, 0.0)[: MAX_AUTHORITIES - 1])


def _issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (*UNREADABLE, InvalidSignature):
        return False
    return True


def _ends(certificate: bytes) -> float:
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def _names(certificate: x509.Certificate) -> set[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    found = set(names.get_values_for_type(x509.DNSName))
    return found | {str(address) for address in names.get_values_for_type(x509.IPAddress)}


def _name(name: str) -> x509.GeneralName:
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


def _usage(*, signs: bool) -> x509.KeyUsage:
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


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return _raw_public(key.public_key())


def _raw_public(key: Any) -> bytes:
    raw: bytes = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return raw
