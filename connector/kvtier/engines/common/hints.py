"""What a request asks of its tiers. A value of its own, because loads, stores and messages of every
engine use it, and each engine reads it from its own requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The hints of one request. The default asks for nothing special.

    ``tiers``: names of the only tiers that its objects are loaded from and stored in; None: all.
    ``retain_seconds``: for how long
    the request's objects are evicted after those of others, 0: no longer than those.
    ``ttl_seconds``: how long they may be used after they were stored, 0: without a limit.
    """

    skip_load: bool = False
    skip_store: bool = False
    max_load_tokens: int | None = None
    """None: no limit."""
    tiers: frozenset[str] | None = None
    retain_seconds: int = 0
    pin: bool = False
    """Whether the objects stay in RAM, within the policy's limit for pinned bytes."""
    ttl_seconds: int = 0
    prefetch: bool = False
    """Whether the request comes only to bring its prefix into RAM."""
    invalid: bool = False
    """Whether the request has hints that limit what is stored, and that could not be read. Nothing
    of it is stored then."""


NO_HINTS = RequestHints()
INVALID_HINTS = RequestHints(invalid=True)
