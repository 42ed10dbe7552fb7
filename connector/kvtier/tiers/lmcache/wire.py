"""What the tier and its child process say to each other.

Each lane has a socket pair for requests and replies (one JSON object per packet) and a segment of
shared memory for bytes. A lane serves one request at a time: its segment belongs to the child from
the request to the reply, and to the tier otherwise.

Lists of objects travel in the segment as entries of a fixed size, which catalogs use as well.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from kvtier.tiers.base import ObjectRef

LMCACHE_VERSION = "0.5.6"
"""The only version whose connectors this tier was tested with; they have no stable interface."""
MAX_PACKET_BYTES = 65_536
MAX_KEY_BYTES = 49
"""An LMCache server takes names of 150 characters; a name has 51 beside the key's hex digits."""
MAX_OBJECT_BYTES = (1 << 31) - 1
"""LMCache's own metadata has signed 32-bit lengths."""
OVERHEAD_BYTES = 1024
"""Of an object in the back end, beside its header and payload: names and LMCache's metadata."""
CATALOG = "catalog"
"""In the place of a namespace: where the tier keeps its list of objects at back ends without
one."""

Operation = Literal["get", "put", "exists", "delete", "list"]
Outcome = Literal["done", "found", "missing", "corrupt", "unavailable", "no_space", "unsupported"]


class OpenRequest(msgspec.Struct, frozen=True):
    """On the control socket: use this back end from now on."""

    url: str
    credentials_directory: str | None = None


class OpenReply(msgspec.Struct, frozen=True):
    """``error``: why the child cannot serve; empty if it can. ``can_list``, ``can_delete``: what
    the back end can do."""

    version: str = ""
    error: str = ""
    can_list: bool = False
    can_delete: bool = False


class LaneRequest(msgspec.Struct, frozen=True):
    """One operation. ``size_bytes``: of the object to write, or the most that may be read.
    ``segment_bytes``: current size of the segment. ``start``: number of the first entry to list;
    0 reads the whole list again.
    """

    operation: Operation
    space: str = ""
    key: str = ""
    size_bytes: int = 0
    segment_bytes: int = 0
    seconds: float = 0.0
    start: int = 0


class LaneReply(msgspec.Struct, frozen=True):
    """The outcome of a request. ``size_bytes``: bytes in the segment. ``more``: entries follow."""

    outcome: Outcome
    size_bytes: int = 0
    text: str = ""
    more: bool = False


encode = msgspec.json.encode
decode_open = msgspec.json.Decoder(OpenRequest).decode
decode_opened = msgspec.json.Decoder(OpenReply).decode
decode_request = msgspec.json.Decoder(LaneRequest).decode
decode_reply = msgspec.json.Decoder(LaneReply).decode

_ENTRY = struct.Struct(f"<16sQB{MAX_KEY_BYTES}s")
ENTRY_BYTES = _ENTRY.size


def pack_entries(entries: Iterable[tuple[ObjectRef, int]]) -> bytes:
    """Objects and their sizes in bytes."""
    return b"".join(
        _ENTRY.pack(bytes.fromhex(ref.namespace), size, len(ref.key), ref.key)
        for ref, size in entries
    )


def unpack_entries(content: memoryview) -> Iterator[tuple[ObjectRef, int]]:
    """The objects in ``content``; what is left behind the last whole entry is ignored."""
    whole = content[: len(content) // ENTRY_BYTES * ENTRY_BYTES]
    for namespace, size, length, key in _ENTRY.iter_unpack(whole):
        yield ObjectRef(namespace.hex(), key[:length]), size
