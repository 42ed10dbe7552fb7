"""Promotions: bring the usable prefix of a request's keys into pinned slots, within the request's
deadline.

Each promotion ends exactly once: when every key has arrived or been given up, when its deadline
passes, or when it is cancelled. The selection decides which part of the prefix is loaded, and
whether in stages; each key that arrives in order may extend the deadline (``LoadDeadline``). The
prefix that has arrived stays pinned until a load or a cancellation names the promotion, or for
``LEASE_SECONDS``. Only the store's thread uses this module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvtier.store.allocator import SlotAllocator
from kvtier.store.context import StoreContext
from kvtier.store.cost_model import PrefixCost
from kvtier.store.lifetimes import Lifetimes
from kvtier.store.lookups import TierLookups
from kvtier.store.memory_tier import ResidentObjects
from kvtier.store.operations import EngineState, Promotion
from kvtier.store.recovery import RecoveredObjects
from kvtier.store.secondary_tier import SecondaryTiers
from kvtier.store.selection import (
    LOOKUP_SHARE,
    MARGIN,
    SPREAD_FACTOR,
    LoadPlanner,
    PrefixSources,
)
from kvtier.store.state import Entry, ObjectGeometry
from kvtier.store.tier_group import TierGroup
from kvtier.store.tier_reads import TierReads
from kvtier.store.types import (
    NO_OPTIONS,
    Owner,
    PromotionArriving,
    PromotionEnded,
    PromotionOptions,
    PromotionOutcome,
)

LEASE_SECONDS = 60.0
ANNOUNCED_PARTS = 16
"""An engine that loads before a promotion has ended is told of the keys that arrive in about so
many parts. The copy of the last part cannot overlap with the reads."""
MAX_PROMOTIONS = 1_024
"""Per engine, leases included. A scheduler lets 32 requests wait at a time."""
MAX_BUDGET_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _PromotionKey:
    """Waits for the key at one position of a promotion."""

    promotions: Promotions
    promotion: Promotion
    position: int

    def arrived(self, entry: Entry, tier_index: int) -> None:
        self.promotions.key_arrived(self.promotion, self.position, entry, tier_index)

    def lost(self, reason: str) -> None:
        self.promotions.key_lost(self.promotion, self.position, reason)


class _ProbeRead:
    """Waits for a read whose only purpose is to measure its tier. The object stays in RAM until it
    is evicted."""

    def arrived(self, entry: Entry, tier_index: int) -> None:
        pass

    def lost(self, reason: str) -> None:
        pass


@dataclass(slots=True)
class _PromotionPrefix:
    """The longest prefix of a request that can be provided. Lists are indexed by position.

    ``sources``: tier that the key is expected from, 0 for RAM. ``entries``: pinned objects, None
    for keys that have to be read or verified. ``sizes``: bytes to be read. ``unverified``:
    positions of recovered objects.
    """

    sources: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    entries: list[Entry | None] = field(default_factory=list)
    unverified: set[int] = field(default_factory=set)

    def add(self, group: int, key: bytes, source: int, size: int, entry: Entry | None) -> None:
        self.sources.append(source)
        self.sizes.append(size)
        self.keys.append(key)
        self.groups.append(group)
        self.entries.append(entry)

    def cut(self, length: int) -> None:
        for values in (self.sources, self.sizes, self.keys, self.groups, self.entries):
            del values[length:]


@dataclass(frozen=True, slots=True)
class ObjectSources:
    """Where promotions find objects: in RAM, among the recovered objects of the previous tierd, and
    in secondary tiers, from which ``reads`` brings them into RAM."""

    resident: ResidentObjects
    recovered: RecoveredObjects
    tiers: SecondaryTiers
    reads: TierReads
    lifetimes: Lifetimes


class Promotions:
    """All promotions of all engines."""

    def __init__(
        self,
        context: StoreContext,
        sources: ObjectSources,
        allocator: SlotAllocator,
        planner: LoadPlanner,
        lookups: TierLookups,
    ) -> None:
        self._context = context
        self._lookups = lookups
        self._resident = sources.resident
        self._recovered = sources.recovered
        self._tiers = sources.tiers
        self._reads = sources.reads
        self._allocator = allocator
        self._planner = planner

    def begin(
        self,
        engine: EngineState,
        number: int,
        keys: Sequence[tuple[int, bytes]],
        budget_seconds: float,
        cost: PrefixCost | None = None,
        options: PromotionOptions = NO_OPTIONS,
    ) -> None:
        """Starts a promotion, which may end before this returns. With ``look_up``, keys that no
        index has are looked up in the tiers first, for a part of the time."""
        context = self._context
        if number in engine.promotions:
            context.violation("promotion_twice")
            return
        if cost is not None and not cost.is_valid(len(keys)):
            context.violation("prefix_cost")
            cost = None
        budget = min(budget_seconds, MAX_BUDGET_SECONDS) if budget_seconds > 0 else 0.0
        context.count("promotions")
        if options.look_up and self._look_up(engine, number, keys, budget, cost, options.owner):
            return
        self._start(engine, number, keys, budget, cost, options.owner)

    def _look_up(
        self,
        engine: EngineState,
        number: int,
        keys: Sequence[tuple[int, bytes]],
        budget: float,
        cost: PrefixCost | None,
        owner: Owner,
    ) -> bool:
        """Looks up the keys after those that can be provided. False if no tier is to be asked."""
        known = self._known_keys(engine, keys)
        names = [engine.key(group, block_hash) for group, block_hash in keys[known:]]
        seconds = budget
        if cost is not None and cost.prefill is not None and names:
            start = cost.ends[known - 1] if known else cost.start_tokens
            missing = cost.prefill.seconds(start, cost.ends[-1])
            seconds = min(seconds, LOOKUP_SHARE * missing)
        promotion = Promotion(engine, number, [], [])
        promotion.started_at = self._context.clock()
        promotion.looked_up = True

        def looked_up() -> None:
            if promotion.ended:
                return
            took = self._context.clock() - promotion.started_at
            found = self._known_keys(engine, keys)
            if not found:
                self._end(promotion, False)
                return
            del engine.promotions[number]
            left = None
            if cost is not None:
                waited = cost.waited_seconds + took
                left = replace(cost, ends=cost.ends[:found], waited_seconds=waited)
            self._start(engine, number, keys[:found], max(budget - took, 0.0), left, owner)

        engine.promotions[number] = promotion
        may_ask = engine.persistent and not self._context.fenced and None not in names
        wanted = [name for name in names if name is not None] if may_ask else []
        if not self._lookups.begin(engine.namespace, wanted, seconds, looked_up):
            looked_up()
        return True

    def _known_keys(self, engine: EngineState, keys: Sequence[tuple[int, bytes]]) -> int:
        """How many keys of the prefix some index has."""
        for position, (group, block_hash) in enumerate(keys):
            key = engine.key(group, block_hash)
            if key is None or not self._tiers.holds(engine.namespace, key):
                return position
        return len(keys)

    def _start(
        self,
        engine: EngineState,
        number: int,
        keys: Sequence[tuple[int, bytes]],
        budget: float,
        cost: PrefixCost | None,
        owner: Owner,
    ) -> None:
        promotion = self._plan(engine, number, keys, budget, cost, owner)
        promotion.keys += [b""] * (len(keys) - len(promotion.keys))
        engine.promotions[number] = promotion
        self._verify(promotion)
        promotion.advance()
        self._start_reads(promotion)
        self._end_or_wait(promotion)

    # Planning.

    def _plan(
        self,
        engine: EngineState,
        number: int,
        keys: Sequence[tuple[int, bytes]],
        budget_seconds: float,
        cost: PrefixCost | None,
        owner: Owner,
    ) -> Promotion:
        """Finds the longest prefix that can be provided, pins its keys in RAM, and cuts it to what
        is worth loading."""
        if len(engine.promotions) >= MAX_PROMOTIONS:
            keys = ()
            self._context.count("promotions_cut", "", "too_many_promotions")
        prefix = self._find_prefix(engine, keys, budget_seconds > 0, owner)
        waited = cost.waited_seconds if cost is not None else 0.0
        decision, deadline = self._planner.decide(
            PrefixSources(prefix.sources, prefix.sizes, prefix.unverified),
            cost,
            budget_seconds + waited,
        )
        for tier in decision.too_slow:
            self._probe_tier(engine, self._tiers.groups[tier - 1], prefix)
        chosen = decision.chosen
        length = chosen.keys if chosen is not None else 0
        if length < len(prefix.keys):
            self._context.count("promotions_cut", "", "selection")
            for entry in prefix.entries[length:]:
                if entry is not None:
                    self._resident.unpin(entry)
            prefix.cut(length)
        promotion = Promotion(engine, number, prefix.keys, prefix.entries)
        promotion.groups, promotion.sources = prefix.groups, prefix.sources
        promotion.owner = owner
        for position, source in enumerate(prefix.sources):
            if source:
                promotion.not_started.setdefault(source, deque()).append(position)
        if chosen is not None and chosen.parallel:
            promotion.parallel = chosen.parallel
        promotion.deadline = deadline
        promotion.end_tokens = cost.ends if cost is not None else ()
        if cost is not None and not cost.whole:
            promotion.copy_seconds = cost.copy_seconds
        promotion.started_at = self._context.clock() - waited
        return promotion

    def _find_prefix(
        self,
        engine: EngineState,
        keys: Sequence[tuple[int, bytes]],
        may_wait: bool,
        owner: Owner,
    ) -> _PromotionPrefix:
        """The longest prefix of ``keys`` that can be provided; its keys in RAM are pinned."""
        resident, namespace = self._resident, engine.namespace
        prefix = _PromotionPrefix()
        room: dict[int, int] = {}
        tenant = resident.accounts.account_of(owner.tenant)
        to_read = 0
        for group, block_hash in keys:
            key = engine.key(group, block_hash)
            if key is None:
                self._context.violation("unknown_group")
                break
            entry = resident.get(namespace, key)
            if entry is not None and resident.is_expired(entry):
                self._context.count("promotions_cut", "", "expired")
                break
            if entry is not None and (entry.unverified is None or may_wait):
                if entry.evicting:
                    resident.cancel_eviction(entry)
                if entry.unverified is None:
                    resident.pin(entry)
                    prefix.add(group, key, 0, 0, entry)
                else:
                    prefix.unverified.add(len(prefix.keys))
                    prefix.add(group, key, 0, 0, None)
                continue
            source = (
                self._find_source(engine, group, key, room)
                if may_wait and entry is None
                else "no_time"
            )
            if isinstance(source, str):
                self._context.count("promotions_cut", "", source)
                break
            # A key that is already being read adds nothing to read.
            reading = self._reads.get(namespace, key) is not None
            if tenant and not reading:
                to_read += engine.geometries[group].kind.slot_bytes
                if self._allocator.tenant_room(tenant) < to_read:
                    self._context.count("promotions_cut", "", "tenant_quota")
                    break
            prefix.add(group, key, source, 0 if reading else engine.info.slot_bytes[group], None)
        return prefix

    def _find_source(
        self, engine: EngineState, group: int, key: bytes, room: dict[int, int]
    ) -> int | str:
        """Index of the tier that can provide a key that is not in RAM, or why none can. ``room``:
        by slot size, how many reads this promotion may still add."""
        if self._context.fenced:
            return "fenced"
        if not engine.persistent:
            return "absent"
        read = self._reads.get(engine.namespace, key)
        if read is not None:
            if self._reads.can_join(read, self._context.clock()):
                return read.secondary.index
            return "read_past_its_estimate"
        secondary = self._tiers.best_for(engine.namespace, key)
        if secondary is None:
            return "absent"
        kind = engine.geometries[group].kind
        if kind.slot_bytes not in room:
            room[kind.slot_bytes] = self._allocator.spare(kind)
        if room[kind.slot_bytes] <= 0:
            return "no_slot"
        room[kind.slot_bytes] -= 1
        return secondary.index

    def _probe_tier(self, engine: EngineState, group: TierGroup, prefix: _PromotionPrefix) -> None:
        """Measures a tier that was found too slow: reads as many of the prefix's keys as the tier
        has threads."""
        due = [member for member in group.members if self._planner.probe_due(member)]
        if not due:
            return
        self._context.count("tier_probe_reads", group.name)
        batches = {member: member.model.begin(self._context.clock()) for member in due}
        left = {member: member.read_threads for member in due}
        positions = [p for p, source in enumerate(prefix.sources) if source == group.index]
        for position in positions:
            key, geometry = prefix.keys[position], engine.geometries[prefix.groups[position]]
            secondary = self._tiers.best_for(engine.namespace, key)
            if secondary is None or not left.get(secondary):
                continue
            if self._allocator.spare(geometry.kind) <= secondary.read_threads:
                return  # Slots are scarce. A measurement does not justify an eviction.
            left[secondary] -= 1
            if self._reads.get(engine.namespace, key) is None:
                batch = batches[secondary]
                read = self._reads.start(engine.namespace, key, geometry, secondary, batch)
                self._reads.wait(read, _ProbeRead())

    # Progress.

    def _verify(self, promotion: Promotion) -> None:
        """Starts the verification of the promotion's recovered objects."""
        engine = promotion.engine
        for position, source in enumerate(promotion.sources):
            if source or promotion.entries[position] is not None:
                continue
            key, geometry = (
                promotion.keys[position],
                engine.geometries[promotion.groups[position]],
            )
            entry = self._resident.get(engine.namespace, key)
            waiter = _PromotionKey(self, promotion, position)
            if entry is None or not self._recovered.verify(entry, geometry, waiter):
                promotion.limit = position
                self._give_up(promotion, position)
                return
            promotion.verifying.add(position)

    def _start_reads(self, promotion: Promotion) -> None:
        """Starts as many reads as may run in parallel."""
        in_progress: dict[int, int] = {}
        for position in promotion.reads:
            source = promotion.sources[position]
            in_progress[source] = in_progress.get(source, 0) + 1
        for source, not_started in promotion.not_started.items():
            running = in_progress.get(source, 0)
            while not_started and running < promotion.parallel:
                position = not_started.popleft()
                if position >= promotion.limit:
                    not_started.clear()
                elif self._request(promotion, position):
                    running += position in promotion.reads
                else:
                    promotion.limit = position
                    self._give_up(promotion, position)
        promotion.advance()

    def _request(self, promotion: Promotion, position: int) -> bool:
        """Pins one key, joins its read or starts one; False if no tier can provide it."""
        engine, key = promotion.engine, promotion.keys[position]
        entry = self._resident.get(engine.namespace, key)
        if entry is not None and entry.unverified is None:
            # It has become resident since the promotion was planned.
            if entry.evicting:
                self._resident.cancel_eviction(entry)
            self._resident.pin(entry)
            promotion.entries[position] = entry
            return True
        read = self._reads.get(engine.namespace, key)
        if read is None:
            secondary = self._tiers.best_for(engine.namespace, key)
            geometry = engine.geometries[promotion.groups[position]]
            if secondary is None or not self._has_tenant_room(promotion, geometry):
                return False
            batch = promotion.batches.get(secondary)
            if batch is None:
                batch = secondary.model.begin(self._context.clock(), promotion.parallel)
                promotion.batches[secondary] = batch
            read = self._reads.start(
                engine.namespace, key, geometry, secondary, batch, promotion.owner
            )
            if position and promotion.groups[position - 1] == promotion.groups[position]:
                read.previous = promotion.keys[position - 1]
        elif not self._reads.can_join(read, self._context.clock()):
            # The read of another promotion, which has become slow since this one was planned.
            self._context.count("promotions_cut", "", "read_past_its_estimate")
            return False
        promotion.tiers[position] = read.secondary.index
        promotion.reads[position] = read
        self._reads.wait(read, _PromotionKey(self, promotion, position))
        return True

    def _has_tenant_room(self, promotion: Promotion, geometry: ObjectGeometry) -> bool:
        """Whether the tenant's share has room for one more read. Since this promotion was planned,
        others may have taken what it found."""
        tenant = self._resident.accounts.account_of(promotion.owner.tenant)
        if not tenant or self._allocator.tenant_room(tenant) >= geometry.kind.slot_bytes:
            return True
        self._context.count("promotions_cut", "", "tenant_quota")
        return False

    def key_arrived(
        self, promotion: Promotion, position: int, entry: Entry, tier_index: int
    ) -> None:
        """Handles a key that has arrived in RAM."""
        if promotion.reads.pop(position, None) is None and position not in promotion.verifying:
            return
        promotion.verifying.discard(position)
        self._resident.pin(entry)
        promotion.entries[position] = entry
        promotion.tiers[position] = tier_index
        self._continue(promotion)

    def key_lost(self, promotion: Promotion, position: int, reason: str) -> None:
        """Gives up a key that cannot be provided, and the keys after it."""
        if promotion.reads.pop(position, None) is None and position not in promotion.verifying:
            return
        if position in promotion.verifying:
            promotion.verifying.remove(position)
            if self._request(promotion, position):
                # A secondary tier has the key as well.
                self._continue(promotion)
                return
        self._context.count("promotions_cut", "", reason)
        promotion.limit = min(promotion.limit, position)
        self._give_up(promotion, promotion.limit)
        self._start_reads(promotion)
        self._end_or_wait(promotion)

    def _continue(self, promotion: Promotion) -> None:
        promotion.advance()
        self._start_reads(promotion)
        self._end_or_wait(promotion)

    def _give_up(self, promotion: Promotion, start: int) -> None:
        """Releases every key from position ``start`` on; later keys first, so that earlier ones are
        evicted later."""
        for position in [p for p in promotion.reads if p >= start]:
            waiter = _PromotionKey(self, promotion, position)
            self._reads.stop_waiting(promotion.reads.pop(position), waiter)
        for position in [p for p in promotion.verifying if p >= start]:
            promotion.verifying.remove(position)
            waiter = _PromotionKey(self, promotion, position)
            self._recovered.stop_waiting(
                promotion.engine.namespace, promotion.keys[position], waiter
            )
        for position in range(len(promotion.entries) - 1, start - 1, -1):
            entry = promotion.entries[position]
            if entry is not None:
                promotion.entries[position] = None
                self._resident.unpin(entry)

    # The end.

    def _end_or_wait(self, promotion: Promotion) -> None:
        """Ends a promotion that waits for nothing, and sets the timer of any other."""
        if promotion.ended:
            return
        if not promotion.reads and not promotion.verifying:
            self._end(promotion, False)
            return
        self._announce(promotion)
        expires_at, timer = promotion.expires_at(), promotion.timer
        if timer is None or timer.when < expires_at:
            promotion.stop_timer()
            promotion.timer = self._context.timers.at(
                expires_at, partial(self._time_out, promotion)
            )

    def _announce(self, promotion: Promotion) -> None:
        """Tells the engine which keys have arrived, once the rest is expected to arrive while it
        copies them; from then on in parts, so that there are few messages."""
        known, arrived = promotion.announced, promotion.arrived
        if known:
            due = arrived - known >= max(1, promotion.limit // ANNOUNCED_PARTS)
        else:
            due = arrived > 0 and self._arrives_within(promotion, arrived * promotion.copy_seconds)
            if due:
                self._context.count("promotions_answered_early")
        if not due:
            return
        promotion.announced = arrived
        entries = promotion.entries[known:arrived]
        self._context.emit(
            PromotionArriving(
                promotion.engine.name,
                promotion.number,
                promotion.limit,
                known,
                tuple(promotion.tiers[known:arrived]),
                tuple(entry.location for entry in entries if entry is not None),
            )
        )

    def _arrives_within(self, promotion: Promotion, seconds: float) -> bool:
        """Whether every key that is missing is expected within ``seconds``, by the measurements of
        its tier and with the margin of the selection."""
        if seconds <= 0 or promotion.verifying:
            return False
        now = self._context.clock()
        sizes: dict[int, list[int]] = {}
        for position, read in promotion.reads.items():
            sizes.setdefault(promotion.sources[position], [])
            if read.slot is None or not self._reads.can_join(read, now):
                return False
        for source, positions in promotion.not_started.items():
            slot_bytes = promotion.engine.info.slot_bytes
            sizes.setdefault(source, []).extend(
                slot_bytes[promotion.groups[position]] for position in positions
            )
        for source, waiting in sizes.items():
            if not source:
                return False
            estimate, threads, reads, size_bytes = self._tiers.groups[source - 1].load(now)
            if estimate is None:
                return False
            rounds = -(-(reads + len(waiting)) // threads)
            expected = estimate.seconds(rounds, size_bytes + sum(waiting))
            if expected * (1 + MARGIN + SPREAD_FACTOR * estimate.spread) > seconds:
                return False
        return True

    def _time_out(self, promotion: Promotion) -> None:
        promotion.timer = None
        self._context.count("promotions_out_of_time")
        for read in list(promotion.reads.values()):
            self._reads.charge_tier(read)
        if not promotion.ended:
            self._end(promotion, False)

    def _end(self, promotion: Promotion, cancelled: bool) -> None:
        promotion.ended = True
        promotion.stop_timer()
        usable = 0
        while not cancelled and usable < promotion.limit and promotion.entries[usable] is not None:
            usable += 1
        self._give_up(promotion, usable)
        if cancelled:
            outcome = PromotionOutcome.CANCELLED
        elif promotion.looked_up:
            outcome = PromotionOutcome.ABSENT
        elif usable == len(promotion.keys) and usable:
            outcome = PromotionOutcome.WHOLE
        else:
            outcome = PromotionOutcome.PARTIAL if usable else PromotionOutcome.FAILED
        engine, number = promotion.engine, promotion.number
        self._context.count("promotions_ended", "", outcome.value)
        self._context.emit(
            PromotionEnded(
                engine.name,
                number,
                outcome,
                usable,
                tuple(promotion.tiers[:usable]),
                tuple(entry.location for entry in promotion.entries[:usable] if entry is not None),
            )
        )
        if promotion.on_end is not None:
            # A load has started: it takes over what has arrived.
            if not cancelled:
                promotion.on_end(
                    [entry for entry in promotion.entries[:usable] if entry is not None]
                )
            self._give_up(promotion, 0)
            del engine.promotions[number]
        elif usable:
            promotion.timer = self._context.timers.at(
                self._context.clock() + LEASE_SECONDS, partial(self._expire_lease, promotion)
            )
        else:
            del engine.promotions[number]

    def _expire_lease(self, promotion: Promotion) -> None:
        promotion.timer = None
        self._context.count("promotion_leases_expired")
        self.release(promotion)

    def release(self, promotion: Promotion) -> None:
        """Releases everything that a promotion holds, because its engine loads, cancels or closes.
        One that has not ended is cancelled."""
        if promotion.ended:
            promotion.stop_timer()
            del promotion.engine.promotions[promotion.number]
            self._give_up(promotion, 0)
        else:
            self._end(promotion, True)
