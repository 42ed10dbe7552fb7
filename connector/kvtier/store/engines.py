"""Open engines, and the quarantine of what closed engines may still use.

An engine that closes without proof may still be writing into its slots and reading the slots of its
loads: the socket closes before the GPU has stopped. These slots are in quarantine, excluded from
every other use, until the engine's processes are confirmed dead or ``QUARANTINE_SECONDS`` have
passed. Only the store's thread uses this module.
"""

from __future__ import annotations

from functools import partial

from kvtier.errors import ProtocolError
from kvtier.keys import MAX_GROUPS
from kvtier.store.context import StoreContext, Timer
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.operations import EngineState
from kvtier.store.slot_pool import SlotPool
from kvtier.store.state import Entry, ObjectGeometry, Slot, SlotState
from kvtier.store.types import EngineInfo
from kvtier.tiers.base import aligned

QUARANTINE_SECONDS = 60.0


class SlotQuarantine:
    """What one closed engine may still use."""

    __slots__ = ("entries", "slots", "timer")

    def __init__(self, slots: list[Slot], entries: list[Entry]) -> None:
        self.slots = slots
        self.entries = entries
        self.timer: Timer | None = None


def check_engine_info(info: EngineInfo) -> None:
    """Raises ``ProtocolError`` if an engine's description contradicts itself."""
    sizes, shards = info.slot_bytes, info.shard_bytes
    if not 1 <= len(sizes) == len(shards) <= MAX_GROUPS:
        raise ProtocolError(
            f"engine {info.engine}: {len(sizes)} slot sizes, {len(shards)} lists of shard sizes: "
            f"must be one of each per group, 1 to {MAX_GROUPS} groups"
        )
    if len(info.writer_ranks) != len(sizes):
        raise ProtocolError(
            f"engine {info.engine}: writer ranks of {len(info.writer_ranks)} groups: must be of "
            f"{len(sizes)} groups"
        )
    for group, (slot_bytes, of_group) in enumerate(zip(sizes, shards, strict=True)):
        payload = sum(map(aligned, of_group))
        rows = set(map(aligned, of_group))
        if info.parts != 1 and (len(of_group) != info.parts or len(rows) != 1):
            raise ProtocolError(
                f"engine {info.engine}, group {group}: shards of {list(of_group)} bytes: must be "
                f"{info.parts} of one aligned size"
            )
        if min(of_group, default=0) <= 0 or payload != slot_bytes:
            raise ProtocolError(
                f"engine {info.engine}, group {group}: a slot of {slot_bytes} bytes for shards of "
                f"{list(of_group)} bytes: must be the sum of the aligned shard sizes ({payload}), "
                "all positive"
            )
        ranks = info.writer_ranks[group]
        if min(ranks, default=-1) < 0 or not len(set(ranks)) == len(ranks) == len(of_group):
            raise ProtocolError(
                f"engine {info.engine}, group {group}: shards of {list(of_group)} bytes by writer "
                f"ranks {list(ranks)}: must be one distinct rank for each shard"
            )


class EngineRegistry:
    """Open engines by name, and quarantined slots by the name of their engine."""

    def __init__(self, context: StoreContext, pool: SlotPool, resident: ResidentObjects) -> None:
        self.open: dict[str, EngineState] = {}
        self._context = context
        self._pool = pool
        self._resident = resident
        self._quarantined: dict[str, list[SlotQuarantine]] = {}

    @property
    def has_any(self) -> bool:
        """Whether an engine is open, or may still use slots."""
        return bool(self.open or self._quarantined)

    def get(self, name: str) -> EngineState | None:
        """The open engine of this name; None, counted as a protocol violation, if there is none."""
        engine = self.open.get(name)
        if engine is None:
            self._context.violation("unknown_engine")
        return engine

    def add(self, info: EngineInfo) -> EngineState:
        """Opens an engine. Raises ``ProtocolError`` (``check_engine_info``)."""
        check_engine_info(info)
        scattered = info.parts > 1 and info.parts == self._pool.layout.parts
        geometries = tuple(
            ObjectGeometry(self._pool.slot_class(size, scattered), shards, size)
            for size, shards in zip(info.slot_bytes, info.shard_bytes, strict=True)
        )
        engine = self.open[info.engine] = EngineState(info, geometries)
        for group, geometry in enumerate(geometries):
            if geometry.kind.row_bytes > self._pool.layout.part_bytes:
                self._context.count("pool_too_small", "", f"group_{group}")
        return engine

    def release_or_quarantine(
        self,
        engine: EngineState,
        slots: list[Slot],
        entries: list[Entry],
        confirmed_dead: bool,
        expires: bool = True,
    ) -> None:
        """Closes an engine. Frees what it held if its processes are ``confirmed_dead``, else
        quarantines it.

        ``entries`` are pinned, once per occurrence. With ``expires`` the quarantine ends after
        ``QUARANTINE_SECONDS``.
        """
        del self.open[engine.name]
        slots = slots + [slot for group in engine.granted for slot in group.values()]
        quarantine = SlotQuarantine(slots, entries)
        if confirmed_dead or not (slots or entries):
            self._free(quarantine)
            return
        for slot in slots:
            self._pool.move(slot, SlotState.QUARANTINED, engine.name)
        self._quarantined.setdefault(engine.name, []).append(quarantine)
        self._context.count("slots_quarantined", "", "", len(slots) + len(entries))
        if not expires:
            return
        until = self._context.clock() + QUARANTINE_SECONDS
        quarantine.timer = self._context.timers.at(
            until, partial(self._expire, engine.name, quarantine)
        )

    def confirm_dead(self, name: str) -> None:
        """Ends the quarantine of every closed engine of this name: their processes are dead."""
        for quarantine in self._quarantined.pop(name, []):
            if quarantine.timer is not None:
                quarantine.timer.cancel()
            self._context.count("quarantine_ended", "", "confirmed")
            self._free(quarantine)

    def _expire(self, name: str, quarantine: SlotQuarantine) -> None:
        remaining = self._quarantined[name]
        remaining.remove(quarantine)
        if not remaining:
            del self._quarantined[name]
        self._context.count("quarantine_ended", "", "expired")
        self._free(quarantine)

    def _free(self, quarantine: SlotQuarantine) -> None:
        for slot in quarantine.slots:
            self._pool.release(slot)
        for entry in reversed(quarantine.entries):
            self._resident.unpin(entry)
