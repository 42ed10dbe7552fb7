"""The scheduler side's session with tierd: handshake, replica, slot credits and live settings.

Two threads use a session. The client's I/O thread applies deltas to the replica, so that eviction
notices are acknowledged even while the engine is idle; it is the replica's only writer. The
scheduler's thread only looks keys up, which is atomic.

Every other message waits in the inbox, in order, until the scheduler's thread calls ``drain``. The
loss of tierd is an inbox entry as well, so messages of one session are never applied to the next.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from kvtier.config.loader import merge_live
from kvtier.config.models import Daemon, Live, LiveTier, StorePolicy, Topology
from kvtier.engines.common.model_identity import EngineIdentity
from kvtier.engines.common.owners import Owners
from kvtier.planner import Planner
from kvtier.processes import own_identity
from kvtier.store.types import MEMORY_BIT, RAM_BITS, Owner
from kvtier.tierd.client import ClientOptions, TierdClient
from kvtier.tierd.liveness import hold_peer_lock
from kvtier.tierd.replication import Replica
from kvtier.tierd.wire import (
    PROTOCOL,
    Arriving,
    Credits,
    Delta,
    EvictionNotice,
    Heartbeat,
    Hello,
    Identify,
    LiveSettings,
    Message,
    Promoted,
    Ready,
    Resync,
    SessionRefused,
    Usable,
    Welcome,
)

logger = logging.getLogger(__name__)
MAX_PRESENCE_CHANGES = 16_384


class SchedulerClient(Protocol):
    """The part of ``TierdClient`` that the scheduler side uses. ``epoch`` is 0 while detached."""

    @property
    def epoch(self) -> int: ...

    def start(self) -> None: ...

    def send(self, message: Message) -> bool: ...

    def close(self, timeout_seconds: float) -> None: ...


SchedulerConnect = Callable[
    [
        Path,
        Callable[[], Hello],
        Callable[[Message], None],
        Callable[[str], None],
        Callable[[], Heartbeat],
    ],
    SchedulerClient,
]
"""(run directory, hello, sink, on_lost, heartbeat) -> client that reattaches by itself."""


def connect_scheduler(
    run_directory: Path,
    hello: Callable[[], Hello],
    sink: Callable[[Message], None],
    on_lost: Callable[[str], None],
    heartbeat: Callable[[], Heartbeat],
    *,
    private: bool = False,
) -> SchedulerClient:
    """Returns the real client.

    The scheduler side copies nothing, so nothing has to be drained before it reattaches.
    """
    return TierdClient(
        run_directory=run_directory,
        hello=hello,
        sink=sink,
        on_lost=on_lost,
        heartbeat=heartbeat,
        options=ClientOptions(auto_reattach=True, require_private=private),
    )


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session ended. Promotions and credits of it are void."""


class PresenceChanges:
    """Keys whose presence may have changed, from the I/O thread to the scheduler's thread.

    ``all_changed``: so may that of any other key. ``concerns``: whether a key is of interest; any
    thread may call it.
    """

    def __init__(self, concerns: Callable[[bytes], bool]) -> None:
        self.keys: deque[bytes] = deque()
        self.all_changed = False
        self._concerns = concerns
        self._stopped = False

    def stop(self) -> None:
        """Notes nothing more."""
        self._stopped = True
        self.keys.clear()
        self.all_changed = False

    def note_all(self) -> None:
        """Any key may have changed."""
        self.all_changed = not self._stopped

    def note(self, message: Delta | EvictionNotice | Usable, stale: bool) -> None:
        """The replica has applied ``message``. ``stale``: it is empty until the next snapshot."""
        if self._stopped:
            return
        if (
            stale
            or isinstance(message, Usable)
            or (isinstance(message, Delta) and message.snapshot)
        ):
            self.all_changed = True
        if isinstance(message, Usable):
            return
        if isinstance(message, EvictionNotice):
            keys = list(message.keys)
        else:
            keys = [added[0] for added in message.added]
            keys += [removed[0] for removed in message.removed]
        concerned = [key for key in keys if self._concerns(key)]
        if len(self.keys) + len(concerned) > MAX_PRESENCE_CHANGES:
            self.all_changed = True
        else:
            self.keys.extend(concerned)

    def take(self, limit: int) -> list[bytes]:
        """Returns up to ``limit`` keys."""
        keys: list[bytes] = []
        while self.keys and len(keys) < limit:
            keys.append(self.keys.popleft())
        return keys


