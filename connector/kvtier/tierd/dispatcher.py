"""Between sessions and store: turns engine messages into store calls, and store events into
messages.

Only the loop's thread uses it. It has no socket: ``send`` sends a message to a route.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import repeat

import msgspec

from kvtier.errors import KVTierError
from kvtier.store.cost_model import Prefill, PrefixCost
from kvtier.store.store import TierStore
from kvtier.store.types import (
    MEMORY_BIT,
    NO_OWNER,
    ChunkId,
    CreditsGranted,
    EngineInfo,
    KeysEvicting,
    LoadExtended,
    Owner,
    PresenceChanged,
    PromotionArriving,
    PromotionEnded,
    PromotionOptions,
    StoreCounters,
    StoreEvent,
    UsableTiersChanged,
    checked_owner,
)
from kvtier.tierd.replication import ReplicaPublisher
from kvtier.tierd.sessions import EngineSessions, Session
from kvtier.tierd.shard_layout import ShardRange, in_part
from kvtier.tierd.wire import (
    WHOLE_POOL,
    Abort,
    Arriving,
    Cancel,
    Credits,
    Deliver,
    EvictionAck,
    FromEngine,
    Identify,
    Keep,
    Load,
    LoadPinned,
    LoadReleased,
    Message,
    Prefetch,
    Promote,
    Promoted,
    Queued,
    Ready,
    Reserve,
    Resync,
)

_log = logging.getLogger("kvtier.tierd")


def _prefix_cost(message: Promote) -> PrefixCost | None:
    """The cost of the prompt, as the promotion describes it."""
    if not message.ends:
        return None
    prefill = Prefill(message.alpha, message.beta) if message.alpha or message.beta else None
    return PrefixCost(
        message.start_tokens,
        message.ends,
        prefill,
        message.waited_seconds,
        message.whole,
        message.copy_seconds,
    )


class Dispatcher:
    """``describe(namespace, text)`` stores the canonical text of a namespace in the tiers that will
    hold its objects."""

    def __init__(
        self,
        store: TierStore,
        pool_bytes: int,
        send: Callable[[bytes, Message], None],
        counters: StoreCounters,
        describe: Callable[[str, str], None],
    ) -> None:
        self.store = store
        self._stopping = False
        self._pool_bytes = pool_bytes
        self._send = send
        self._counters = counters
        self._describe = describe
        self._publisher = ReplicaPublisher(
            send,
            store.presence,
            store.acknowledge_eviction,
            lambda: store.usable_bits,
            lambda: store.asked_bits,
        )
        self._engines: dict[str, EngineSessions] = {}

    def stop_reservations(self) -> None:
        """Stops new stores: later reservations are counted and ignored."""
        self._stopping = True

    # Engines.

    def open(self, engine: EngineSessions, now: float) -> None:
        """Opens an engine in the store and announces it to its members. Raises ``KVTierError``."""
        info, scheduler = engine.info, engine.scheduler
        if info is None or scheduler is None:
            raise KVTierError("the engine has no description")
        largest, room = max(info.slot_bytes), self.store.max_object_bytes(info)
        if largest > room:
            has = f"the host pool has {self._pool_bytes}"
            if room < self._pool_bytes:
                has += f", with room for one range of {room}"
            raise KVTierError(f"the memory tier is too small: an object has {largest} bytes, {has}")
        self._publish(self.store.take_events(), now)
        self.store.open_engine(info)
        self._log_layout(engine, info)
        self._engines[engine.name] = engine
        if info.persistent:
            self._describe(info.namespace, engine.canonical)
        self._announce(engine, scheduler, now)

    def _log_layout(self, engine: EngineSessions, info: EngineInfo) -> None:
        """Says once per opening of an engine with several ranks what each of them registers."""
        if engine.ranks < 2:
            return
        layout = self.store.layout
        if self.store.is_scattered(info.engine):
            _log.info(
                "engine %s: the host pool has %d parts; each rank registers %d bytes",
                engine.engine,
                layout.parts,
                layout.part_bytes,
            )
            return
        reason = engine.one_range_reason or (
            f"the pool holds objects of another layout, in {layout.parts} parts"
        )
        _log.info("engine %s: each rank registers the whole host pool: %s", engine.engine, reason)

    def close(self, engine: EngineSessions, proven: bool) -> None:
        """Closes an engine in the store."""
        self._engines.pop(engine.name, None)
        # Sessions decide when the processes are gone, so the store's own timeout is off.
        self.store.close_engine(engine.name, proven, expires=False)

    def session_removed(self, route: bytes) -> None:
        """Handles the end of a session."""
        self._publisher.stop(route)

    def _announce(
        self, engine: EngineSessions, scheduler: Session, now: float, identity: int = 0
    ) -> None:
        info = engine.info
        if info is None:
            return
        ready = Ready(
            namespace=info.namespace,
            slot_bytes=info.slot_bytes,
            persistent=info.persistent,
            weights=engine.weights,
            identity=identity,
        )
        for member in engine.members():
            if member.is_scheduler:
                self._send(member.route, ready)
                continue
            shards, span = self._shards_of(engine, info, member.hello.rank)
            ranges = tuple((each.offset, each.size_bytes, each.writes) for each in shards)
            self._send(member.route, msgspec.structs.replace(ready, shards=ranges, span=span))
        self._start_replica(engine, scheduler, now)

    def _shards_of(
        self, engine: EngineSessions, info: EngineInfo, rank: int
    ) -> tuple[tuple[ShardRange, ...], tuple[int, int]]:
        """The ranges of a rank relative to a slot's offset, and the bytes of the pool that they are
        in."""
        shards = engine.shards[rank]
        if not self.store.is_scattered(info.engine):
            return shards, WHOLE_POOL
        span = self.store.layout.span(engine.parts[rank])
        return in_part(shards, span[0]), span

    def _start_replica(self, engine: EngineSessions, scheduler: Session, now: float) -> None:
        if engine.info is not None:
            self._publish(self.store.take_events(), now)
            self._publisher.start(scheduler.route, engine.info.namespace)

    def _identify(
        self, engine: EngineSessions, scheduler: Session, message: Identify, now: float
    ) -> None:
        """Moves an engine to the namespace of the weights that it has now."""
        info = engine.info
        complete = len(message.weights) == engine.ranks or bool(message.ephemeral_reason)
        if info is None or engine.derive is None or not complete:
            self._counters.add("protocol_violations", "", "scheduler_Identify")
            return
        persistent = not (scheduler.hello.ephemeral_reason or message.ephemeral_reason)
        engine.weights = () if message.ephemeral_reason else message.weights
        namespace, engine.canonical = engine.derive(engine.weights)
        if not persistent:
            namespace = secrets.token_hex(16)
        self._publish(self.store.take_events(), now)
        engine.info = replace(info, namespace=namespace, persistent=persistent)
        self.store.reset_engine(engine.name, namespace, persistent)
        self._counters.add("engines_reset")
        if persistent:
            self._describe(namespace, engine.canonical)
        self._announce(engine, scheduler, now, message.number)

    # Messages of engines.

    def handle(
        self, session: Session, engine: EngineSessions, message: FromEngine, now: float
    ) -> None:
        """Handles one message of a session."""
        if session.is_scheduler:
            self._handle_scheduler(session, engine, message, now)
        else:
            self._handle_worker(session, engine, message)

    def _handle_scheduler(
        self, session: Session, engine: EngineSessions, message: FromEngine, now: float
    ) -> None:
        name, store = engine.name, self.store
        if isinstance(message, EvictionAck):
            self._publisher.acknowledge(session.route, message.token)
        elif not engine.open:
            self._counters.add("messages_while_not_open", "", type(message).__name__)
            if isinstance(message, Promote):
                # Every promotion is answered exactly once.
                self._send(
                    session.route, Promoted(promotion=message.promotion, usable=0, outcome="failed")
                )
        elif isinstance(message, Reserve):
            if self._stopping:
                self._counters.add("reservations_while_stopping", "", "", len(message.items))
                return
            owners = self._owners(message)
            for reservation, group, key, slot, previous in message.items:
                chunk, owner = ChunkId(group, key, previous), next(owners, NO_OWNER)
                store.reserve(name, reservation, chunk, slot, owner)
        elif isinstance(message, Promote):
            store.promote(
                name,
                message.promotion,
                message.keys,
                message.budget_seconds,
                _prefix_cost(message),
                PromotionOptions(message.look_up, self._owner(message.owner)),
            )
        elif isinstance(message, Prefetch):
            owner = self._owner(message.owner)
            store.prefetch(name, message.promotion, message.keys, owner, message.queued)
        elif isinstance(message, Queued):
            for number, keys in message.requests:
                store.queue(name, number, keys)
        elif isinstance(message, Cancel):
            store.cancel(name, message.promotion)
        elif isinstance(message, Load):
            owner = self._owner(message.owner)
            pinned = store.load(name, message.load, message.promotion, message.keys, owner)
            self._send_to_workers(engine, LoadPinned(load=message.load, keys=pinned))
        elif isinstance(message, Keep):
            store.keep(name, message.keys, self._owner(message.owner))
        elif isinstance(message, LoadReleased):
            store.release_load(name, message.load)
        elif isinstance(message, Resync):
            self._counters.add("resyncs")
            self._start_replica(engine, session, now)
        elif isinstance(message, Identify):
            self._identify(engine, session, message, now)
        else:
            self._counters.add("protocol_violations", "", f"scheduler_{type(message).__name__}")

    def _owner(self, owner: Owner) -> Owner:
        """The owner that a message names. One that cannot be is none, and limited to RAM if it
        limits the tiers."""
        found = checked_owner(owner)
        if found is None:
            self._counters.add("protocol_violations", "", "owner")
            return Owner(tiers=MEMORY_BIT) if owner.tiers else NO_OWNER
        return found

    def _owners(self, message: Reserve) -> Iterator[Owner]:
        """The owner of each item; fewer than there are items if the rest has none."""
        left = len(message.items)
        for count, named in message.owners:
            owner, here = self._owner(named), min(max(count, 0), left)
            left -= here
            yield from repeat(owner, here)

    def _handle_worker(self, session: Session, engine: EngineSessions, message: FromEngine) -> None:
        rank, name = session.hello.rank, engine.name
        if not engine.open:
            self._counters.add("messages_while_not_open", "", type(message).__name__)
        elif isinstance(message, Deliver):
            for reservation in message.reservations:
                self.store.deliver(name, rank, reservation)
        elif isinstance(message, Abort):
            for reservation in message.reservations:
                self.store.abort(name, rank, reservation)
        else:
            self._counters.add("protocol_violations", "", f"worker_{type(message).__name__}")

    # Events of the store.

    def run_once(self, now: float) -> bool:
        """Processes completed store operations and sends events. True: there is more to send."""
        self.store.pump()
        self._publish(self.store.take_events(), now)
        return self._publisher.publish(now)

    def _publish(self, events: Iterable[StoreEvent], now: float) -> None:
        for event in events:
            if isinstance(event, PresenceChanged):
                self._publisher.presence_changed(
                    event.namespace, event.key, event.bits, event.present, event.location
                )
            elif isinstance(event, KeysEvicting):
                self._publisher.evicting(event.namespace, event.token, event.keys, now)
            elif isinstance(event, UsableTiersChanged):
                self._publisher.usable_tiers_changed()
                self._describe_all()
            else:
                self._send_to_scheduler(event)

    def _describe_all(self) -> None:
        """A tier that became usable has missed the descriptions that were written when the engines
        opened."""
        for engine in self._engines.values():
            if engine.info is not None and engine.info.persistent:
                self._describe(engine.info.namespace, engine.canonical)

    def _send_to_workers(self, engine: EngineSessions, message: Message) -> None:
        for session in engine.workers.values():
            self._send(session.route, message)

    def _send_to_scheduler(
        self, event: CreditsGranted | PromotionEnded | PromotionArriving | LoadExtended
    ) -> None:
        engine = self._engines.get(event.engine)
        if engine is None or engine.scheduler is None:
            return
        if isinstance(event, LoadExtended):
            self._send_to_workers(engine, LoadPinned(load=event.load, keys=event.keys))
            return
        route = engine.scheduler.route
        if isinstance(event, CreditsGranted):
            self._send(route, Credits(group=event.group, slots=event.slots))
            return
        # A promotion's keys must be in the replica before its end is announced.
        self._publisher.flush()
        if isinstance(event, PromotionArriving):
            self._send(
                route,
                Arriving(
                    promotion=event.promotion,
                    predicted=event.predicted,
                    first=event.first,
                    tiers=event.tiers,
                    locations=event.locations,
                ),
            )
            return
        self._send(
            route,
            Promoted(
                promotion=event.promotion,
                usable=event.usable,
                outcome=event.outcome.value,
                tiers=event.tiers,
                locations=event.locations,
            ),
        )
