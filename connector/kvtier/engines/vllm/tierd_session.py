"""The scheduler side's end of the conversation with tierd: session, replica, credits, live settings.

Two threads. The client's I/O thread applies deltas to the replica, so that keys that are leaving are acknowledged even while the
engine is idle; it is the replica's only writer. The scheduler's thread only looks keys up, which is atomic. Everything else
waits in an inbox, in order, until the scheduler's thread takes it (``drain``); losing tierd is an entry there too, so what belonged
to one session is never mistaken for the next one's.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvtier.config.loader import merge_live
from kvtier.config.models import Live, LiveTier, Topology
from kvtier.tierd.replication import Replica
from kvtier.tierd.wire import (
    Credits,
    Delta,
    EvictionNotice,
    Heartbeat,
    Hello,
    Message,
    Promoted,
    Ready,
    Refused,
    ResetCache,
    Resync,
    Settings,
    Usable,
    Welcome,
)

logger = logging.getLogger(__name__)
Clock = Callable[[], float]
"""Seconds, monotonic."""
RESET_REASON = "the engine's cache was reset, which happens when weights are replaced"


class SchedulerClient(Protocol):
    """The part of tierd's client that the scheduler side uses (kvtier.tierd.client)."""

    @property
    def attached(self) -> bool: ...

    @property
    def epoch(self) -> int: ...

    def start(self, heartbeat: Callable[[], Heartbeat]) -> None: ...

    def send(self, message: Message) -> bool: ...

    def close(self, timeout_seconds: float) -> None: ...


ClientFactory = Callable[
    [Path, Callable[[], Hello], Callable[[Message], None], Callable[[str], None]], SchedulerClient
]
"""run directory, hello, sink, on_lost -> client that attaches again by itself."""


def tierd_client(
    run_directory: Path,
    hello: Callable[[], Hello],
    sink: Callable[[Message], None],
    on_lost: Callable[[str], None],
    *,
    private: bool = False,
) -> SchedulerClient:
    """The real client. It copies nothing, so nothing has to be drained before it attaches again."""
    from kvtier.tierd.client import ClientOptions, TierdClient

    return TierdClient(
        run_directory=run_directory,
        hello=hello,
        sink=sink,
        on_lost=on_lost,
        options=ClientOptions(auto_reattach=True, require_private=private),
    )


class _Lost:
    """Inbox entry: the session is over."""


