"""Messages between tierd and the engine processes.

tierd has one ZeroMQ ROUTER, each engine process one DEALER, over ``ipc://<run
directory>/tierd.sock``. A message is one frame: a msgpack array tagged with the class name. Both
ends must have the same version; ``Hello`` and ``Welcome`` carry it, and a difference ends the
session with ``SessionRefused``. Messages of one sender arrive in order. Between two senders, such
as the scheduler and a worker of one engine, there is no order.

Terms. A *session* is one engine process's attachment. ``engine`` names one EngineCore and its
workers: sessions with the same ``engine`` belong together. Slots are identified by their byte
offset in the host pool. ``bits`` are the presence bits of ``store/types.py``: bit 0 is the memory
tier, bit i the i-th tier of the structural document, and bit 16 an object that is in RAM since
before this tierd. Such an object is verified when it is promoted, like one in a secondary tier.
"""

from __future__ import annotations

import msgspec

from kvtier import __version__
from kvtier.store.types import NO_OWNER, Owner

PROTOCOL = f"{__version__}/14"
SOCKET_NAME = "tierd.sock"
POOL_NAME = "pool"
WHOLE_POOL = (0, 0)
"""In ``Ready.span``."""
GENERATIONS_NAME = "generations"
"""The file of generation words beside the pool (``kvtier/store/generations.py``)."""

HEARTBEAT_SECONDS = 0.5
"""Interval of heartbeats in both directions."""
SESSION_TIMEOUT_SECONDS = 3.0
"""A session without a message for this long is lost: six heartbeats, so that one slow scheduling
slice is not a loss."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Base of all messages."""


# From engine processes to tierd.


class Hello(Message, frozen=True, kw_only=True):
    """First message of a session, and again after tierd was lost.

    ``drained_epoch``: the sender has drained every epoch up to this one: no copy of it runs and its
    grants are dropped (0: never attached). The scheduler's carries ``identity`` (canonical JSON of
    what shapes KV bytes, without the layout), ``ephemeral_reason`` (why the identity does not hold
    across processes; empty: it does), ``ranks`` and ``shard_writers``; a worker's carries ``rank``,
    ``codec`` (canonical text of the byte layout), ``weights`` (the fingerprint of the weights that
    this rank has; empty with an ``ephemeral_reason`` if they are unknown) and ``shard_bytes`` per
    group.
    """

    protocol: str
    role: str  # "scheduler" | "worker"
    engine: str
    rank: int = 0
    pid: int
    pid_namespace: str
    process_start: int
    drained_epoch: int = 0
    identity: str = ""
    ephemeral_reason: str = ""
    codec: str = ""
    weights: str = ""
    shard_bytes: tuple[int, ...] = ()
    ranks: int = 1
    """Scheduler: how many worker ranks its engine has."""
    shard_writers: tuple[tuple[int, ...], ...] = ()
    """Scheduler: ``shard_writers[g][r]`` is the rank that writes the shard of group g that rank r
    reads; empty: every rank writes a shard of its own."""
    lock: str = ""
    """Name of the file in ``peers/`` on which the process holds a lock until it ends; empty: none.
    """


