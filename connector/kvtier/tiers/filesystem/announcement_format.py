"""The bytes of announcements: what a writer of a shared directory has published and removed.

An *entry* names one object. A *frame* holds entries of one writer, in order, under that writer's
next number. A *block* of 4 KiB holds frames and has a number of its own; it is what is written to a
log (``announcement_ring``). The leader copies frames of all writers into its own log as they are.

A block's digest proves that it is complete. A frame's digest proves the same and, if the tier has
keys (``isolation.keySecretRef``), that a holder of the keys has made it: it is keyed with the
current one, and the frame names it. An announcement is a hint in any case: an object is verified
when it is read. A frame that is not accepted costs misses until the next scan.

Block: magic (8), log id (8), number (8), blocks in the log (4), used bytes (4), digest (16),
frames.
Frame: size (2), version (1), length of the key id (1), entries (2), zeros (2), writer (8), number
(8), digest (16), key id, entries. Entry: flags (1), length of the key (1), size in units of 4 KiB
(4), namespace (16, unless it is that of the entry before), key. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hmac import compare_digest

from kvtier.hashing import blake3_digest, keyed_digest
from kvtier.tiers.base import ALIGNMENT_BYTES
from kvtier.tiers.isolation_keys import KeySet

BLOCK_BYTES = 4096
MAX_BLOCKS = 256
"""Of one log."""
VERSION = 1
_MAGIC = b"KVTANN\x01\n"
_BLOCK = struct.Struct("<8s8sQII16s")
_FRAME = struct.Struct("<HBBHHQQ16s")
_ENTRY = struct.Struct("<BBI")
_DIGEST_BYTES = 16
_FRAME_DIGEST_AT = _FRAME.size - _DIGEST_BYTES
_BLOCK_DIGEST_AT = _BLOCK.size - _DIGEST_BYTES
_PRESENT, _SAME_NAMESPACE, _FOLLOWS = 1, 2, 4
_NAMESPACE_BYTES = 16
_MAX_KEY_BYTES = 64
_MAX_UNITS = (1 << 24) - 1
MAX_FRAME_BYTES = BLOCK_BYTES - _BLOCK.size
_DOMAIN = b"kvtier announcements v1"


@dataclass(frozen=True, slots=True)
class Announcement:
    """One object that was published, or removed (``size_bytes`` 0). ``previous``: key of the object
    before it in its prefix; empty if that is not known."""

    namespace: str
    key: bytes
    size_bytes: int
    previous: bytes = b""


@dataclass(frozen=True, slots=True)
class Frame:
    """Entries of one writer. ``number`` rises by one with each of its frames."""

    writer: int
    number: int
    entries: tuple[Announcement, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a log. ``log_id``: differs each time a log is created. ``blocks``: how many the
    log has."""

    log_id: bytes
    number: int
    blocks: int
    frames: tuple[bytes, ...]


