"""tierd for ``hybrid_world``: real bytes in slots with generation words, in steps that a test
chooses."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from kvtier.store.generations import pack_location
from kvtier.tierd.wire import (
    PROTOCOL,
    Cancel,
    Credits,
    Delta,
    EvictionAck,
    EvictionNotice,
    Load,
    LoadReleased,
    Message,
    Prefetch,
    Promote,
    Promoted,
    Queued,
    Ready,
    Reserve,
    Usable,
    Welcome,
)

RAM, DISK = 1, 2


@dataclass
class _Slot:
    offset: int
    group: int


class SimulatedTierd:
    """tierd, and the client of the scheduler's session. Everything happens when a test says so,
    except messages that are answered at once."""

    def __init__(
        self,
        slot_bytes: list[int],
        slots: int,
        writers: list[tuple[int, ...]],
        random: Random,
    ) -> None:
        """``writers``: by group, the ranks that store a shard."""
        self.slot_bytes, self.writers, self.random = slot_bytes, writers, random
        self.slots = [_Slot(0, group) for group in range(len(slot_bytes)) for _ in range(slots)]
        end = 0
        for slot in self.slots:
            slot.offset = end
            end += slot_bytes[slot.group]
        self.pool = np.zeros(end, dtype=np.uint8)
        self.words = memoryview(bytearray(4 * (end // 4096 + 1))).cast("I")
        for page in range(len(self.words)):
            self.words[page] = 1
        self.by_offset = {slot.offset: slot for slot in self.slots}
        self.epoch, self.attached = 0, False
        self.ram: dict[bytes, int] = {}
        self.disk: dict[bytes, bytes] = {}
        self.pins: dict[int, list[int]] = {}
        self.promoted: dict[int, list[int]] = {}
        self.waiting: list[Promote] = []
        self.reserved: dict[int, tuple[bytes, int, set[int]]] = {}
        self.early: dict[int, list[tuple[int, bool]]] = {}
        self.stored = 0
        self._sequence = 0
        self._free: dict[int, list[int]] = {}

    def connect(self, *arguments: Any) -> SimulatedTierd:
        """The client of the session."""
        _, _, self.sink, self.on_lost, _ = arguments
        return self

    def start(self) -> None:
        """Nothing attaches by itself."""

    def close(self, timeout_seconds: float) -> None:
        """Nothing to do."""

    # Messages of the scheduler side.

    def send(self, message: Message) -> bool:
        if not self.attached:
            return False
        if isinstance(message, Reserve):
            for reservation, group, block_hash, slot, _ in message.items:
                key = bytes([group]) + block_hash
                assert self.by_offset[slot].group == group, "a slot of another group"
                self.reserved[reservation] = (key, slot, set())
                for rank, delivered in self.early.pop(reservation, []):
                    self.acknowledge(rank, reservation, delivered)
        elif isinstance(message, Promote):
            self.waiting.append(message)
        elif isinstance(message, Cancel):
            self.promoted.pop(message.promotion, None)
            self.waiting = [each for each in self.waiting if each.promotion != message.promotion]
        elif isinstance(message, Load):
            keys = (bytes([group]) + each for group, each in message.keys)
            found = [self.ram[key] for key in keys if key in self.ram]
            self.pins[message.load] = found + self.promoted.pop(message.promotion, [])
        elif isinstance(message, LoadReleased):
            self.pins.pop(message.load, None)
        else:
            # What a prefetch brings would only be in RAM earlier.
            assert isinstance(message, EvictionAck | Prefetch | Queued), message
        return True

    def acknowledge(self, rank: int, reservation: int, delivered: bool) -> None:
        """A rank delivers or aborts."""
        found = self.reserved.get(reservation)
        if found is None:
            self.early.setdefault(reservation, []).append((rank, delivered))
            return
        key, slot, ranks = found
        writers = self.writers[key[0]]
        assert rank in writers, "not a writer"
        assert rank not in ranks, "acknowledged twice"
        ranks.add(rank if delivered else -1 - rank)
        if len(ranks) < len(writers):
            return
        del self.reserved[reservation]
        if min(ranks) < 0 or key in self.ram:
            self._release(slot)
            return
        self.stored += 1
        self._commit(key, slot)

    def _commit(self, key: bytes, slot: int) -> None:
        self.words[slot // 4096] += 1
        self.ram[key] = slot
        bits = RAM
        if self.random.random() < 0.7:
            self.disk[key] = self._bytes(slot)
            bits |= DISK
        self._delta(added=((key, bits, self._location(slot)),))

    def _bytes(self, slot: int) -> bytes:
        return self.pool[slot : slot + self.slot_bytes[self.by_offset[slot].group]].tobytes()

    def _location(self, slot: int) -> int:
        return pack_location(slot, self.words[slot // 4096])

    def _delta(self, snapshot: bool = False, **values: Any) -> None:
        self._sequence += 1
        self.sink(Delta(sequence=self._sequence, snapshot=snapshot, **values))

    def _release(self, slot: int) -> None:
        self._free.setdefault(self.by_offset[slot].group, []).append(slot)

    # What tierd does by itself.

    def attach(self) -> None:
        """A tierd that has kept RAM or lost it."""
        self.epoch, self.attached, self._sequence = self.epoch + 1, True, 0
        used = set(self.ram.values())
        self._free = {}
        for slot in self.slots:
            if slot.offset not in used:
                self._release(slot.offset)
        self.sink(
            Welcome(
                protocol=PROTOCOL,
                epoch=self.epoch,
                session=self.epoch,
                pool_path="/pool",
                pool_bytes=len(self.pool),
                tiers=("ram", "disk"),
                settings="",
            )
        )
        self.sink(
            Ready(
                namespace="a" * 32,
                slot_bytes=tuple(self.slot_bytes),
                persistent=True,
                weights=("w",) * (1 + max(map(max, self.writers))),
            )
        )
        self.sink(Usable(bits=RAM | DISK))
        keys = {**dict.fromkeys(self.disk, DISK)}
        for key in self.ram:
            keys[key] = keys.get(key, 0) | RAM
        added = tuple(
            (key, bits, self._location(self.ram[key]) if bits & RAM else 0)
            for key, bits in keys.items()
        )
        self._delta(added=added, snapshot=True)
        self.grant()

    def grant(self) -> None:
        """Hands out free slots."""
        for group, slots in self._free.items():
            if self.attached and slots:
                self.sink(Credits(group=group, slots=tuple(slots)))
                slots.clear()

    def lose(self, keep_ram: bool) -> None:
        """It dies. Grants and reservations are void afterwards."""
        self.attached = False
        for table in (self.pins, self.promoted, self.reserved, self.early):
            table.clear()
        self.waiting.clear()
        if not keep_ram:
            for slot in self.ram.values():
                self.words[slot // 4096] += 1
            self.ram.clear()
        self.on_lost("the test says so")

    def evict(self, announce: bool) -> None:
        """Evicts one object that nothing pins, and writes over it. ``announce``: the scheduler side
        is told before, else afterwards."""
        pinned = self._pinned() if announce else set()
        keys = [key for key, slot in self.ram.items() if slot not in pinned]
        if not keys or not self.attached:
            return
        key = self.random.choice(keys)
        slot = self.ram.pop(key)
        if announce:
            self.sink(EvictionNotice(token=1, keys=(key,)))
        self.words[slot // 4096] += 1
        size = self.slot_bytes[self.by_offset[slot].group]
        self.pool[slot : slot + size] = self.random.randrange(1, 255)
        self._delta(removed=((key, RAM),))
        self._release(slot)
        self.grant()

    def _pinned(self) -> set[int]:
        """Slots that a load or a promotion names."""
        return {
            each
            for table in (self.pins, self.promoted)
            for slots in table.values()
            for each in slots
        }

    def lose_file(self) -> None:
        """An object of the second tier vanishes without a word."""
        if self.disk:
            del self.disk[self.random.choice(list(self.disk))]

    def promote(self) -> None:
        """Ends one promotion, in whole or in part."""
        if not self.waiting:
            return
        message = self.waiting.pop(self.random.randrange(len(self.waiting)))
        slots: list[int] = []
        tiers: list[int] = []
        for group, block_hash in message.keys:
            key = bytes([group]) + block_hash
            slot = self.ram.get(key)
            tiers.append(0 if slot is not None else 1)
            if slot is None:
                slot = self._read(key, group, slots)
            if slot is None or self.random.random() < 0.02:
                break
            slots.append(slot)
        self.promoted[message.promotion] = slots
        usable = len(slots)
        self.sink(
            Promoted(
                promotion=message.promotion,
                usable=usable,
                outcome="whole" if usable == len(message.keys) else "partial",
                tiers=tuple(tiers[:usable]),
                locations=tuple(map(self._location, slots)),
            )
        )

    def _read(self, key: bytes, group: int, keep: list[int]) -> int | None:
        """Reads an object into a free slot, or into one that is evicted for it. ``keep``: slots of
        the promotion so far."""
        data = self.disk.get(key)
        if data is None:
            return None
        free = self._free.get(group)
        if free:
            slot = free.pop()
        else:
            pinned = self._pinned() | set(keep)
            victims = [
                each for each, slot in self.ram.items() if each[0] == group and slot not in pinned
            ]
            if not victims:
                return None
            victim = self.random.choice(victims)
            slot = self.ram.pop(victim)
            self.words[slot // 4096] += 1
            self._delta(removed=((victim, RAM),))
        self.pool[slot : slot + len(data)] = np.frombuffer(data, dtype=np.uint8)
        self.words[slot // 4096] += 1
        self.ram[key] = slot
        self._delta(added=((key, RAM, self._location(slot)),))
        return slot