class Bye(Message, frozen=True, kw_only=True):
    """The session ends. From an engine process: all its copies are drained and its grants may be
    reused.

    From tierd: all grants and announcements of this session are void; ``reason`` is for the log.
    """

    reason: str = ""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Both directions. A scheduler's carries totals since its engine started: ``prompt_tokens`` of
    scheduled prompts, and of these, by tier, the ``loaded_tokens`` that were loaded instead of
    computed."""

    prompt_tokens: int = 0
    loaded_tokens: tuple[int, ...] = ()


class Reserve(Message, frozen=True, kw_only=True):
    """Scheduler: workers will deliver these chunks into these slots, which are taken from the
    session's credits.

    ``items``: (reservation, group, key, slot, previous). Reservations are unique per engine.
    ``previous``: key of the chunk before it in its prefix, empty for the first one; the order of
    eviction follows it. No answer: tierd drops what is already there or pending, and takes the slot
    back once every writer has delivered or aborted.

    ``owners``: (items, owner): so many items, in order, are of a request of this owner; those that
    follow belong to no tenant.
    """

    items: tuple[tuple[int, int, bytes, int, bytes], ...]
    owners: tuple[tuple[int, Owner], ...] = ()


class Deliver(Message, frozen=True, kw_only=True):
    """Worker: its shards of these reservations are in their slots."""

    reservations: tuple[int, ...]


class Abort(Message, frozen=True, kw_only=True):
    """Worker: these reservations were not completely written, and the worker will not touch them
    again."""

    reservations: tuple[int, ...]


class Promote(Message, frozen=True, kw_only=True):
    """Scheduler: read the longest usable prefix of ``keys`` into RAM, within ``budget_seconds``
    from now.

    ``keys``: (group, key) in prefix order. Answered by exactly one ``Promoted``. The slots stay
    pinned until a ``Load`` or ``Cancel`` names the promotion.

    For selection ``Cost``: once key i is there, ``ends[i]`` tokens of the prompt are, the first key
    beginning at ``start_tokens``; computing tokens a to b takes the engine ``alpha (b - a) + beta
    (b^2 - a^2)`` seconds (both 0: not known yet). Without ``ends`` the longest prefix is read.
    ``waited_seconds``: time since the request's deadline clock started. ``look_up``: keys that are
    in no index are looked up in the tiers first, within ``lookupTimeoutMilliseconds``.
    ``whole``: the keys are of use together only, so all or none are read; needs ``ends``.
    ``copy_seconds``: how long the engine takes to copy one key to its GPU; needs ``ends``. With it
    the promotion may be answered by ``Arriving`` before its end; 0: it is not.
    ``owner``: of the request.
    """

    promotion: int
    keys: tuple[tuple[int, bytes], ...]
    budget_seconds: float
    start_tokens: int = 0
    ends: tuple[int, ...] = ()
    alpha: float = 0.0
    beta: float = 0.0
    waited_seconds: float = 0.0
    whole: bool = False
    look_up: bool = False
    copy_seconds: float = 0.0
    owner: Owner = NO_OWNER


class Prefetch(Message, frozen=True, kw_only=True):
    """Scheduler: a request waits in the engine's queue; bring the prefix of ``keys`` into RAM as
    far as that costs nothing else. No answer. ``Cancel`` with the same number ends it. ``owner``:
    of the request. ``queued``: its number in ``Queued``, 0 if it has none: what has arrived is
    protected as well.
    """

    promotion: int
    keys: tuple[tuple[int, bytes], ...]
    owner: Owner = NO_OWNER
    queued: int = 0


class Queued(Message, frozen=True, kw_only=True):
    """Scheduler: these requests wait in the engine's queue and are going to use prefixes that are
    in RAM. They are evicted when nothing else can be, those of the last requests first.

    ``requests``: (number, keys) in the order of the queue. ``keys``: (group, key) of the last
    object of the prefix, at most one of each group; what precedes it is protected by it. A number
    is one of a promotion. Naming a request again replaces its keys of these groups. No answer.
    ``Cancel`` with the number ends it; so does time (``store/queued_requests.py``).
    """

    requests: tuple[tuple[int, tuple[tuple[int, bytes], ...]], ...]


class Cancel(Message, frozen=True, kw_only=True):
    """Scheduler: no request waits for this promotion, a prefetch has ended, or a request has left
    the queue."""

    promotion: int


class Load(Message, frozen=True, kw_only=True):
    """Scheduler: the workers load ``keys`` from the slots that a ``Delta`` or ``Promoted`` named.
    tierd keeps them in RAM until ``LoadReleased``, and tells the workers so (``LoadPinned``). The
    copies do not wait for that.

    ``promotion``: the one that prepared it, 0 if none; its pins pass to the load. ``owner``: of the
    request.
    """

    load: int
    promotion: int
    keys: tuple[tuple[int, bytes], ...]
    owner: Owner = NO_OWNER


class Keep(Message, frozen=True, kw_only=True):
    """Scheduler: a request of ``owner`` uses ``keys``, which tiers hold, without loading them. They
    are retained or pinned as it asks, as far as they are in RAM. No answer."""

    keys: tuple[tuple[int, bytes], ...]
    owner: Owner


class LoadReleased(Message, frozen=True, kw_only=True):
    """Scheduler: every rank has ended this load; its slots may be unpinned."""

    load: int


class EvictionAck(Message, frozen=True, kw_only=True):
    """Scheduler: it no longer offers the keys of this ``EvictionNotice``."""

    token: int


class Identify(Message, frozen=True, kw_only=True):
    """Scheduler: at identity ``number`` the ranks have these ``weights`` (fingerprints). Answered
    by ``Ready`` for the namespace that they belong to.

    With an ``ephemeral_reason`` they are unknown: tierd draws a namespace at random, without
    persistent tiers. Open reservations are cancelled.
    """

    number: int
    weights: tuple[str, ...]
    ephemeral_reason: str = ""


class Resync(Message, frozen=True, kw_only=True):
    """Scheduler: a delta is missing; send a snapshot."""


# From tierd to engine processes.


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to ``Hello``. ``settings``: the live document as JSON; ``tiers``: names in order, the
    memory tier first."""

    protocol: str
    epoch: int
    session: int
    pool_path: str
    pool_bytes: int
    tiers: tuple[str, ...]
    settings: str