class RejectedError(Exception):
    """A frame that is not accepted. ``reason``: for the counter."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


# Frames.


def _encode_entry(entry: Announcement, before: Announcement | None) -> bytes:
    flags = _PRESENT if entry.size_bytes else 0
    namespace = b""
    if before is not None and before.namespace == entry.namespace:
        flags |= _SAME_NAMESPACE
        if entry.previous and entry.previous == before.key:
            flags |= _FOLLOWS
    else:
        namespace = bytes.fromhex(entry.namespace)
    units = min(-(-entry.size_bytes // ALIGNMENT_BYTES), _MAX_UNITS)
    return _ENTRY.pack(flags, len(entry.key), units) + namespace + entry.key


def encode_frames(
    entries: Iterable[Announcement], writer: int, first_number: int, keys: KeySet | None
) -> list[bytes]:
    """The entries as frames that fit a block, numbered from ``first_number``."""
    key_id = b"" if keys is None else keys.current.id.encode()
    room = MAX_FRAME_BYTES - _FRAME.size - len(key_id)
    frames: list[bytes] = []
    parts: list[bytes] = []
    size, before = 0, None

    def finish() -> None:
        body = key_id + b"".join(parts)
        head = _FRAME.pack(
            _FRAME.size + len(body), VERSION, len(key_id), len(parts), 0,
            writer, first_number + len(frames), bytes(_DIGEST_BYTES),
        )  # fmt: skip
        digest = _frame_digest(head, body, None if keys is None else keys.current.tag_key)
        frames.append(head[:_FRAME_DIGEST_AT] + digest + body)

    for entry in entries:
        part = _encode_entry(entry, before)
        if size + len(part) > room:
            finish()
            parts, size, before = [], 0, None
            part = _encode_entry(entry, None)
        parts.append(part)
        size += len(part)
        before = entry
    if parts:
        finish()
    return frames


def _frame_digest(head: bytes, body: bytes, tag_key: bytes | None) -> bytes:
    covered = head[:_FRAME_DIGEST_AT]
    if tag_key is None:
        return blake3_digest(covered + body, _DIGEST_BYTES)
    return keyed_digest(tag_key, _DOMAIN, covered, body)[:_DIGEST_BYTES]


def decode_frame(frame: bytes, keys: KeySet | None) -> Frame:
    """The entries of a frame. Raises ``RejectedError``: ``other_version``, ``invalid``, ``no_key``
    (it is keyed and this tier has no keys), ``unkeyed``, ``unknown_key`` or ``wrong_tag``."""
    if len(frame) < _FRAME.size:
        raise RejectedError("invalid")
    size, version, key_bytes, count, _, writer, number, digest = _FRAME.unpack_from(frame)
    if version != VERSION:
        raise RejectedError("other_version")
    if size != len(frame):
        raise RejectedError("invalid")
    body = frame[_FRAME.size :]
    tag_key = _tag_key(body[:key_bytes], keys)
    if not compare_digest(_frame_digest(frame[: _FRAME.size], body, tag_key), digest):
        raise RejectedError("invalid" if tag_key is None else "wrong_tag")
    return Frame(writer, number, tuple(_decode_entries(body[key_bytes:], count)))


def _tag_key(key_id: bytes, keys: KeySet | None) -> bytes | None:
    if keys is None:
        if key_id:
            raise RejectedError("no_key")
        return None
    if not key_id:
        raise RejectedError("unkeyed")
    key = keys.by_id.get(key_id.decode("ascii", "replace"))
    if key is None:
        raise RejectedError("unknown_key")
    return key.tag_key


def _decode_entries(body: bytes, count: int) -> Iterator[Announcement]:
    position = 0
    before: Announcement | None = None
    for _ in range(count):
        if position + _ENTRY.size > len(body):
            raise RejectedError("invalid")
        flags, key_bytes, units = _ENTRY.unpack_from(body, position)
        position += _ENTRY.size
        if flags & _SAME_NAMESPACE:
            if before is None:
                raise RejectedError("invalid")
            namespace = before.namespace
        else:
            namespace = body[position : position + _NAMESPACE_BYTES].hex()
            position += _NAMESPACE_BYTES
        key = body[position : position + key_bytes]
        position += key_bytes
        present = bool(flags & _PRESENT)
        if (
            position > len(body)
            or not 1 <= key_bytes <= _MAX_KEY_BYTES
            # A header and at least one block of payload.
            or (present and not 2 <= units <= _MAX_UNITS)
        ):
            raise RejectedError("invalid")
        previous = before.key if flags & _FOLLOWS and before is not None else b""
        before = Announcement(namespace, key, units * ALIGNMENT_BYTES if present else 0, previous)
        yield before


# Blocks.


def pack_blocks(frames: Iterable[bytes]) -> list[bytes]:
    """Groups frames, in order, by the block that they share."""
    groups: list[bytes] = []
    group = b""
    for frame in frames:
        if len(group) + len(frame) > MAX_FRAME_BYTES:
            groups.append(group)
            group = b""
        group += frame
    return [*groups, group] if group else groups


def encode_block(log_id: bytes, number: int, blocks: int, frames: bytes) -> bytes:
    """A block with these frames."""
    used = _BLOCK.size + len(frames)
    head = _BLOCK.pack(_MAGIC, log_id, number, blocks, used, bytes(_DIGEST_BYTES))
    head = head[:_BLOCK_DIGEST_AT]
    digest = blake3_digest(head + frames, _DIGEST_BYTES)
    return (head + digest + frames).ljust(BLOCK_BYTES, b"\0")


def decode_block(data: bytes) -> Block | None:
    """The block; None if it is not a complete one of this version."""
    if len(data) != BLOCK_BYTES:
        return None
    magic, log_id, number, blocks, used, digest = _BLOCK.unpack_from(data)
    if magic != _MAGIC or not _BLOCK.size <= used <= BLOCK_BYTES or not 1 <= blocks <= MAX_BLOCKS:
        return None
    frames = data[_BLOCK.size : used]
    if digest != blake3_digest(data[:_BLOCK_DIGEST_AT] + frames, _DIGEST_BYTES):
        return None
    found: list[bytes] = []
    while frames:
        size = int.from_bytes(frames[:2], "little")
        if not _FRAME.size <= size <= len(frames):
            return None
        found.append(frames[:size])
        frames = frames[size:]
    return Block(log_id, number, blocks, tuple(found))
