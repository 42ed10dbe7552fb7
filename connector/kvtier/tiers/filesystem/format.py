"""The file format: one object per file.

    offset  size  content (integers are little-endian)
         0     8  magic "KVTIEROB"
         8     2  format version: 1, or 2 if the object is encrypted; 2 more if it expires, 4 more
                  if requests limit it to tiers
        10     1  checksum kind: 1 XXH3-128, 2 BLAKE3 cut to 128 bits
        11     1  KV cache group (first byte of the key)
        12     4  number of shards, 1..64
        16     8  payload length: the sum of the aligned shard sizes
        24    16  namespace
        40     1  length of the key, 1..64
        41    64  key, zeros behind it
       105     7  zeros
       112    32  keyed BLAKE3 tag, or AES-GCM tag (16, zeros behind it), or zeros (seal.py)
       144    32  id of the key of the tag, ASCII, zeros behind it; zeros without a tag
       176    32  encrypted: salt of the object's key, else zeros
       208    12  encrypted: nonce, else zeros
       220     8  tenant (kvtier/tenants.py), zeros if it belongs to no tenant
       228     8  when it expires, in seconds since the epoch; 0: never
       236    20  zeros
       256  40*n  per shard: exact size (8), checksum over exactly these bytes (16), zeros (16)
         …     …  zeros
      4000     1  length of the key of the object before this one in its prefix; 0: not known
      4001    64  that key, zeros behind it
      4065    15  zeros
      4080    16  checksum, of the same kind, over bytes 0..4079
      4096     …  shards, each from a multiple of 4096, zeros between them

If the object is encrypted, bytes 256..4079 and everything from 4096 are; the last checksum covers
the encrypted header. An object that expires, or that is limited to the tiers that it was written
to, has a version of its own, so that releases which do not know that never use it: to them it is an
object of another release.

Every byte is covered: the header and the shards by their checksums, the padding by being zero, the
end by the file's size. A file that parses and verifies is the requested object, byte for byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvtier.errors import (
    TierCorruptError,
    TierForeignError,
    TierUntrustedError,
    TierUnverifiableError,
)
from kvtier.tenants import NO_TENANT
from kvtier.tiers.base import ObjectFacts, ObjectMeta, ObjectRef, Payload
from kvtier.tiers.checksum import DIGEST_BYTES, Blake3, Checksum, Xxh3, by_kind
from kvtier.tiers.pieces import shards_of

HEADER_BYTES = 4096
MAGIC = b"KVTIEROB"
VERSION = 1
ENCRYPTED_VERSION = 2
EXPIRING = 2
"""Added to the version of an object that expires."""
LIMITED = 4
"""Added to the version of an object that is limited to tiers."""
VERSIONS = tuple(
    base + expiring + limited
    for base in (VERSION, ENCRYPTED_VERSION)
    for expiring in (0, EXPIRING)
    for limited in (0, LIMITED)
)
ENCRYPTED_VERSIONS = tuple(each for each in VERSIONS if (each - VERSION) & 1)
READABLE_VERSIONS = tuple(each for each in VERSIONS if each not in ENCRYPTED_VERSIONS)
"""Of objects that are not encrypted."""
EXPIRING_VERSIONS = tuple(each for each in VERSIONS if (each - VERSION) & EXPIRING)
LIMITED_VERSIONS = tuple(each for each in VERSIONS if (each - VERSION) & LIMITED)
MAX_SHARDS = 64
MAX_KEY_BYTES = 64
SUFFIX = ".kv"

_KINDS = {Xxh3.kind: 1, Blake3.kind: 2}
_NAMES = {number: kind for kind, number in _KINDS.items()}
_FIXED = struct.Struct("<8sHBBIQ16sB64s")
_SHARD = struct.Struct("<Q16s16x")
_VERSION = struct.Struct("<8xH")
_SEAL = struct.Struct("<32s32s32s12s")
_SEAL_AT = 112
_FACTS = struct.Struct("<8sQ")
_FACTS_AT = 220
_PREVIOUS_AT = 4000
SHARDS_AT = 256
"""The fixed part ends here, and what version 2 encrypts begins."""
DIGEST_AT = HEADER_BYTES - DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class SealFields:
    """The fields of a header that seal an object (seal.py). ``key_id``: empty without a tag."""

    tag: bytes = bytes(32)
    key_id: str = ""
    salt: bytes = bytes(32)
    nonce: bytes = bytes(12)


@dataclass(frozen=True, slots=True)
class FixedHeader:
    """The verified fixed part of a header."""

    version: int
    checksum: Checksum
    shards: int
    payload_bytes: int
    seal: SealFields
    facts: ObjectFacts

    @property
    def encrypted(self) -> bool:
        """Whether the rest of the file is encrypted."""
        return self.version in ENCRYPTED_VERSIONS


def write_header(header: memoryview, ref: ObjectRef, meta: ObjectMeta) -> None:
    """Fills ``header`` (``HEADER_BYTES``, writable).

    Raises ``ValueError`` if the format cannot hold the object.
    """
    checksum = by_kind(meta.checksum_kind)
    if checksum is None or meta.checksum_kind not in _KINDS:
        raise ValueError(f"checksum kind {meta.checksum_kind!r}: must be one of {sorted(_KINDS)}")
    if not 1 <= len(meta.shard_bytes) <= MAX_SHARDS or len(meta.checksums) != len(meta.shard_bytes):
        raise ValueError(
            f"{len(meta.shard_bytes)} shards and {len(meta.checksums)} checksums: "
            f"must be as many, 1 to {MAX_SHARDS}"
        )
    if not 1 <= len(ref.key) <= MAX_KEY_BYTES:
        raise ValueError(f"key of {len(ref.key)} bytes: must be 1 to {MAX_KEY_BYTES}")
    header[:HEADER_BYTES] = bytes(HEADER_BYTES)
    _FIXED.pack_into(
        header,
        0,
        MAGIC,
        VERSION + (EXPIRING if meta.expires_at else 0) + (LIMITED if meta.limited else 0),
        _KINDS[meta.checksum_kind],
        ref.key[0],
        len(meta.shard_bytes),
        meta.payload_bytes,
        bytes.fromhex(ref.namespace),
        len(ref.key),
        ref.key,
    )
    if len(meta.previous) <= MAX_KEY_BYTES:
        header[_PREVIOUS_AT] = len(meta.previous)
        header[_PREVIOUS_AT + 1 : _PREVIOUS_AT + 1 + len(meta.previous)] = meta.previous
    _FACTS.pack_into(header, _FACTS_AT, meta.tenant, meta.expires_at)
    for number, (size, digest) in enumerate(zip(meta.shard_bytes, meta.checksums, strict=True)):
        _SHARD.pack_into(header, SHARDS_AT + number * _SHARD.size, size, digest)
    finish_header(header, checksum)


def finish_header(header: memoryview, checksum: Checksum) -> None:
    """Writes the checksum of the header, as the last step."""
    header[DIGEST_AT:HEADER_BYTES] = checksum.digest(header[:DIGEST_AT])


def describe_seal(header: bytes) -> str:
    """How an object says that it is sealed, for people. Nothing is verified."""
    if len(header) < HEADER_BYTES or header[:8] != MAGIC:
        return "not an object"
    (version,) = _VERSION.unpack_from(header)
    if version not in VERSIONS:
        return f"format version {version}"
    raw = _SEAL.unpack_from(header, _SEAL_AT)[1].rstrip(b"\0")
    key_id = "".join(chr(byte) if 32 < byte < 127 else "?" for byte in raw)
    if version in ENCRYPTED_VERSIONS:
        return f"AES256GCM, key {key_id}"
    return f"tag, key {key_id}" if key_id else "no tag"


def previous_of(header: bytes | memoryview) -> bytes:
    """The key of the object before this one in its prefix, of a header that is not encrypted; empty
    if it is not known. Only the order of eviction depends on it."""
    length = header[_PREVIOUS_AT]
    if length > MAX_KEY_BYTES:
        return b""
    return bytes(header[_PREVIOUS_AT + 1 : _PREVIOUS_AT + 1 + length])


def facts_of(header: bytes | memoryview) -> ObjectFacts | None:
    """The facts of a whole header; None if it is damaged or of another release. What they are used
    for, accounts and removal, needs no key."""
    if len(header) < HEADER_BYTES or header[:8] != MAGIC:
        return None
    (version,) = _VERSION.unpack_from(header)
    checksum = by_kind(_NAMES.get(header[10], ""))
    if version not in VERSIONS or checksum is None:
        return None
    view = memoryview(header)
    if checksum.digest(view[:DIGEST_AT]) != view[DIGEST_AT:HEADER_BYTES]:
        return None
    return _facts_of(view)


def _facts_of(header: bytes | memoryview) -> ObjectFacts:
    tenant, expires_at = _FACTS.unpack_from(header, _FACTS_AT)
    return ObjectFacts(tenant if any(tenant) else NO_TENANT, expires_at)


def set_seal(header: memoryview, encrypted: bool, seal: SealFields) -> None:
    """Writes the fields of a seal, and the version, into a header as ``write_header`` leaves it.
    The header must be finished afterwards."""
    (version,) = _VERSION.unpack_from(header)
    expiring = EXPIRING if version in EXPIRING_VERSIONS else 0
    limited = LIMITED if version in LIMITED_VERSIONS else 0
    version = (ENCRYPTED_VERSION if encrypted else VERSION) + expiring + limited
    header[8:10] = version.to_bytes(2, "little")
    _SEAL.pack_into(header, _SEAL_AT, seal.tag, seal.key_id.encode("ascii"), seal.salt, seal.nonce)


def is_foreign(header: bytes | memoryview) -> bool:
    """Whether this is the start of an object of a format version that this release cannot read.

    A damaged version field does not make an object foreign: with the version that it had, the
    checksum of the header is right.
    """
    if len(header) < _VERSION.size or header[:8] != MAGIC:
        return False
    (version,) = _VERSION.unpack_from(header)
    if version in VERSIONS:
        return False
    if len(header) < HEADER_BYTES:
        return True
    checksum = by_kind(_NAMES.get(header[10], ""))
    if checksum is None:
        return True
    own = bytearray(header[:HEADER_BYTES])
    for candidate in VERSIONS:
        own[8:10] = candidate.to_bytes(2, "little")
        if checksum.digest(memoryview(own)[:DIGEST_AT]) == own[DIGEST_AT:]:
            return False
    return True


def read_header(header: memoryview, ref: ObjectRef, payload_bytes: int) -> ObjectMeta:
    """Parses and verifies the header of object ``ref``, which must not be encrypted. Its tag is not
    checked.

    Raises what ``read_fixed`` and ``read_shards`` raise, and ``TierUntrustedError``.
    """
    fixed = read_fixed(header, ref, payload_bytes)
    if fixed.encrypted:
        raise TierUntrustedError("no_key", f"encrypted with key {fixed.seal.key_id!r}")
    return read_shards(header, fixed)


def read_fixed(header: memoryview, ref: ObjectRef, payload_bytes: int) -> FixedHeader:
    """Verifies the header of object ``ref`` and parses its fixed part.

    Raises ``TierCorruptError`` if it is not that of exactly this object and size,
    ``TierForeignError`` if it has another format version, and ``TierUnverifiableError`` if this
    process cannot compute its checksum.
    """
    magic, version, kind, group, shards, length, namespace, key_bytes, key = _FIXED.unpack_from(
        header, 0
    )
    if magic != MAGIC:
        raise TierCorruptError(f"not an object file: it starts with {magic!r}")
    if version not in VERSIONS:
        if is_foreign(header):
            raise TierForeignError(f"format version {version}: this release reads {VERSIONS}")
        raise TierCorruptError(f"damaged format version {version}")
    if kind not in _NAMES:
        raise TierCorruptError(f"unknown checksum kind {kind}")
    checksum = by_kind(_NAMES[kind])
    if checksum is None:
        # Other processes may be able to verify it, so it must not be removed as corrupt.
        raise TierUnverifiableError(f"checksum {_NAMES[kind]} is not available in this process")
    if checksum.digest(header[:DIGEST_AT]) != header[DIGEST_AT:HEADER_BYTES]:
        raise TierCorruptError("header checksum mismatch")
    if namespace.hex() != ref.namespace or key[:key_bytes] != ref.key or group != ref.key[0]:
        raise TierCorruptError(f"file of another object: {namespace.hex()}/{key[:key_bytes].hex()}")
    if not 1 <= shards <= MAX_SHARDS:
        raise TierCorruptError(f"{shards} shards: must be 1 to {MAX_SHARDS}")
    if length != payload_bytes:
        raise TierCorruptError(f"payload of {length} bytes, expected {payload_bytes}")
    facts = _facts_of(header)
    if bool(facts.expires_at) != (version in EXPIRING_VERSIONS):
        raise TierCorruptError(f"format version {version}, and expires at {facts.expires_at}")
    tag, key_id, salt, nonce = _SEAL.unpack_from(header, _SEAL_AT)
    seal = SealFields(tag, key_id.rstrip(b"\0").decode("ascii", "replace"), salt, nonce)
    return FixedHeader(version, checksum, shards, length, seal, facts)


def read_shards(header: memoryview, fixed: FixedHeader) -> ObjectMeta:
    """Parses the rest of the header, decrypted if it was encrypted. Raises ``TierCorruptError``."""
    sizes, digests = [], []
    for number in range(fixed.shards):
        size, digest = _SHARD.unpack_from(header, SHARDS_AT + number * _SHARD.size)
        sizes.append(size)
        digests.append(digest)
    facts = fixed.facts
    meta = ObjectMeta(
        tuple(sizes),
        fixed.checksum.kind,
        tuple(digests),
        previous_of(header),
        facts.tenant,
        facts.expires_at,
        fixed.version in LIMITED_VERSIONS,
    )
    if meta.payload_bytes != fixed.payload_bytes:
        raise TierCorruptError(
            f"payload of {fixed.payload_bytes} bytes, shards of {meta.payload_bytes}"
        )
    return meta


def verify_payload(payload: Payload, meta: ObjectMeta) -> None:
    """Raises ``TierCorruptError`` unless every shard matches its checksum and padding is zero."""
    checksum = by_kind(meta.checksum_kind)
    if checksum is None:
        raise TierUnverifiableError(
            f"checksum {meta.checksum_kind} is not available in this process"
        )
    shards = zip(shards_of(payload, meta.shard_bytes), meta.shard_bytes, strict=True)
    for number, (shard, size) in enumerate(shards):
        if checksum.digest(shard[:size]) != meta.checksums[number]:
            raise TierCorruptError(f"checksum mismatch in shard {number}")
        padding = shard.nbytes - size
        if padding and padding != shard[size:].tobytes().count(0):
            raise TierCorruptError(f"the padding after shard {number} is not zero")


def clear_padding(payload: Payload, meta: ObjectMeta) -> None:
    """Zeroes the padding after each shard."""
    for shard, size in zip(shards_of(payload, meta.shard_bytes), meta.shard_bytes, strict=True):
        if shard.nbytes != size:
            shard[size:] = bytes(shard.nbytes - size)
