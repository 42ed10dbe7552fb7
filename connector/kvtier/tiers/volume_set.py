"""A tier of several volumes, such as the NVMe disks of a node, each a tier of its own.

Placement. A new object belongs to the volume with the highest score for its key (weighted
rendezvous hashing by the volumes' names and capacities). So an added volume takes its share of new
objects from all others and nothing else moves, and a volume that is removed, or does not work for a
while, leaves the placement among the others as it is. Placement is for new objects only: an object
is found wherever it is, by the indexes of the volumes.

Order of eviction. Each volume evicts by itself, and orders what it holds by prefixes. The object
that precedes another one in its prefix usually lies in another volume, so each volume is told of
the nearest predecessor that it holds itself.

Threads: as for every tier (``kvtier.tiers.base``). The store calls the volumes themselves for I/O
on one object, for maintenance and for checks; here these calls are routed by placement.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

from kvtier.errors import TierError, TierMissError
from kvtier.tiers.base import (
    ForwardingTier,
    ObjectMeta,
    ObjectRef,
    OnChange,
    Payload,
    Tier,
    TierCapabilities,
    TierLimits,
    TierUsage,
)

MAX_REMEMBERED = 32_768
"""Objects whose predecessors in all volumes are remembered: a hundred prompts of 80,000 tokens, in
about 10 MiB."""


class _Predecessors:
    """For recent objects, the nearest object at or before it in each volume. Thread-safe."""

    def __init__(self, volumes: int) -> None:
        self._lock = threading.Lock()
        self._none = (b"",) * volumes
        self._nearest: OrderedDict[ObjectRef, tuple[bytes, ...]] = OrderedDict()

    def note(self, ref: ObjectRef, volume: int, previous: bytes) -> bytes | None:
        """The object is in this volume. Returns the nearest predecessor there, empty if there is
        none, and None if that is not known."""
        with self._lock:
            before = self._nearest.get(ObjectRef(ref.namespace, previous)) if previous else None
            nearest = list(before or self._none)
            found = nearest[volume]
            nearest[volume] = ref.key
            self._nearest[ref] = tuple(nearest)
            self._nearest.move_to_end(ref)
            if len(self._nearest) > MAX_REMEMBERED:
                self._nearest.popitem(last=False)
        return None if before is None and previous else found


class _Volume(ForwardingTier):
    """One volume. Passes calls on, with the predecessors that it holds."""

    def __init__(self, inner: Tier, position: int, predecessors: _Predecessors) -> None:
        super().__init__(inner)
        self._position = position
        self._predecessors = predecessors

    def write(self, ref: ObjectRef, payload: Payload, meta: ObjectMeta) -> None:
        self.inner.write(ref, payload, replace(meta, previous=self._nearest(ref, meta.previous)))

    def touch(self, ref: ObjectRef, previous: bytes = b"") -> None:
        if self.inner.contains(ref):
            self.inner.touch(ref, self._nearest(ref, previous))

    def _nearest(self, ref: ObjectRef, previous: bytes) -> bytes:
        """A predecessor that is in this volume. To the volume, an object whose predecessor it
        lacks is of no use, so one in another volume is not named."""
        found = self._predecessors.note(ref, self._position, previous)
        if found is not None:
            return found
        return previous if self.inner.contains(ObjectRef(ref.namespace, previous)) else b""


class VolumeSet(Tier):
    """The volumes of one tier. ``volumes``: their names are unique in the tier."""

    def __init__(self, name: str, volumes: Sequence[Tier]) -> None:
        self.name = name
        predecessors = _Predecessors(len(volumes))
        self.volumes = tuple(
            _Volume(volume, position, predecessors) for position, volume in enumerate(volumes)
        )
        self.capabilities = TierCapabilities(
            persistent=all(each.capabilities.persistent for each in volumes),
            shared=any(each.capabilities.shared for each in volumes),
            indexed=all(each.capabilities.indexed for each in volumes),
            expires=all(each.capabilities.expires for each in volumes),
            tenants=all(each.capabilities.tenants for each in volumes),
            scattered=all(each.capabilities.scattered for each in volumes),
        )
        self._seeds = [blake2b(each.name.encode(), digest_size=32).digest() for each in volumes]
        self._serving = [True] * len(volumes)
        self._weights = [1.0] * len(volumes)
        self._capacities = [0] * len(volumes)

    # Placement.

    def place(self, ref: ObjectRef, among: Sequence[int] = ()) -> int:
        """Position of the volume that a new object belongs to, of those ``among``; of all if none
        is given."""
        candidates = among or range(len(self.volumes))
        if len(candidates) == 1:
            return candidates[0]
        self._follow_capacities()
        return max(candidates, key=lambda position: (self._score(position, ref), position))

    def _score(self, position: int, ref: ObjectRef) -> float:
        digest = blake2b(ref.key, digest_size=8, key=self._seeds[position]).digest()
        uniform = (int.from_bytes(digest, "big") + 0.5) / 2.0**64
        return -self._weights[position] / math.log(uniform)

    def _follow_capacities(self) -> None:
        capacities = [each.usage().capacity_bytes for each in self.volumes]
        if capacities != self._capacities:
            self._capacities = capacities
            largest = max(capacities)
            self._weights = [max(each / largest, 1e-6) if largest else 1.0 for each in capacities]

    def set_serving(self, position: int, serving: bool) -> bool:
        """Hides or shows what a volume holds. True if that changed."""
        changed = self._serving[position] is not serving
        self._serving[position] = serving
        return changed

    def _holder(self, ref: ObjectRef) -> Tier | None:
        for volume, serving in zip(self.volumes, self._serving, strict=True):
            if serving and volume.contains(ref):
                return volume
        return None

    # Without I/O.

    def contains(self, ref: ObjectRef) -> bool:
        """Whether a volume that serves has the object in its index."""
        return self._holder(ref) is not None

    def keys(self, namespace: str) -> Iterator[bytes]:
        """The keys in all volumes that serve. A key in two volumes is returned once."""
        for position, volume in enumerate(self.volumes):
            if not self._serving[position]:
                continue
            for key in volume.keys(namespace):
                ref = ObjectRef(namespace, key)
                earlier = zip(self.volumes[:position], self._serving, strict=False)
                if not any(serving and each.contains(ref) for each, serving in earlier):
                    yield key

    @property
    def asks_on_miss(self) -> bool:
        """Whether a volume may hold objects that its index lacks."""
        return any(volume.asks_on_miss for volume in self.volumes)

    def usage(self) -> TierUsage:
        """The sum over all volumes."""
        found = [volume.usage() for volume in self.volumes]
        return TierUsage(
            sum(each.used_bytes for each in found),
            sum(each.capacity_bytes for each in found),
            sum(each.objects for each in found),
            sum(each.unindexed_total for each in found),
        )

    def volume(self) -> tuple[int, int]:
        """The sum over the file systems of all volumes."""
        found = [volume.volume() for volume in self.volumes]
        return sum(size for size, _ in found), sum(available for _, available in found)

    def tenants(self) -> Mapping[bytes, int]:
        """The sums over all volumes."""
        held: dict[bytes, int] = {}
        for volume in self.volumes:
            for tenant, size in volume.tenants().items():
                held[tenant] = held.get(tenant, 0) + size
        return held

    def counts(self) -> Mapping[tuple[str, str], int]:
        """The sums over all volumes."""
        totals: dict[tuple[str, str], int] = {}
        for volume in self.volumes:
            for name, total in volume.counts().items():
                totals[name] = totals.get(name, 0) + total
        return totals

    def touch(self, ref: ObjectRef, previous: bytes = b"") -> None:
        """Passed on to the volumes that hold the object."""
        for volume in self.volumes:
            volume.touch(ref, previous)

    def configure(self, limits: TierLimits) -> None:
        """The capacity is divided in the proportion that the volumes have now."""
        whole = self.usage().capacity_bytes
        for volume in self.volumes:
            part = limits.capacity_bytes * volume.usage().capacity_bytes // max(whole, 1)
            volume.configure(replace(limits, capacity_bytes=max(part, 1)))

    # With I/O.

    def open(self, on_change: OnChange) -> None:
        """Opens every volume. Raises the first error if none could be opened."""

        def announce(namespace: str, key: bytes, present: bool) -> None:
            on_change(namespace, key, present or self.contains(ObjectRef(namespace, key)))

        self._all_of(lambda volume: volume.open(announce))

    def _all_of(self, call: Callable[[_Volume], None]) -> None:
        """Calls every volume. Raises the first ``TierError`` if all calls failed."""
        errors: list[TierError] = []
        for volume in self.volumes:
            try:
                call(volume)
            except TierError as error:
                errors.append(error)
        if len(errors) == len(self.volumes):
            raise errors[0]

    def close(self) -> None:
        """Closes every volume."""
        for volume in self.volumes:
            volume.close()

    def probe(self, ref: ObjectRef) -> bool:
        """Looks the object up in every volume that serves, its own first."""
        own = self.place(ref)
        order = sorted(range(len(self.volumes)), key=lambda position: position != own)
        return any(self._serving[each] and self.volumes[each].probe(ref) for each in order)

    def read(self, ref: ObjectRef, into: Payload) -> ObjectMeta:
        """Reads from the volume that holds the object."""
        volume = self._holder(ref)
        if volume is None:
            raise TierMissError(f"tier {self.name}: no volume holds the object")
        return volume.read(ref, into)

    def write(self, ref: ObjectRef, payload: Payload, meta: ObjectMeta) -> None:
        """Writes to the volume that holds the object, or that it belongs to."""
        serving = [position for position, serves in enumerate(self._serving) if serves]
        (self._holder(ref) or self.volumes[self.place(ref, serving)]).write(ref, payload, meta)

    def delete(self, ref: ObjectRef) -> None:
        """Removes the object from every volume that has it."""
        for volume in self.volumes:
            volume.delete(ref)

    def maintain(self) -> None:
        """Maintains every volume."""
        self._all_of(lambda volume: volume.maintain())

    def check(self) -> None:
        """Succeeds if one volume works."""
        self._all_of(lambda volume: volume.check())

    def describe_namespace(self, namespace: str, text: str) -> None:
        """Writes the description to every volume. Raises the first error if none took it."""
        self._all_of(lambda volume: volume.describe_namespace(namespace, text))