class SessionRefused(Message, frozen=True, kw_only=True):
    """Answer to ``Hello``: there is no session, for this ``reason``. The sender serves without
    tiers."""

    reason: str


class Ready(Message, frozen=True, kw_only=True):
    """The engine's namespace is open: scheduler and all workers are there and agree. ``slot_bytes``
    per group. ``shards``, to a worker: (offset from that of the slot, size, whether this rank
    writes it) of its shard of each group; of every slot they lie in the bytes ``span`` (begin, end)
    of the pool, or anywhere in it (``WHOLE_POOL``). ``weights``: the fingerprints by rank that the
    namespace belongs to; empty ones are unknown. ``identity``: the number of the ``Identify`` that
    this answers, else 0.
    """

    namespace: str
    slot_bytes: tuple[int, ...]
    persistent: bool
    weights: tuple[str, ...] = ()
    identity: int = 0
    shards: tuple[tuple[int, int, bool], ...] = ()
    span: tuple[int, int] = WHOLE_POOL


class LiveSettings(Message, frozen=True, kw_only=True):
    """The live document changed; JSON."""

    settings: str


class Credits(Message, frozen=True, kw_only=True):
    """To a scheduler: these free slots are the session's."""

    group: int
    slots: tuple[int, ...]


class Delta(Message, frozen=True, kw_only=True):
    """To a scheduler: what the engine's namespace holds changed. ``removed``: (group+key bytes as
    stored, bits); ``added``: the same and a location, which is not 0 if the bits name the memory
    tier (``generations.pack_location``). ``sequence`` counts from 1 per session; ``snapshot`` on
    the first of a series that replaces everything."""

    sequence: int
    added: tuple[tuple[bytes, int, int], ...] = ()
    removed: tuple[tuple[bytes, int], ...] = ()
    snapshot: bool = False


class EvictionNotice(Message, frozen=True, kw_only=True):
    """To a scheduler: these keys are about to leave RAM; answer with ``EvictionAck``. tierd waits
    100 ms at most."""

    token: int
    keys: tuple[bytes, ...]


class Usable(Message, frozen=True, kw_only=True):
    """To a scheduler: only tiers with these ``bits`` may be used, until the next such message. A
    tier that is not open, or whose breaker is open, has its keys in the replica and not its bit
    here. Sent before each snapshot and on change. ``asked_bits``: of these, tiers that may hold
    keys which are not in the replica (``Promote.look_up``)."""

    bits: int
    asked_bits: int = 0


class Promoted(Message, frozen=True, kw_only=True):
    """The end of a promotion: ``usable`` keys of the prefix are in pinned slots. ``outcome``:
    "whole", "partial", "failed", "absent" (nothing was found) or "cancelled"; ``tiers[i]``: index
    of the tier that key i came from (0: was in RAM); ``locations[i]``: its slot and generation.
    This may arrive before the ``Delta`` that names them."""

    promotion: int
    usable: int
    outcome: str
    tiers: tuple[int, ...] = ()
    locations: tuple[int, ...] = ()


class Arriving(Message, frozen=True, kw_only=True):
    """Before the ``Promoted`` of a promotion: keys have arrived, and the rest of the first
    ``predicted`` keys is expected to arrive while the engine copies these. A ``Load`` may begin;
    ``Promoted`` then says how many arrived. ``first``: position of the first key of ``tiers`` and
    ``locations``, which are as in ``Promoted``; earlier keys were in earlier messages."""

    promotion: int
    predicted: int
    first: int
    tiers: tuple[int, ...]
    locations: tuple[int, ...]


class LoadPinned(Message, frozen=True, kw_only=True):
    """To the workers of the engine: the first ``keys`` keys of this load stay in their slots until
    ``LoadReleased``. It may arrive before the load."""

    load: int
    keys: int


FromEngine = (
    Hello
    | Bye
    | Heartbeat
    | Reserve
    | Deliver
    | Abort
    | Promote
    | Prefetch
    | Queued
    | Cancel
    | Load
    | LoadReleased
    | Keep
    | EvictionAck
    | Identify
    | Resync
)
FromDaemon = (
    Welcome
    | SessionRefused
    | Ready
    | LiveSettings
    | Credits
    | Delta
    | EvictionNotice
    | Usable
    | Promoted
    | Arriving
    | LoadPinned
    | Heartbeat
    | Bye
)

encode = msgspec.msgpack.Encoder().encode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_from_daemon = msgspec.msgpack.Decoder(FromDaemon).decode
