"""One rank's shard of a chunk as an LMCache object: opaque bytes that verify themselves.

LMCache thinks in tokens: an object has a shape of (1, 1, tokens, bytes per token) and the type
uint8, so that its accounting, which multiplies, is that of the real bytes. They are KVTier's header
(``tiers/filesystem/format.py``) and the shard, whatever the back end does to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.hashing import blake3_digest
from kvtier.lookup.wire import MAX_STORE
from kvtier.tiers.base import ObjectMeta, ObjectRef, aligned
from kvtier.tiers.checksum import preferred
from kvtier.tiers.filesystem.format import (
    HEADER_BYTES,
    read_header,
    verify_payload,
    write_header,
)

STORE_BYTES = 8
MARKER = b"kvtier commit 1"
MARKER_BYTES = 64
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """The chunk accounting of one rank. ``shard_bytes``: of a whole chunk on this rank."""

    chunk_tokens: int
    shard_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """LMCache's last dimension: the object's bytes, spread over its tokens and rounded up."""
        return -(-(HEADER_BYTES + aligned(self.shard_bytes)) // self.chunk_tokens)

    @property
    def object_bytes(self) -> int:
        """What LMCache allocates for one chunk."""
        return self.bytes_per_token * self.chunk_tokens


def object_ref(namespace: str, key: bytes, store: int) -> ObjectRef:
    """Names the shard of one store: that of another store does not verify as this one."""
    return ObjectRef(namespace, key + store.to_bytes(STORE_BYTES, "big"))


def shard_of(content: memoryview, shape: ObjectShape) -> memoryview:
    """The part of an object that holds the shard."""
    return content[HEADER_BYTES : HEADER_BYTES + shape.shard_bytes]


def seal_object(content: memoryview, shape: ObjectShape, ref: ObjectRef) -> None:
    """Writes the header around a shard that is in its place, and zeros behind it."""
    checksum = preferred()
    digest = checksum.digest(shard_of(content, shape))
    end = HEADER_BYTES + shape.shard_bytes
    content[end:] = bytes(len(content) - end)
    meta = ObjectMeta((shape.shard_bytes,), checksum.kind, (digest,))
    write_header(content[:HEADER_BYTES], ref, meta)


def verify_object(content: memoryview, shape: ObjectShape, ref: ObjectRef) -> None:
    """Raises ``TierError`` unless the content is the object ``ref``, byte for byte."""
    payload = content[HEADER_BYTES : HEADER_BYTES + aligned(shape.shard_bytes)]
    meta = read_header(content[:HEADER_BYTES], ref, aligned(shape.shard_bytes))
    verify_payload(payload, meta)


def spoil_object(content: memoryview) -> None:
    """Makes sure that the content does not verify as any object."""
    content[:HEADER_BYTES] = bytes(HEADER_BYTES)


def chunk_hash(key: bytes, kind: bytes = b"shard") -> int:
    """LMCache's number of an object, 64 bits as of its own hashes.

    Two keys with the same number overwrite each other; the header tells them apart.
    """
    return int.from_bytes(blake3_digest(memoryview(kind + b"/" + key), 8), "big")


def pack_marker(namespace: str, key: bytes, store: int) -> bytes:
    """The content of a commit marker, ``MARKER_BYTES`` long."""
    text = MARKER + store.to_bytes(STORE_BYTES, "big")
    digest = blake3_digest(memoryview(text + namespace.encode() + key), _DIGEST_BYTES)
    return (text + digest).ljust(MARKER_BYTES, b"\0")


def unpack_marker(content: bytes, namespace: str, key: bytes) -> int:
    """The store that a marker of this chunk names; 0 if it is not a valid one."""
    start = len(MARKER)
    store = int.from_bytes(content[start : start + STORE_BYTES], "big")
    if not 0 < store <= MAX_STORE or content[:MARKER_BYTES] != pack_marker(namespace, key, store):
        return 0
    return store
