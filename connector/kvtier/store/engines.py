"""Open engines, and what remains of those that went.

An engine that went without proof may still be writing into slots it was given and reading those it was told about
(the socket closes before the GPU has stopped), so they are quarantined: kept out of every other use until the process
is proven gone, or for ``QUARANTINE_SECONDS`` (DATAPATH 4).
"""

from __future__ import annotations

from functools import partial

from kvtier.errors import ProtocolError
from kvtier.store.context import StoreContext, Timer
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.operations import EngineState
from kvtier.store.slot_pool import SlotPool
from kvtier.store.state import Entry, Slot, SlotState
from kvtier.store.types import EngineInfo
from kvtier.tiers.base import aligned

QUARANTINE_SECONDS = 60.0
MAX_GROUPS = 255
"""A key begins with its group as one byte."""


class SlotQuarantine:
    """What one engine that went may still touch."""

    __slots__ = ("entries", "slots", "timer")

    def __init__(self, slots: list[Slot], entries: list[Entry]) -> None:
        self.slots = slots
        self.entries = entries
        self.timer: Timer | None = None


def check_info(info: EngineInfo) -> None:
    """Raises ``ProtocolError`` if an engine's description contradicts itself."""
    if (
        not info.slot_bytes
        or len(info.slot_bytes) > MAX_GROUPS
        or len(info.slot_bytes) != len(info.shard_bytes)
    ):
        raise ProtocolError(
            f"engine {info.engine}: {len(info.slot_bytes)} slot sizes and {len(info.shard_bytes)} lists of shard sizes; "
            f"there must be as many of both, 1 to {MAX_GROUPS}"
        )
    for group, (slot_bytes, shards) in enumerate(
        zip(info.slot_bytes, info.shard_bytes, strict=True)
    ):
        payload = sum(map(aligned, shards))
        if min(shards, default=0) <= 0 or payload != slot_bytes:
            raise ProtocolError(
                f"engine {info.engine}, group {group}: a slot of {slot_bytes} bytes for shards of {list(shards)} "
                f"bytes; shards must be positive and a slot the sum of their aligned sizes ({payload})"
            )
    if (
        not info.writer_ranks
        or min(info.writer_ranks) < 0
        or len(set(info.writer_ranks)) != len(info.writer_ranks)
    ):
        raise ProtocolError(
            f"engine {info.engine}: writer ranks {list(info.writer_ranks)}; there must be one or more, distinct"
        )


class EngineRegistry:
    """Open engines by name, and the quarantine. Owner's thread only."""

    def __init__(self, shared: StoreContext, pool: SlotPool, table: ResidentObjects) -> None:
        self.open: dict[str, EngineState] = {}
        self._shared = shared
        self._pool = pool
        self._table = table
        self._quarantined: dict[str, list[SlotQuarantine]] = {}

    def add(self, info: EngineInfo) -> EngineState:
        """Opens an engine. Raises ``ProtocolError`` (``check_info``)."""
        check_info(info)
        kinds = tuple(self._pool.slot_class(size) for size in info.slot_bytes)
        engine = self.open[info.engine] = EngineState(info, kinds)
        for group, kind in enumerate(kinds):
            if kind.slot_bytes > self._pool.pool_bytes:
                self._shared.count("pool_too_small", "", f"group_{group}")
        return engine

    def let_go(
        self,
        engine: EngineState,
        slots: list[Slot],
        entries: list[Entry],
        proven: bool,
        expires: bool = True,
    ) -> None:
        """Frees what an engine held, or quarantines it until it is proven gone. ``entries`` are pinned, once per mention.
        ``expires``: without proof, for ``QUARANTINE_SECONDS``."""
        del self.open[engine.name]
        slots = slots + [slot for group in engine.granted for slot in group.values()]
        quarantine = SlotQuarantine(slots, entries)
        if proven or not (slots or entries):
            self._free(quarantine)
            return
        for slot in slots:
            self._pool.move(slot, SlotState.QUARANTINED, engine.name)
        self._quarantined.setdefault(engine.name, []).append(quarantine)
        self._shared.count("slots_quarantined", "", "", len(slots) + len(entries))
        if not expires:
            return
        expire = partial(self._expire, engine.name, quarantine)
        quarantine.timer = self._shared.timers.at(self._shared.clock() + QUARANTINE_SECONDS, expire)

    def proven_gone(self, name: str) -> None:
        """The processes of every engine of this name that went are gone: nothing of theirs is touched any more."""
        for quarantine in self._quarantined.pop(name, []):
            if quarantine.timer is not None:
                quarantine.timer.cancel()
            self._shared.count("quarantine_ended", "", "proven")
            self._free(quarantine)

    def _expire(self, name: str, quarantine: SlotQuarantine) -> None:
        rest = self._quarantined[name]
        rest.remove(quarantine)
        if not rest:
            del self._quarantined[name]
        self._shared.count("quarantine_ended", "", "expired")
        self._free(quarantine)

    def _free(self, quarantine: SlotQuarantine) -> None:
        for slot in quarantine.slots:
            self._pool.release(slot)
        for entry in reversed(quarantine.entries):
            self._table.unpin(entry)
