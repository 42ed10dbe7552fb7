"""The tiers that requests let their chunks be stored in, and what tierd is told of them.

A request may limit the tiers of what it stores (``Owner.tiers``). Of two requests with the same
chunk, each lets it be stored in its own tiers, so the chunk may be stored in the tiers of both. The
limits of the last chunks that were stored with one are remembered. A further request that allows
more tiers is announced to tierd with a ``Keep``, and so is one that retains or pins a chunk that is
in RAM already.

Presence bits (``kvtier.store.types``) stand for tiers; 0 stands for all of them. Keys are those of
the scheduler side: a byte for the group, and the block hash. The scheduler's thread only.
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
"""Of a chunk whose limit is forgotten, tierd hears no more of further requests."""


class AllowedTiers:
    """The limits of one engine's chunks. ``max_keys``: how many chunks have a limit that is
    remembered. No method raises an error of its own."""

    def __init__(self, session: TierdSession, max_keys: int = MAX_LIMITED_KEYS) -> None:
        self._session = session
        self._max_keys = max_keys
        self._limits: OrderedDict[bytes, int] = OrderedDict()
        """By key, in the order in which the limits were set. 0: there was one, and a request
        without a limit has come since."""
        self._kept: dict[Owner, list[tuple[int, bytes]]] = {}
        """Chunks that tiers hold and that requests want to be kept, or stored in more tiers; for
        the next message."""

    def __len__(self) -> int:
        """How many chunks may have a limit."""
        return len(self._limits)

    def on_store(self, state: RequestState, key: bytes) -> None:
        """A chunk of a request is going to be stored. Its limit is that of this request, whatever
        it was before."""
        if state.hints is NO_HINTS:
            return
        tiers = self._session.owner(state).tiers
        self._limits.pop(key, None)
        if tiers:
            self._limits[key] = tiers
            if len(self._limits) > self._max_keys:
                self._limits.popitem(last=False)

    def widen(self, owner: Owner, group: int, key: bytes) -> bool:
        """A request of ``owner`` that may store has a chunk that is stored already. Returns whether
        the chunk may be stored in more tiers than before, which ``send`` tells tierd."""
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
        """Sends what tierd has to know since the last call; drops it while no namespace is open.

        Call it after the stores of the step were reserved: a chunk may be one of these.
        """
        kept, self._kept = self._kept, {}
        if self._session.namespace_open:
            for owner, keys in kept.items():
                self._session.send(Keep(keys=tuple(keys), owner=owner))

    def owners(self, stores: Iterable[tuple[RequestState, bytes]]) -> tuple[tuple[int, Owner], ...]:
        """How many of ``stores``, each the request and the key of a chunk, are in a row of which
        owner (``Reserve.owners``); empty if all have no tenant and no wish."""
        runs = [(len(list(run)), owner) for owner, run in groupby(starmap(self._owner, stores))]
        while runs and runs[-1][1] == NO_OWNER:
            runs.pop()
        return tuple(runs)

    def _owner(self, state: RequestState, key: bytes) -> Owner:
        owner = self._session.owner(state)
        tiers = self._limits.get(key, owner.tiers) if owner.tiers else 0
        return owner if tiers == owner.tiers else msgspec.structs.replace(owner, tiers=tiers)
