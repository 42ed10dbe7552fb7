"""The prefixes that a directory holds, how recently they were used, and what is evicted next
(``kvtier inspect --prefixes``, ``kvtier gc``).

Reads the header of every object. What an object follows is stored there since this release; it is
not known of older objects, and of encrypted ones without their key, which then count as beginnings.
Use is recorded at most once an hour. So the order of eviction is that of a janitor that knows all
prefixes and no later uses. How often objects were used is what the process that leads the directory
has counted and saved (index_saver.py): uses by other processes, and later ones, are missing.

Raises ``OSError`` if the directory cannot be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from kvtier.prefix_order import NONE, PrefixOrder
from kvtier.tiers.filesystem import io, saved_index
from kvtier.tiers.filesystem.format import (
    HEADER_BYTES,
    MAGIC,
    READABLE_VERSIONS,
    previous_of,
)
from kvtier.tiers.filesystem.index import MAX_INDEXED_OBJECTS, age_rank
from kvtier.tiers.filesystem.layout import SAVED_INDEX
from kvtier.tiers.filesystem.walker import ObjectFile, ScanReport, object_path, walk

AGES = (3_600.0, 21_600.0, 86_400.0, 604_800.0)
"""Upper bounds of the ages that ``Heat`` tells apart, in seconds."""


@dataclass(slots=True)
class Heat:
    """Objects and bytes by the time since their last recorded use: one entry for each of ``AGES``,
    and one for older objects."""

    objects: list[int] = field(default_factory=lambda: [0] * (len(AGES) + 1))
    size_bytes: list[int] = field(default_factory=lambda: [0] * (len(AGES) + 1))

    def add(self, age: float, size_bytes: int) -> None:
        """Adds an object."""
        place = sum(age >= bound for bound in AGES)
        self.objects[place] += 1
        self.size_bytes[place] += size_bytes


@dataclass(slots=True)
class PrefixTree:
    """Objects that follow one beginning. ``depth``: objects on the longest path. ``complete``:
    false if the beginning follows an object that is not held, so that none of them can be used.
    ``newest``: the last recorded use, in seconds since the epoch. ``uses``: of all its objects.
    """

    beginning: bytes
    complete: bool
    objects: int = 0
    depth: int = 0
    size_bytes: int = 0
    newest: float = 0.0
    uses: int = 0


@dataclass(slots=True)
class NamespacePrefixes:
    """``trees``: the largest first. ``unreadable``: objects whose header does not tell what they
    follow, because it is encrypted, of another version or cannot be read. ``depths``: objects by
    their place in their prefix, from 1. ``uses_counted_at``: when the uses of trees were saved, in
    seconds since the epoch; None if they are not known, and ``uses_unknown_reason`` says why."""

    name: str
    trees: list[PrefixTree] = field(default_factory=list)
    heat: Heat = field(default_factory=Heat)
    depths: Counter[int] = field(default_factory=Counter)
    unreadable: int = 0
    uses_counted_at: float | None = None
    uses_unknown_reason: str = ""

    @property
    def unusable(self) -> int:
        """Objects of incomplete prefixes."""
        return sum(tree.objects for tree in self.trees if not tree.complete)


@dataclass(frozen=True, slots=True)
class NextEviction:
    """An object in the order of eviction. ``depth``: its place in its prefix, from 1."""

    namespace: str
    key: bytes
    depth: int
    size_bytes: int
    used_at: float


@dataclass(frozen=True, slots=True)
class PrefixSurvey:
    """A directory. ``evicted_next``: first things first."""

    namespaces: list[NamespacePrefixes]
    evicted_next: list[NextEviction]


_Name = tuple[str, bytes]


class _Place(NamedTuple):
    """Where an object is in its prefix, from 1, and whether that one is complete."""

    depth: int
    complete: bool


def survey_prefixes(root: Path, now: float, at_most: int = 10) -> PrefixSurvey:
    """Reads every header. ``now``: seconds since the epoch. ``at_most``: length of
    ``evicted_next``."""
    spaces: dict[str, NamespacePrefixes] = {}
    held: dict[str, dict[bytes, ObjectFile]] = {}
    previous: dict[str, dict[bytes, bytes]] = {}
    for bucket in walk(root, now, ScanReport(), clean=False):
        space = spaces.setdefault(bucket.namespace, NamespacePrefixes(bucket.namespace))
        for found in bucket.objects:
            held.setdefault(found.namespace, {})[found.key] = found
            space.heat.add(now - found.used_at, found.size_bytes)
            before = _previous(str(root), found)
            if before is None:
                space.unreadable += 1
            elif before:
                previous.setdefault(found.namespace, {})[found.key] = before
    places: dict[_Name, _Place] = {}
    for name, objects in held.items():
        uses = _saved_uses(root, spaces[name])
        _build_trees(spaces[name], objects, previous.get(name, {}), places, uses)
    return PrefixSurvey(
        sorted(spaces.values(), key=lambda each: each.name),
        [
            NextEviction(
                found.namespace,
                found.key,
                places[found.namespace, found.key].depth,
                found.size_bytes,
                found.used_at,
            )
            for found in islice(_eviction_order(held, previous, places), at_most)
        ],
    )


def eviction_order(
    root: Path, objects: Iterable[ObjectFile], on_read: Callable[[int], None] = lambda _: None
) -> Iterator[ObjectFile]:
    """``objects``, the ones to be evicted first in front. Reads the header of each one before it
    yields the first. ``on_read``: called with the number of headers read so far."""
    held: dict[str, dict[bytes, ObjectFile]] = {}
    previous: dict[str, dict[bytes, bytes]] = {}
    for number, found in enumerate(objects, 1):
        held.setdefault(found.namespace, {})[found.key] = found
        before = _previous(str(root), found)
        if before:
            previous.setdefault(found.namespace, {})[found.key] = before
        on_read(number)
    places: dict[_Name, _Place] = {}
    for name, each in held.items():
        _build_trees(NamespacePrefixes(name), each, previous.get(name, {}), places)
    return _eviction_order(held, previous, places)


def _previous(root: str, found: ObjectFile) -> bytes | None:
    """What an object follows: empty if it is not recorded, None if the header does not tell."""
    try:
        header = io.read_start(object_path(root, found.namespace, found.key), HEADER_BYTES)
    except OSError:
        return None
    if len(header) < HEADER_BYTES or header[:8] != MAGIC:
        return None
    version = int.from_bytes(header[8:10], "little")
    return previous_of(header) if version in READABLE_VERSIONS else None


def _saved_uses(root: Path, space: NamespacePrefixes) -> dict[bytes, int]:
    """How often objects of a namespace were used, as the leader has saved it."""
    path = root / space.name / SAVED_INDEX
    try:
        saved = saved_index.read(path, space.name, None, MAX_INDEXED_OBJECTS)
        saved_at = path.stat().st_mtime
    except FileNotFoundError:
        space.uses_unknown_reason = "not saved yet"
        return {}
    except (OSError, saved_index.InvalidIndexError) as error:
        space.uses_unknown_reason = f"the saved index cannot be used: {error}"
        return {}
    if not saved.counts_uses:
        space.uses_unknown_reason = "saved by an earlier release"
        return {}
    space.uses_counted_at = saved_at
    return dict(saved.uses_by_key())


def _build_trees(
    space: NamespacePrefixes,
    objects: dict[bytes, ObjectFile],
    previous: dict[bytes, bytes],
    places: dict[_Name, _Place],
    uses: Mapping[bytes, int] = MappingProxyType({}),
) -> None:
    roots: dict[bytes, tuple[bytes, int]] = {}
    """The beginning of each object's prefix, and its place there."""
    trees: dict[bytes, PrefixTree] = {}
    for key in objects:
        path = []
        seen = set()
        at = key
        while at not in roots:
            before = previous.get(at, b"")
            path.append(at)
            seen.add(at)
            if before not in objects or before in seen:
                # The beginning; or a cycle, which hashes cannot form but a planted header can.
                break
            at = before
        beginning, depth = roots.get(at, (at, 0))
        for each in reversed(path):
            depth += 1
            roots[each] = beginning, depth
    for key, (beginning, depth) in roots.items():
        found = objects[key]
        tree = trees.setdefault(beginning, PrefixTree(beginning, not previous.get(beginning)))
        tree.objects += 1
        tree.depth = max(tree.depth, depth)
        tree.size_bytes += found.size_bytes
        tree.newest = max(tree.newest, found.used_at)
        tree.uses += uses.get(key, 0)
        space.depths[depth] += 1
        places[space.name, key] = _Place(depth, tree.complete)
    space.trees = sorted(trees.values(), key=lambda tree: (-tree.size_bytes, tree.beginning))


def _eviction_order(
    held: dict[str, dict[bytes, ObjectFile]],
    previous: dict[str, dict[bytes, bytes]],
    places: dict[_Name, _Place],
) -> Iterator[ObjectFile]:
    order = PrefixOrder()
    nodes: dict[_Name, int] = {}
    objects: dict[int, ObjectFile] = {}

    def node_of(name: _Name) -> int:
        node = nodes[name] = nodes.get(name) or order.new()
        return node

    # An object enters after what it follows.
    for name in sorted(places, key=lambda each: places[each].depth):
        namespace, key = name
        node = node_of(name)
        before = previous.get(namespace, {}).get(key)
        objects[node] = held[namespace][key]
        order.enter(node, node_of((namespace, before)) if before else NONE)
    # As the janitor orders objects that it finds: among equal times the key decides. What cannot be
    # used stays in front.
    for found in sorted(objects.values(), key=lambda each: (age_rank(each.used_at), each.key)):
        name = (found.namespace, found.key)
        if places[name].complete:
            order.use(nodes[name])
    while (node := order.oldest()) != NONE:
        yield objects[node]
        order.leave(node)
