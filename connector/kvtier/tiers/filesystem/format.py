"""The file format: one object per file.

    offset  size  content (integers are little-endian)
         0     8  magic "KVTIEROB"
         8     2  format version, 1
        10     1  checksum kind: 1 XXH3-128, 2 BLAKE3 cut to 128 bits
        11     1  KV cache group (first byte of the key)
        12     4  number of shards, 1..64
        16     8  payload length: the sum of the aligned shard sizes
        24    16  namespace
        40     1  length of the key, 1..64
        41    64  key, zeros behind it
       105     7  zeros
       112    32  keyed BLAKE3 tag of the object if objects are keyed, else zeros
       144   112  zeros
       256  40*n  per shard: exact size (8), checksum over exactly these bytes (16), zeros (16)
         …     …  zeros
      4080    16  checksum, of the same kind, over bytes 0..4079
      4096     …  shards, each from a multiple of 4096, zeros between them

Every byte is covered: the header and the shards by their checksums, the padding by being zero, the
end by the file's size. A file that parses and verifies is the requested object, byte for byte.
"""

from __future__ import annotations

import struct

from kvtier.errors import TierCorruptError, TierUnverifiableError
from kvtier.tiers.base import ObjectMeta, ObjectRef, aligned
from kvtier.tiers.checksum import DIGEST_BYTES, Blake3, Xxh3, by_kind

HEADER_BYTES = 4096
MAGIC = b"KVTIEROB"
VERSION = 1
MAX_SHARDS = 64
MAX_KEY_BYTES = 64
SUFFIX = ".kv"

_KINDS = {Xxh3.kind: 1, Blake3.kind: 2}
_NAMES = {number: kind for kind, number in _KINDS.items()}
_FIXED = struct.Struct("<8sHBBIQ16sB64s")
_SHARD = struct.Struct("<Q16s16x")
_SHARDS_AT = 256
_DIGEST_AT = HEADER_BYTES - DIGEST_BYTES


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
    header[:] = bytes(HEADER_BYTES)
    _FIXED.pack_into(
        header,
        0,
        MAGIC,
        VERSION,
        _KINDS[meta.checksum_kind],
        ref.key[0],
        len(meta.shard_bytes),
        meta.payload_bytes,
        bytes.fromhex(ref.namespace),
        len(ref.key),
        ref.key,
    )
    for number, (size, digest) in enumerate(zip(meta.shard_bytes, meta.checksums, strict=True)):
        _SHARD.pack_into(header, _SHARDS_AT + number * _SHARD.size, size, digest)
    header[_DIGEST_AT:] = checksum.digest(header[:_DIGEST_AT])


def read_header(header: memoryview, ref: ObjectRef, payload_bytes: int) -> ObjectMeta:
    """Parses and verifies the header of object ``ref``.

    Raises ``TierCorruptError`` if it is not that of exactly this object and size, and
    ``TierUnverifiableError`` if this process cannot compute its checksum.
    """
    magic, version, kind, group, shards, length, namespace, key_bytes, key = _FIXED.unpack_from(
        header, 0
    )
    if magic != MAGIC:
        raise TierCorruptError(f"not an object file: it starts with {magic!r}")
    if version != VERSION:
        raise TierCorruptError(f"unsupported format version {version}: must be {VERSION}")
    if kind not in _NAMES:
        raise TierCorruptError(f"unknown checksum kind {kind}")
    checksum = by_kind(_NAMES[kind])
    if checksum is None:
        # Other processes may be able to verify it, so it must not be removed as corrupt.
        raise TierUnverifiableError(f"checksum {_NAMES[kind]} is not available in this process")
    if checksum.digest(header[:_DIGEST_AT]) != header[_DIGEST_AT:]:
        raise TierCorruptError("header checksum mismatch")
    if namespace.hex() != ref.namespace or key[:key_bytes] != ref.key or group != ref.key[0]:
        raise TierCorruptError(f"file of another object: {namespace.hex()}/{key[:key_bytes].hex()}")
    if not 1 <= shards <= MAX_SHARDS:
        raise TierCorruptError(f"{shards} shards: must be 1 to {MAX_SHARDS}")
    sizes, digests = [], []
    for number in range(shards):
        size, digest = _SHARD.unpack_from(header, _SHARDS_AT + number * _SHARD.size)
        sizes.append(size)
        digests.append(digest)
    meta = ObjectMeta(tuple(sizes), checksum.kind, tuple(digests))
    if length != meta.payload_bytes or length != payload_bytes:
        raise TierCorruptError(
            f"payload of {length} bytes, shards of {meta.payload_bytes}, expected {payload_bytes}"
        )
    return meta


def verify_payload(payload: memoryview, meta: ObjectMeta) -> None:
    """Raises ``TierCorruptError`` unless every shard matches its checksum and padding is zero."""
    checksum = by_kind(meta.checksum_kind)
    if checksum is None:
        raise TierUnverifiableError(
            f"checksum {meta.checksum_kind} is not available in this process"
        )
    start = 0
    for number, (size, digest) in enumerate(zip(meta.shard_bytes, meta.checksums, strict=True)):
        end = start + size
        if checksum.digest(payload[start:end]) != digest:
            raise TierCorruptError(f"checksum mismatch in shard {number}")
        start += aligned(size)
        if start - end != payload[end:start].tobytes().count(0):
            raise TierCorruptError(f"the padding after shard {number} is not zero")


def clear_padding(payload: memoryview, meta: ObjectMeta) -> None:
    """Zeroes the padding between shards."""
    start = 0
    for size in meta.shard_bytes:
        end, start = start + size, start + aligned(size)
        if end != start:
            payload[end:start] = bytes(start - end)
