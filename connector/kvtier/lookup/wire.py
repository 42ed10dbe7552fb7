"""Messages between the lookup server of a host and the processes of its engine.

The server has a ZeroMQ ROUTER at ``ipc://<run directory>/<name>.lookup``, each process one DEALER.
A message is one frame: a msgpack array tagged with the class name. Both ends must have the same
version. Messages of one sender arrive in order.

Terms. A *key* is the group byte and the chained hash of a chunk. A *store* is a number from 1 to
2**63 - 1 that the scheduler draws at random for each time that a chunk is stored: shards of two
stores of one key are never combined.
"""

from __future__ import annotations

import msgspec

from kvtier import __version__

PROTOCOL = f"{__version__}/lookup-1"
SUFFIX = ".lookup"
SCHEDULER, RANK = "scheduler", "rank"
PING_SECONDS = 0.5
SILENCE_SECONDS = 3.0
"""A peer without a message for this long is lost."""
MAX_KEYS = 4096
"""Keys of one message: a million tokens in chunks of 256."""
MAX_KEY_BYTES = 64
MAX_MESSAGE_BYTES = 1 << 20
MAX_STORE = (1 << 63) - 1


class LookupMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Base of all messages."""


class Greeting(LookupMessage, frozen=True, kw_only=True):
    """First message of a process, and again after ``Stranger``. ``ranks``: of the engine.
    ``identity``: digest of what shapes its KV, so that two models with one engine name never meet.
    """

    protocol: str
    role: str
    engine: str
    ranks: int
    rank: int = 0
    identity: str = ""


class Ask(LookupMessage, frozen=True, kw_only=True):
    """Which of ``keys`` can be loaded? Answered by one ``Answer``, within ``seconds``."""

    request: int
    keys: tuple[bytes, ...]
    seconds: float


class Stored(LookupMessage, frozen=True, kw_only=True):
    """A rank holds its shards of these (key, store)."""

    items: tuple[tuple[bytes, int], ...]


class Lost(LookupMessage, frozen=True, kw_only=True):
    """These (key, store) cannot be loaded: a rank has lost its shard, or it was damaged."""

    items: tuple[tuple[bytes, int], ...]


class Ping(LookupMessage, frozen=True, kw_only=True):
    """Answered by ``Pong``."""


class Accepted(LookupMessage, frozen=True, kw_only=True):
    """Answer to ``Greeting``. ``instance`` differs between starts of the server."""

    instance: str


class Declined(LookupMessage, frozen=True, kw_only=True):
    """Answer to ``Greeting``: this process is not served, for this ``reason``."""

    reason: str


class Stranger(LookupMessage, frozen=True, kw_only=True):
    """The server does not know the sender, because it was started again or the connection was."""


class Answer(LookupMessage, frozen=True, kw_only=True):
    """``stores[i]``: the store of key i that every rank holds; 0: none is known.

    Keys beyond the end of ``stores`` were not looked at in time.
    """

    request: int
    stores: tuple[int, ...]


class Pong(LookupMessage, frozen=True, kw_only=True):
    """The server works."""


ToServer = Greeting | Ask | Stored | Lost | Ping
FromServer = Accepted | Declined | Stranger | Answer | Pong
encode = msgspec.msgpack.Encoder().encode
decode_to_server = msgspec.msgpack.Decoder(ToServer).decode
decode_from_server = msgspec.msgpack.Decoder(FromServer).decode
