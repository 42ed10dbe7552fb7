"""Which share of prompts came from which tier, over the last five minutes.

The schedulers count (a hit is what was loaded, not what was promised) and send totals with their heartbeats; here differences are added up
in pieces of a few seconds. Owner's thread only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_SECONDS = 300.0
PIECE_SECONDS = 5.0
MAX_ENGINES = 256
"""Remembered, the gone ones included: one that attaches again goes on from where it was."""


@dataclass(slots=True)
class _Piece:
    begun: float
    prompt: int = 0
    loaded: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tokens:
    """``loaded[i]``: of ``prompt`` tokens, those that came from tier i."""

    prompt: int = 0
    loaded: tuple[int, ...] = ()

    def of(self, tier: int) -> int:
        """Tokens that came from a tier."""
        return self.loaded[tier] if tier < len(self.loaded) else 0


class Hits:
    """``recent(now)`` and ``total``: since this tierd started."""

    def __init__(self) -> None:
        self._known: dict[str, Tokens] = {}
        self._pieces: deque[_Piece] = deque()
        self._prompt = 0
        self._loaded: list[int] = []

    def heard(self, engine: str, prompt: int, loaded: tuple[int, ...], now: float, younger: bool = False) -> None:
        """A scheduler's totals. The first ones of an engine are where counting begins, as they may be from before this tierd; unless the
        engine is ``younger``."""
        before = self._known.pop(engine, Tokens() if younger else None)
        if len(self._known) >= MAX_ENGINES:
            del self._known[next(iter(self._known))]
        self._known[engine] = Tokens(prompt, loaded)
        if before is None or (before.prompt, before.loaded) == (prompt, loaded):
            return
        piece = self._piece(now)
        grown = max(0, prompt - before.prompt)
        piece.prompt += grown
        self._prompt += grown
        for tier, tokens in enumerate(loaded):
            grown = max(0, tokens - before.of(tier))
            for counts in (piece.loaded, self._loaded):
                counts.extend([0] * (tier + 1 - len(counts)))
                counts[tier] += grown

    def _piece(self, now: float) -> _Piece:
        if not self._pieces or now - self._pieces[-1].begun >= PIECE_SECONDS:
            self._pieces.append(_Piece(now))
        return self._pieces[-1]

    def recent(self, now: float) -> Tokens:
        """Over the last five minutes."""
        while self._pieces and now - self._pieces[0].begun > WINDOW_SECONDS:
            self._pieces.popleft()
        loaded: list[int] = []
        for piece in self._pieces:
            loaded.extend([0] * (len(piece.loaded) - len(loaded)))
            for tier, tokens in enumerate(piece.loaded):
                loaded[tier] += tokens
        return Tokens(sum(piece.prompt for piece in self._pieces), tuple(loaded))

    @property
    def total(self) -> Tokens:
        """Since this tierd started."""
        return Tokens(self._prompt, tuple(self._loaded))
