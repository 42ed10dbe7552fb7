"""The tiers that requests let their chunks be stored in, and what tierd is told of them.

A request may limit the tiers of what it stores (``Owner.tiers``: presence bits; 0: all tiers). A
chunk of two requests may be stored in the tiers of both. The limits of the last chunks that were
stored with one are remembered, so that tierd is told (``Keep``) when a further request allows more.
Keys are a byte for the group and the block hash. The scheduler's thread only; nothing raises.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import groupby, starmap

import msgspec

from kvtier.engines.common.hints import NO_HINTS
from kvtier.engines.common.request_state import RequestState
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.store.types import NO_OWNER, Owner, wider
from kvtier.tierd.wire import Keep

MAX_LIMITED_KEYS = 16_384


class AllowedTiers:
    """The limits of one engine's chunks. ``max_keys``: of how many they are remembered."""

    def __init__(self, session: TierdSession, max_keys: int = MAX_LIMITED_KEYS) -> None:
        self._session = session
        self._max_keys = max_keys
        self._limits: OrderedDict[bytes, int] = OrderedDict()
        """By key, the oldest first. 0: a request without a limit has come since."""
        self._kept: dict[Owner, list[tuple[int, bytes]]] = {}
        """For the next messages."""

    def __len__(self) -> int:
        """How many chunks may have a limit."""
        return len(self._limits)

    def on_store(self, state: RequestState, key: bytes) -> None:
        """A chunk of a request is going to be stored, with the limit of this request alone."""
        if state.hints is NO_HINTS:
            return
        tiers = self._session.owner(state).tiers
        self._limits.pop(key, None)
        if tiers:
            self._limits[key] = tiers
            if len(self._limits) > self._max_keys:
                self._limits.popitem(last=False)

    def widen(self, owner: Owner, group: int, key: bytes) -> bool:
        """A further request has a chunk that is stored. Returns whether it may be stored in more
        tiers than before, which ``send`` tells tierd."""
        tiers = self._limits.get(key, 0)
        found = wider(tiers, owner.tiers)
        if found == tiers:
            return False
        self._limits[key] = found
        self.keep(owner, group, key)
        return True

    def keep(self, owner: Owner, group: int, key: bytes) -> None:
        """``send`` tells tierd that a request of ``owner`` uses a chunk that a tier holds."""
        self._kept.setdefault(owner, []).append((group, key[1:]))

    def send(self) -> None:
        """Sends what is to be told, after the stores of a step were reserved, which may be
        concerned; drops it while no namespace is open."""
        kept, self._kept = self._kept, {}
        if self._session.namespace_open:
            for owner, keys in kept.items():
                self._session.send(Keep(keys=tuple(keys), owner=owner))

    def owners(self, stores: Iterable[tuple[RequestState, bytes]]) -> tuple[tuple[int, Owner], ...]:
        """``Reserve.owners`` of these (request, key); empty if none has a tenant or a wish."""
        runs = [(len(list(run)), owner) for owner, run in groupby(starmap(self._owner, stores))]
        while runs and runs[-1][1] == NO_OWNER:
            runs.pop()
        return tuple(runs)

    def _owner(self, state: RequestState, key: bytes) -> Owner:
        owner = self._session.owner(state)
        tiers = self._limits.get(key, owner.tiers) if owner.tiers else 0
        return owner if tiers == owner.tiers else msgspec.structs.replace(owner, tiers=tiers)