class TierdSession:
    """The scheduler side's view of tierd, across reconnects.

    Methods belong to the scheduler's thread unless they say otherwise. ``engine``: the name that
    the workers use too. ``identity`` is called on the I/O thread before each attempt to attach,
    and may block.
    """

    def __init__(
        self,
        topology: Topology,
        planner: Planner,
        engine: str,
        identity: Callable[[], EngineIdentity],
        connect: SchedulerConnect | None = None,
    ) -> None:
        private = topology.structural.daemon is Daemon.ENGINE
        connect = connect or partial(connect_scheduler, private=private)
        self.inbox: deque[Message | SessionLost] = deque()
        """Bounded by tierd: one ``Promoted`` for each ``Promote``, a few ``Arriving``,
        credits only for used slots, and live settings, which people change."""
        self.replica = Replica()
        self.replica_changes = 0
        """Rises with every delta. A key that was missing may be present afterwards."""
        self.live: Live = topology.live
        self.epoch = 0
        """Epoch of the session whose messages are applied; 0 without one."""
        self.ready: Ready | None = None
        """The open namespace; None without one."""
        self.credits: list[deque[int]] = [deque() for _ in planner.groups]
        """Free slots by group."""
        self.heartbeat = Heartbeat()
        """The next heartbeat. The scheduler's thread replaces it, the I/O thread reads it."""
        self.counters: Counter[str] = Counter()
        self._tier_names = tuple(tier.name for tier in topology.structural.tiers)
        self._structural = topology.structural
        self._owners = Owners(topology.structural)
        self._planner = planner
        self._engine = engine
        self._identity = identity
        self._refused_reason = ""
        self._snapshot_epoch = 0
        """Epoch whose snapshot has started to arrive; written by the I/O thread."""
        self.suspended = False
        """Whether the namespace is not used although it may be open."""
        self.assumed = False
        """Whether it may be read while it is suspended: the workers use nothing of it before they
        know that the weights are those of the namespace."""
        self.stale_weights = False
        """Whether it is suspended until vLLM resets its prefix cache."""
        self._identity_wanted: Identify | None = None
        """The identity since the number rose for the first time; None: as in the handshakes."""
        self._identify_unsent = False
        self._presence_changes: PresenceChanges | None = None
        self._client = connect(
            Path(topology.structural.run_directory),
            self._hello,
            self.receive,
            self.on_client_lost,
            lambda: self.heartbeat,
        )

    def follow_presence(self, concerns: Callable[[bytes], bool]) -> PresenceChanges:
        """Returns where changes of keys are noted from now on. Call it before ``start``."""
        self._presence_changes = PresenceChanges(concerns)
        return self._presence_changes

    def start(self) -> None:
        """Starts to attach, in the background."""
        self._client.start()

    def close(self, timeout_seconds: float) -> None:
        """Detaches. Any thread."""
        self._client.close(timeout_seconds)

    # The client's I/O thread.

    def _hello(self) -> Hello:
        identity, process, ranks = self._identity(), own_identity(), self._planner.ranks
        return Hello(
            protocol=PROTOCOL,
            role="scheduler",
            engine=self._engine,
            pid=process.pid,
            pid_namespace=process.pid_namespace,
            process_start=process.start,
            identity=identity.text,
            ephemeral_reason=identity.ephemeral_reason,
            ranks=ranks,
            shard_writers=self._planner.shard_writers,
            lock=hold_peer_lock(Path(self._structural.run_directory)),
        )

    def receive(self, message: Message) -> None:
        """Applies replica messages and queues all others. The client's sink."""
        if isinstance(message, Delta | EvictionNotice | Usable):
            acknowledgement = self.replica.apply(message)
            self.replica_changes += 1
            if self._presence_changes is not None:
                self._presence_changes.note(message, self.replica.stale)
            if isinstance(message, Delta) and message.snapshot:
                self._snapshot_epoch = self._client.epoch
            if acknowledgement is not None:
                self._client.send(acknowledgement)
            if self.replica.needs_resync():
                self._client.send(Resync())
            return
        if isinstance(message, Ready):
            # A snapshot of the new namespace follows; keys of the previous one must not match.
            self._clear_replica()
        self.inbox.append(message)

    def _clear_replica(self) -> None:
        self._snapshot_epoch = 0
        self.replica.clear()
        if self._presence_changes is not None:
            self._presence_changes.note_all()

    def on_client_lost(self, reason: str) -> None:
        """Handles the loss of tierd, and a session that tierd closed."""
        self._clear_replica()
        self.inbox.append(SessionLost())

    # The scheduler's thread.

    @property
    def namespace_open(self) -> bool:
        """Whether the engine's namespace is open and its credits are valid.

        The replica may still be filling.
        """
        return self.ready is not None and not self.suspended and self._client.epoch == self.epoch

    @property
    def replica_ready(self) -> bool:
        """Whether the namespace may be read: it is open and the replica is complete."""
        return (
            self.ready is not None
            and (not self.suspended or (self.assumed and bool(self.ready.weights)))
            and self._client.epoch == self.epoch == self._snapshot_epoch
            and not self.replica.stale
        )

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of one object by group; empty while no namespace is open."""
        return self.ready.slot_bytes if self.ready is not None else ()

    def send(self, message: Message) -> bool:
        """Sends ``message`` in the session whose messages are applied; False if that has ended.

        A slot number of one session means nothing in the next.
        """
        return self._client.epoch == self.epoch and self._client.send(message)

    def report_tokens(self, prompt_tokens: int, loaded: Mapping[int, int]) -> None:
        """tierd reports which share of the prompts' tokens came from which tier (``loaded``: tokens
        by the tier's index), all since the start."""
        by_tier = tuple(loaded.get(tier, 0) for tier in range(max(loaded, default=-1) + 1))
        previous = self.heartbeat
        if (previous.prompt_tokens, previous.loaded_tokens) != (prompt_tokens, by_tier):
            self.heartbeat = Heartbeat(prompt_tokens=prompt_tokens, loaded_tokens=by_tier)

    def tier(self, index: int) -> LiveTier:
        """Returns the live values of a tier."""
        return self.live.tiers.get(self.tier_name(index)) or LiveTier()

    def owner(self, state: object) -> Owner:
        """Whom the objects of a request belong to, and what it asks for them."""
        return self._owners.of(state, self.live, self._tier_names)

    @property
    def tier_names(self) -> tuple[str, ...]:
        """The names of all tiers, in order."""
        return self._tier_names

    def can_store_in(self, names: Container[str]) -> bool:
        """Whether objects that may be stored in these tiers only are stored anywhere."""
        memory, *others = self._tier_names
        if memory in names:
            return True
        persistent = self.ready is None or self.ready.persistent
        return persistent and any(
            name in names and self.live.tiers.get(name, LiveTier()).store_policy != StorePolicy.NONE
            for name in others
        )

    def tier_bits(self, names: Container[str]) -> int:
        """Returns the presence bits of the tiers with these names."""
        bits = sum(MEMORY_BIT << i for i, name in enumerate(self._tier_names) if name in names)
        return bits | RAM_BITS if bits & MEMORY_BIT else bits

    def tier_name(self, index: int) -> str:
        """Returns the name of a tier."""
        names = self._tier_names
        return names[index] if 0 <= index < len(names) else f"tier{index}"

    def drain(self) -> Iterator[Promoted | Arriving | SessionLost]:
        """Applies the messages in the inbox; yields the events that loads and stores handle."""
        inbox = self.inbox
        if self._identify_unsent:
            self._send_identify()
        while inbox:
            message = inbox.popleft()
            if isinstance(message, Promoted | Arriving):
                yield message
            elif isinstance(message, Credits):
                if self.epoch and 0 <= message.group < len(self.credits):
                    self.credits[message.group].extend(message.slots)
            elif isinstance(message, Welcome):
                self._on_welcome(message)
            elif isinstance(message, Ready):
                self._on_ready(message)
            elif isinstance(message, LiveSettings):
                self._apply_settings(message.settings)
            elif isinstance(message, SessionRefused):
                self._on_refused(message.reason)
            elif isinstance(message, SessionLost):
                self._on_lost()
                yield message

    def suspend(self, stale: bool = False, assumed: bool = False) -> None:
        """Stops the use of the namespace until ``identify``: the weights may have changed.

        ``stale``: they did, and vLLM's own blocks belong to other weights. ``assumed``: the
        namespace may still be read.
        """
        self.suspended, self.stale_weights, self.assumed = True, stale, assumed

    def identify(self, number: int, weights: tuple[str, ...], reason: str) -> bool:
        """The engine has ``weights``, by rank, at identity ``number``: uses the namespace that they
        belong to.

        ``reason``: why they are unknown. Objects then stay in RAM, in a namespace that is drawn at
        random for this number. If tierd has another namespace open, it is asked for the right one.
        Open promotions and credits stay valid. Returns whether the open namespace is the right one.
        """
        self.suspended = self.stale_weights = self.assumed = False
        self._identity_wanted = Identify(number=number, weights=weights, ephemeral_reason=reason)
        self._identify_unsent = False
        ready = self.ready
        if ready is not None and not self._is_wanted(ready):
            self.ready = None
            self._send_identify()
        return self.ready is not None

    def _is_wanted(self, ready: Ready) -> bool:
        wanted = self._identity_wanted
        if wanted is None:
            return True
        if wanted.ephemeral_reason:
            return ready.identity == wanted.number
        return ready.weights == wanted.weights

    def _send_identify(self) -> None:
        wanted = self._identity_wanted
        self._identify_unsent = wanted is not None and not self.send(wanted)

    def _on_welcome(self, welcome: Welcome) -> None:
        self.epoch = welcome.epoch
        self._refused_reason = ""
        self._tier_names = welcome.tiers or self._tier_names
        self.counters["attached"] += 1
        if welcome.settings:
            self._apply_settings(welcome.settings)
        logger.info("KVTier: attached the scheduler side to tierd, epoch %d", welcome.epoch)

    def _on_ready(self, ready: Ready) -> None:
        if not self.suspended and not self._is_wanted(ready):
            # tierd opened it for an identity of before.
            self._send_identify()
            return
        self.ready = ready
        self.counters["ready"] += 1
        logger.info(
            "KVTier: opened namespace %s, object sizes %s bytes%s",
            ready.namespace,
            ", ".join(map(str, ready.slot_bytes)),
            "" if ready.persistent else ", memory tier only, for the lifetime of this engine",
        )

    def _apply_settings(self, settings: str) -> None:
        self.live, problems = merge_live(settings.encode(), self.live, self._structural)
        for problem in problems:
            self.counters["settings_refused"] += 1
            logger.warning("KVTier: invalid live settings: %s", problem)

    def _on_refused(self, reason: str) -> None:
        self.counters["refused"] += 1
        if reason != self._refused_reason:
            self._refused_reason = reason
            logger.warning(
                "KVTier: serving without tiers: tierd refused the scheduler side: %s", reason
            )

    def _on_lost(self) -> None:
        self.counters["lost"] += 1
        self.ready = None
        self.epoch = 0
        self._identify_unsent = False
        for slots in self.credits:
            slots.clear()
