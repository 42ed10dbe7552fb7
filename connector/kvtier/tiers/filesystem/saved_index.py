"""The saved index: what a namespace held, in one file, so that a large directory serves at once
after a start. Listing a million files takes seconds on a disk and minutes on NFS.

The leader writes ``<namespace>/index`` now and then. A process that opens the directory believes it
for the time being and verifies it in the background, by the scan that every start makes: what is
not there is dropped, what is missing is added. A saved index that is stale or forged therefore
costs time: an object that does not exist is a miss when it is read. One that is damaged, too large,
of another version or, where the tier has keys (``isolation.keySecretRef``), not made with one of
them is ignored, and so is a small one.

Head (little-endian): magic (8), version (2), zeros (2), objects (4), namespace (16), key id (32),
digest (16). Object: use (4), use of the object before it in its prefix (4, 0: not known), size in
units of 4 KiB (4), how often it was used (2), flags (1; 1: used again, 2: its facts are known, 4:
they follow the key), length of the key (1), key, tenant (8), when it expires (8). Objects are in no
order; ``use`` ranks them by their last use, from 1. The digest covers everything else. Version 1
had the first flag only, and versions 1 and 2 did not say how often an object was used.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvtier.hashing import derived_key
from kvtier.tenants import NO_TENANT
from kvtier.tiers.base import ALIGNMENT_BYTES, NO_FACTS, ObjectFacts
from kvtier.tiers.filesystem.format import MAX_KEY_BYTES
from kvtier.tiers.filesystem.index import Index, SavedObject
from kvtier.tiers.isolation_keys import KeySet

_HEAD = struct.Struct("<8sHHI16s32s16s")
_OBJECT = struct.Struct("<IIIHBB")
_OBJECT_WITHOUT_USES = struct.Struct("<IIIBB")
_FACTS = struct.Struct("<8sQ")
_MAGIC, _VERSION, _VERSIONS = b"KVTIERIX", 3, (1, 2, 3)
_USES_VERSION = 3
_DIGEST_BYTES = 16
_DOMAIN = "kvtier saved index 1"
_OFTEN, _KNOWN, _HAS_FACTS = 1, 2, 4
_PIECE_BYTES = 1 << 18
_PART_OBJECTS = 4_096
_SLACK_OBJECTS = 4_096
"""Objects that may be added while the index is being saved. What exceeds them is left out."""


class InvalidIndexError(ValueError):
    """A saved index cannot be used. The message says why."""


@dataclass(frozen=True, slots=True)
class SavedIndex:
    """The objects of one namespace, least recently used first: the rank of their use, their place
    in ``data``, and that of the object before each in its prefix (0: not known). ``counts_uses``:
    whether it says how often each was used."""

    namespace: str
    data: bytes
    uses: NDArray[np.uint32]
    places: NDArray[np.int64]
    previous_places: NDArray[np.int64]
    counts_uses: bool

    def __len__(self) -> int:
        return len(self.uses)

    def object_at(self, place: int, previous_place: int) -> SavedObject:
        """The object at a place. ``previous_place``: that of the one before it, or 0."""
        layout = _layout(self.counts_uses)
        fields = layout.unpack_from(self.data, place)
        flags, length = fields[-2:]
        start = place + layout.size
        previous = self._key_at(previous_place) if previous_place else b""
        return SavedObject(
            self.namespace,
            self.data[start : start + length],
            fields[2] * ALIGNMENT_BYTES,
            previous,
            bool(flags & _OFTEN),
            self._facts(start + length, flags),
            fields[3] if self.counts_uses else 0,
        )

    def uses_by_key(self) -> Iterator[tuple[bytes, int]]:
        """How often each object was used, if the index says so."""
        for place in self.places.tolist() if self.counts_uses else ():
            _, _, _, uses, _, length = _OBJECT.unpack_from(self.data, place)
            start = place + _OBJECT.size
            yield self.data[start : start + length], uses

    def _facts(self, at: int, flags: int) -> ObjectFacts | None:
        if not flags & _HAS_FACTS:
            return NO_FACTS if flags & _KNOWN else None
        tenant, expires_at = _FACTS.unpack_from(self.data, at)
        return ObjectFacts(tenant if any(tenant) else NO_TENANT, expires_at)

    def _key_at(self, place: int) -> bytes:
        start = place + _layout(self.counts_uses).size
        return self.data[start : start + self.data[start - 1]]


def _layout(counts_uses: bool) -> struct.Struct:
    """An object without its key: use, use of the object before, size, uses if they are counted,
    flags, length of the key."""
    return _OBJECT if counts_uses else _OBJECT_WITHOUT_USES


def size_bytes(index: Index, namespace: str) -> int:
    """How large the saved index of a namespace becomes at most."""
    objects = index.count_of(namespace) + _SLACK_OBJECTS
    return _HEAD.size + objects * (_OBJECT.size + index.longest_key_bytes + _FACTS.size)


def write(path: str, index: Index, namespace: str, keys: KeySet | None, mode: int) -> None:
    """Creates the file, of at most ``size_bytes``. Raises ``OSError``; the caller removes a partial
    file."""
    ranks = index.ranks()
    left = size_bytes(index, namespace) - _HEAD.size
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        key_id = b"" if keys is None else keys.current.id.encode("ascii")
        digest = _hasher(None if keys is None else keys.current.tag_key)
        file.write(bytes(_HEAD.size))
        objects = 0
        piece = bytearray()
        for key, node in index.nodes(namespace):
            if node >= len(ranks) or not ranks[node]:
                continue
            units, previous, often = index.describe(node)
            before = int(ranks[previous]) if previous < len(ranks) else 0
            facts = index.facts(node)
            flags = (_OFTEN if often else 0) | (0 if facts is None else _KNOWN)
            told = b""
            if facts is not None and facts != NO_FACTS:
                flags |= _HAS_FACTS
                told = _FACTS.pack(facts.tenant, facts.expires_at)
            record = _OBJECT.pack(
                int(ranks[node]), before, units, index.uses_of(node), flags, len(key)
            )
            record += key + told
            left -= len(record)
            if left < 0:
                break
            piece += record
            objects += 1
            if len(piece) >= _PIECE_BYTES:
                digest.update(piece)
                file.write(piece)
                piece.clear()
        digest.update(piece)
        file.write(piece)
        head = _head(objects, namespace, key_id, bytes(_DIGEST_BYTES))
        digest.update(head)
        file.seek(0)
        file.write(_head(objects, namespace, key_id, digest.digest(_DIGEST_BYTES)))


def _head(objects: int, namespace: str, key_id: bytes, digest: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, _VERSION, 0, objects, bytes.fromhex(namespace), key_id, digest)


def _hasher(tag_key: bytes | None) -> blake3:
    if tag_key is None:
        return blake3()
    # A key of its own, so that no digest of another kind can take its place.
    return blake3(key=derived_key(tag_key, _DOMAIN))


def read(path: Path, namespace: str, keys: KeySet | None, max_objects: int) -> SavedIndex:
    """Reads and verifies the file. Raises ``OSError`` and ``InvalidIndexError``."""
    data = _content(path, _HEAD.size + max_objects * (_OBJECT.size + MAX_KEY_BYTES + _FACTS.size))
    if len(data) < _HEAD.size:
        raise InvalidIndexError("too short")
    magic, version, _, objects, name, key_id, digest = _HEAD.unpack_from(data)
    if magic != _MAGIC or version not in _VERSIONS:
        raise InvalidIndexError("another format or version")
    if name.hex() != namespace:
        raise InvalidIndexError("of another namespace")
    if objects > max_objects:
        raise InvalidIndexError("more objects than are indexed")
    hasher = _hasher(_tag_key(key_id.rstrip(b"\0"), keys))
    hasher.update(memoryview(data)[_HEAD.size :])
    hasher.update(data[: _HEAD.size - _DIGEST_BYTES] + bytes(_DIGEST_BYTES))
    if not compare_digest(hasher.digest(_DIGEST_BYTES), digest):
        raise InvalidIndexError("wrong digest")
    return _parsed(data, namespace, objects, version >= _USES_VERSION)


def _tag_key(key_id: bytes, keys: KeySet | None) -> bytes | None:
    if keys is None:
        if key_id:
            raise InvalidIndexError("keyed")
        return None
    key = keys.by_id.get(key_id.decode("ascii", "replace"))
    if key is None:
        raise InvalidIndexError("not made with a key of this tier")
    return key.tag_key


def _content(path: Path, limit: int) -> bytes:
    # O_NONBLOCK: opening a pipe in its place would wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            raise InvalidIndexError("not a file, or too large")
        return file.read(limit + 1)


def _parsed(data: bytes, namespace: str, objects: int, counts_uses: bool) -> SavedIndex:
    """Raises ``InvalidIndexError`` unless the objects end where the file does."""
    uses = np.zeros(objects, dtype=np.uint32)
    previous = np.zeros(objects, dtype=np.uint32)
    places = np.zeros(objects, dtype=np.int64)
    at = _HEAD.size
    layout = _layout(counts_uses)
    end, size = len(data), layout.size
    for number in range(objects):
        if at + size > end:
            raise InvalidIndexError("fewer objects than it says")
        fields = layout.unpack_from(data, at)
        use, previous[number], units = fields[:3]
        flags, length = fields[-2:]
        if not 1 <= length <= MAX_KEY_BYTES or not use or not units:
            raise InvalidIndexError("an object without key, use or size")
        uses[number], places[number] = use, at
        at += size + length + (_FACTS.size if flags & _HAS_FACTS else 0)
    if at != end:
        raise InvalidIndexError("other objects than it says")
    order = np.argsort(uses, kind="stable")
    ranked, ordered, before = uses[order], places[order], previous[order]
    if not objects:
        return SavedIndex(namespace, data, ranked, ordered, ordered, counts_uses)
    found = np.minimum(np.searchsorted(ranked, before), objects - 1)
    known = (before != 0) & (ranked[found] == before)
    places_before = np.where(known, ordered[found], 0)
    return SavedIndex(namespace, data, ranked, ordered, places_before, counts_uses)


def merged(indexes: list[SavedIndex]) -> Iterator[SavedObject]:
    """The objects of several namespaces, least recently used first. They were saved together."""
    uses = np.concatenate([each.uses for each in indexes])
    owners = np.concatenate(
        [np.full(len(each), number, dtype=np.uint16) for number, each in enumerate(indexes)]
    )
    order = np.argsort(uses, kind="stable")
    places = np.concatenate([each.places for each in indexes])[order]
    previous = np.concatenate([each.previous_places for each in indexes])[order]
    for start in range(0, len(order), _PART_OBJECTS):
        part = slice(start, start + _PART_OBJECTS)
        for owner, place, before in zip(
            owners[order[part]].tolist(),
            places[part].tolist(),
            previous[part].tolist(),
            strict=True,
        ):
            yield indexes[owner].object_at(place, before)
