"""Seals objects: a keyed tag, or encryption, with the keys of ``isolation.keySecretRef``.

A checksum is no authentication: a process that can write to a directory can compute one. A sealed
object is proven to come from a holder of the keys before anything of it is used.

**Tag** (format version 1). Keyed BLAKE3 of 256 bits over the header (its own field and the checksum
of the header as zeros) and the whole payload, with padding. The header names the key's id. The
checksums stay and are verified first: an object that contradicts its own checksums is corrupt and
is removed, while one that only lacks the right tag may be another's and is left alone.

**AES-256-GCM** (format version 2). One message per object: the fixed part of the header is
authenticated (its tag as zeros); the table of shards, with their sizes and checksums, and the
payload are encrypted, in this order and at their places, so sizes and alignment for direct I/O are
those of version 1. Objects are decrypted in place in their slot, which no engine reads before the
tag has been verified.

Nonces. A nonce that repeats under one key breaks AES-GCM, and random nonces of 96 bits limit a key
to 2^32 messages, which one busy cluster writes within a year. So no two objects share a key of AES:
it is derived with keyed BLAKE3 from the Secret's key, a random salt of 256 bits in the header, and
the namespace and key of the object. Key and nonce repeat only if the same object is written with
the same salt and the same random nonce: after n writes with a probability below n^2 / 2^353. There
is no counter, so this holds across writers and restarts. Namespace and key take part for machines
that are cloned with the state of their random generator: only the same object can then meet the
same key. One message is at most 64 GiB, far above any object.

An object that is sealed either way is accepted whatever the policy asks for new objects, so
encryption can be turned on and off over an existing directory. An object without a tag is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any

from kvtier.errors import KVTierError, TierUntrustedError
from kvtier.hashing import keyed_digest
from kvtier.tiers.base import ObjectMeta, ObjectRef, Payload
from kvtier.tiers.checksum import by_kind
from kvtier.tiers.filesystem.format import (
    DIGEST_AT,
    SHARDS_AT,
    FixedHeader,
    SealFields,
    finish_header,
    read_fixed,
    read_shards,
    set_seal,
    verify_payload,
    write_header,
)
from kvtier.tiers.isolation_keys import IsolationKey, KeySet
from kvtier.tiers.pieces import chunks_of, views_of

PIECE_BYTES = 2 << 20
"""Encryption works in pieces of this size: large enough that the interpreter lock, which is
released during each, is rarely taken, and small enough to be one buffer per thread."""
_TAG_BYTES = 16
_SALT_BYTES = 32
_NONCE_BYTES = 12


@dataclass(frozen=True, slots=True)
class Sealing:
    """How a tier seals objects. ``keys`` returns the keys in effect, or raises
    ``TierKeyMissingError``; any thread may call it. ``encrypt``: new objects are encrypted.
    """

    keys: Callable[[], KeySet]
    encrypt: bool = False


def require_cipher() -> None:
    """Raises ``KVTierError`` if this process cannot encrypt."""
    try:
        _cipher(bytes(32), bytes(12), None)
    except ImportError as error:
        raise KVTierError(
            "isolation.encryption: AES256GCM requires the Python package cryptography, which is "
            f"not installed ({error})"
        ) from error


def _cipher(key: bytes, nonce: bytes, tag: bytes | None) -> Any:
    # Imported here: objects without encryption need no such library.
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    cipher = Cipher(algorithms.AES256(key), modes.GCM(nonce, tag))
    return cipher.encryptor() if tag is None else cipher.decryptor()


def _object_key(key: IsolationKey, ref: ObjectRef, salt: bytes) -> bytes:
    # The only part of variable length comes last.
    return keyed_digest(key.cipher_root, salt, bytes.fromhex(ref.namespace), ref.key)


def _without_tag(header: memoryview) -> bytes:
    """The header as the tag covers it."""
    copy = bytearray(header[:DIGEST_AT])
    copy[112:144] = bytes(32)
    return bytes(copy)


# Writing.


def write_tagged(
    header: memoryview, payload: Payload, ref: ObjectRef, meta: ObjectMeta, key: IsolationKey
) -> None:
    """Fills ``header`` with that of a tagged object. ``payload``: with padding cleared.

    Raises ``ValueError`` if the format cannot hold the object.
    """
    write_header(header, ref, meta)
    set_seal(header, False, SealFields(key_id=key.id))
    tag = keyed_digest(key.tag_key, header[:DIGEST_AT], *views_of(payload))
    set_seal(header, False, SealFields(tag, key.id))
    _finish(header, meta)


def _finish(header: memoryview, meta: ObjectMeta) -> None:
    checksum = by_kind(meta.checksum_kind)
    if checksum is None:
        raise ValueError(f"checksum kind {meta.checksum_kind!r} is not available")
    finish_header(header, checksum)


class Encryptor:
    """Encrypts one object. ``piece`` for each part of the payload, in order, then ``finish``.

    The constructor raises ``ValueError`` if the format cannot hold the object.
    """

    def __init__(
        self, header: memoryview, ref: ObjectRef, meta: ObjectMeta, key: IsolationKey
    ) -> None:
        self._header = header
        self._meta = meta
        self._seal = SealFields(
            key_id=key.id, salt=os.urandom(_SALT_BYTES), nonce=os.urandom(_NONCE_BYTES)
        )
        write_header(header, ref, meta)
        set_seal(header, True, self._seal)
        self._cipher = _cipher(_object_key(key, ref, self._seal.salt), self._seal.nonce, None)
        self._cipher.authenticate_additional_data(bytes(header[:SHARDS_AT]))
        self._cipher.update_into(header[SHARDS_AT:DIGEST_AT], header[SHARDS_AT:DIGEST_AT])

    def piece(self, plain: memoryview, into: memoryview) -> None:
        """Encrypts a part of the payload into memory of the same size."""
        self._cipher.update_into(plain, into)

    def finish(self) -> None:
        """Completes the header."""
        self._cipher.finalize()
        tag = self._cipher.tag.ljust(32, b"\0")
        seal = SealFields(tag, self._seal.key_id, self._seal.salt, self._seal.nonce)
        set_seal(self._header, True, seal)
        _finish(self._header, self._meta)


# Reading.


def open_object(
    header: memoryview, payload: Payload, ref: ObjectRef, keys: KeySet | None
) -> ObjectMeta:
    """Verifies an object that was read whole, and decrypts it in place. ``keys``: None if the tier
    requires no tag; then a tag is not checked.

    Raises ``TierCorruptError``, ``TierForeignError``, ``TierUnverifiableError`` or
    ``TierUntrustedError``; then the content of both buffers is undefined.
    """
    fixed = read_fixed(header, ref, payload.nbytes)
    if fixed.encrypted:
        _decrypt(header, payload, ref, fixed, keys)
    meta = read_shards(header, fixed)
    verify_payload(payload, meta)
    if keys is not None and not fixed.encrypted:
        _check_tag(header, payload, fixed, keys)
    return meta


def _key_of(fixed: FixedHeader, keys: KeySet) -> IsolationKey:
    key_id = fixed.seal.key_id
    if not key_id:
        raise TierUntrustedError("unkeyed", "the object carries no tag")
    key = keys.by_id.get(key_id)
    if key is None:
        raise TierUntrustedError("unknown_key", f"the Secret has no key {key_id!r}")
    return key


def _check_tag(header: memoryview, payload: Payload, fixed: FixedHeader, keys: KeySet) -> None:
    key = _key_of(fixed, keys)
    tag = keyed_digest(key.tag_key, _without_tag(header), *views_of(payload))
    if not compare_digest(tag, fixed.seal.tag):
        raise TierUntrustedError("wrong_tag", f"the tag is not one of key {key.id!r}")


def _decrypt(
    header: memoryview,
    payload: Payload,
    ref: ObjectRef,
    fixed: FixedHeader,
    keys: KeySet | None,
) -> None:
    if keys is None:
        raise TierUntrustedError("no_key", f"encrypted with key {fixed.seal.key_id!r}")
    key = _key_of(fixed, keys)
    try:
        from cryptography.exceptions import InvalidTag
    except ImportError as error:
        raise TierUntrustedError("no_key", f"encrypted, and {error}") from error

    seal = fixed.seal
    cipher = _cipher(_object_key(key, ref, seal.salt), seal.nonce, seal.tag[:_TAG_BYTES])
    cipher.authenticate_additional_data(_without_tag(header)[:SHARDS_AT])
    cipher.update_into(header[SHARDS_AT:DIGEST_AT], header[SHARDS_AT:DIGEST_AT])
    for piece in chunks_of(payload, PIECE_BYTES):
        cipher.update_into(piece, piece)
    try:
        cipher.finalize()
    except InvalidTag:
        raise TierUntrustedError(
            "wrong_tag", f"damaged, or not encrypted with key {key.id!r}"
        ) from None