class TierdSession:
    """What the scheduler side knows of tierd. Methods are for the scheduler's thread unless they say otherwise.

    ``usable``: the engine's namespace is open, so questions may be answered from ``replica``. ``epoch``: of the session whose messages
    have been taken. ``credits[g]``: free slots. ``promoted`` is called with every ``Promoted``, ``lost`` when the session is over.
    """

    def __init__(self, topology: Topology, groups: int) -> None:
        self.replica = Replica()
        self.counters: Counter[str] = Counter()
        self.live: Live = topology.live
        self.tiers = tuple(tier.name for tier in topology.structural.tiers)
        self.epoch = 0
        self.ready: Ready | None = None
        self.refusal = ""
        self.changes = 0
        """Rises with every delta: what was absent may be there now."""
        self.credits: list[deque[int]] = [deque() for _ in range(groups)]
        self.promoted: Callable[[Promoted], None] = lambda _: None
        self.lost: Callable[[], None] = lambda: None
        self.client: SchedulerClient | None = None
        self.beat = Heartbeat()
        """The next heartbeat. The scheduler's thread replaces it as a whole, the I/O thread reads it."""
        self._structural = topology.structural
        self._inbox: deque[Message | _Lost] = deque()
        """Bounded by tierd: one ``Promoted`` for each ``Promote``, credits only for slots that were used, settings that a person changed."""
        self._snapshot_in = 0
        """Epoch whose snapshot the replica has begun with; written by the I/O thread."""
        self._volatile = ""
        self._told = ""
        """What the last ``Hello`` said of it; written by the I/O thread."""
        self._reset_owed = False
        self._reset_from = ""

    def start(self, client: SchedulerClient) -> None:
        """Begins to attach."""
        self.client = client
        client.start(lambda: self.beat)

    # The client's I/O thread.

    def received(self, message: Message) -> None:
        """The client's sink."""
        client = self.client
        if isinstance(message, Delta | EvictionNotice | Usable):
            answer = self.replica.apply(message)
            self.changes += 1
            if isinstance(message, Delta) and message.snapshot and client is not None:
                self._snapshot_in = client.epoch
            if answer is not None and client is not None:
                client.send(answer)
            if self.replica.needs_resync() and client is not None:
                client.send(Resync())
            return
        if isinstance(message, Ready):
            # A namespace begins, with a snapshot to come; what another one held must not be offered.
            self._snapshot_in = 0
            self.replica.clear()
        self._inbox.append(message)

    def volatile_reason(self) -> str:
        """For a ``Hello``: why nothing of this engine may outlive it, beyond what its identity says."""
        self._told = self._volatile
        return self._told

    def session_lost(self, reason: str) -> None:
        """The client's word that tierd is gone."""
        self._snapshot_in = 0
        self.replica.clear()
        self._inbox.append(_Lost())

    # The scheduler's thread.

    @property
    def usable(self) -> bool:
        """Whether something may be asked of, or given to, tierd at this moment."""
        client = self.client
        return (
            self.ready is not None
            and client is not None
            and client.attached
            and client.epoch == self.epoch
            and self._snapshot_in == self.epoch
            and not self.replica.stale
        )

    @property
    def open(self) -> bool:
        """Whether the engine's namespace is open and its credits hold; the replica may still be filling."""
        client = self.client
        return (
            self.ready is not None
            and client is not None
            and client.attached
            and client.epoch == self.epoch
        )

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of one object by group; empty while no namespace is open."""
        return self.ready.slot_bytes if self.ready is not None else ()

    def send(self, message: Message) -> bool:
        """Sends within the session whose messages have been taken, or not at all: a slot number means nothing to the next."""
        client = self.client
        if client is None or client.epoch != self.epoch:
            return False
        return client.send(message)

    def tier(self, index: int) -> LiveTier:
        """Live values of a tier by its index."""
        name = self.tiers[index] if 0 <= index < len(self.tiers) else ""
        return self.live.tiers.get(name) or LiveTier()

    def tier_name(self, index: int) -> str:
        """Name of a tier by its index."""
        return self.tiers[index] if 0 <= index < len(self.tiers) else f"tier{index}"

    def drain(self) -> None:
        """Takes what has arrived. Cheap when nothing has."""
        inbox = self._inbox
        while inbox:
            message = inbox.popleft()
            if isinstance(message, Promoted):
                self.promoted(message)
            elif isinstance(message, Credits):
                if self.epoch and 0 <= message.group < len(self.credits):
                    self.credits[message.group].extend(message.slots)
            elif isinstance(message, Welcome):
                self._welcomed(message)
            elif isinstance(message, Ready):
                self._readied(message)
            elif isinstance(message, Settings):
                self._settings(message.settings)
            elif isinstance(message, Refused):
                self._refused(message.reason)
            elif isinstance(message, _Lost):
                self._over()

    def reset(self) -> bool:
        """The weights may have changed: nothing stored so far may be offered again, and nothing of this engine may be kept for others.

        True: tierd is told, or will be before anything else. Open promotions and credits go on being valid for tierd.
        """
        self._volatile = RESET_REASON
        ready, self.ready = self.ready, None
        self._reset_owed = True
        if ready is None:
            return True
        self._reset_from = ready.namespace
        if self.send(ResetCache()):
            self._reset_owed = False
        return True

    def close(self, timeout_seconds: float) -> None:
        """Says goodbye. Any thread."""
        if self.client is not None:
            self.client.close(timeout_seconds)

    def _welcomed(self, welcome: Welcome) -> None:
        self.epoch = welcome.epoch
        self.refusal = ""
        self.tiers = welcome.tiers or self.tiers
        self.counters["attached"] += 1
        if welcome.settings:
            self._settings(welcome.settings)
        logger.info("KVTier: the scheduler side is attached to tierd, epoch %d", welcome.epoch)

    def _readied(self, ready: Ready) -> None:
        if self._reset_owed:
            # It was opened from an identity of before the reset.
            self._reset_from = ready.namespace
            if self.send(ResetCache()):
                self._reset_owed = False
            return
        if ready.namespace == self._reset_from:
            return
        self.ready = ready
        self.counters["ready"] += 1
        logger.info(
            "KVTier: namespace %s is open, objects of %s bytes%s",
            ready.namespace,
            ", ".join(map(str, ready.slot_bytes)),
            "" if ready.persistent else ", in RAM only and for this engine's life",
        )

    def _settings(self, settings: str) -> None:
        self.live, refusals = merge_live(settings.encode(), self.live, self._structural)
        for refusal in refusals:
            self.counters["settings_refused"] += 1
            logger.warning("KVTier: live settings: %s", refusal)

    def _refused(self, reason: str) -> None:
        self.counters["refused"] += 1
        if reason != self.refusal:
            self.refusal = reason
            logger.warning(
                "KVTier: this engine serves without tiers: tierd refuses the scheduler side: %s",
                reason,
            )

    def _over(self) -> None:
        self.counters["lost"] += 1
        self.ready = None
        self.epoch = 0
        self._reset_from = ""
        # A Hello that says that the cache was reset makes tierd open a namespace that nobody else can reach; the next session's may
        # have been made a moment before the reset.
        self._reset_owed = self._told != self._volatile
        for free in self.credits:
            free.clear()
        self.lost()
