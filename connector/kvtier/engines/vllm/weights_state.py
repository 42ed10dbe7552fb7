"""Which weights the engine has now, as the scheduler side knows them.

The *identity number* rises whenever the weights may have changed: vLLM's prefix cache was reset, an
RPC went to the workers, or the scheduler was resumed. From then on nothing that is loaded is used,
and nothing is stored, until every rank has taken the fingerprint of its weights again, which each
does in the first step that carries the new number. Sleep and trainers reset the cache first and
change the weights afterwards, so the fingerprint is never taken at the reset itself.

Most resets change no weights. So loads from the namespace of before begin at once, with the
fingerprints that they assume, and a rank that finds another fingerprint fails them.

If the weights changed and the prefix cache was not reset since, vLLM's own blocks are stale as
well. Nothing is loaded or stored then until the next reset. The scheduler's thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvtier.engines.vllm.metadata import WorkerReport

logger = logging.getLogger(__name__)
WAIT_SECONDS = 1.0
"""How long requests wait for the fingerprint after the number rose. It takes one step."""
UNKNOWN_WEIGHTS = "unknown"
"""Equal to no fingerprint: loads that depend on it fail."""


class WeightsState:
    """``ranks``: how many ranks take a fingerprint. ``clock``: seconds, monotonic."""

    def __init__(self, ranks: int, clock: Callable[[], float]) -> None:
        self.number = 0
        """The identity number."""
        self.known = True
        """Whether the weights at ``number`` are known. At the start tierd knows them from the
        handshakes of the workers."""
        self.assumed = False
        """Whether the weights were known before the number rose, and may be the same still."""
        self.stale = False
        """Whether the weights changed without a reset of the prefix cache."""
        self.weights: tuple[str, ...] = ()
        """Fingerprints in rank order; empty before the first report, and if one is unknown."""
        self.reason = ""
        """Why they are unknown."""
        self._ranks = ranks
        self._clock = clock
        self._pools: list[tuple[Any, object]] = []
        self._risen_at = 0.0
        self._reset = True
        """Whether the prefix cache was reset since it was last filled with known weights."""
        self._cached: tuple[str, ...] = ()
        """Fingerprints of the weights that the blocks in the prefix cache were computed with."""

    def watch(self, pool: Any) -> None:
        """Watches a block pool: a reset replaces its map of cached blocks."""
        self._pools.append((pool, _cached_blocks(pool)))

    def was_reset(self) -> bool:
        """Returns whether a watched pool was reset since the last call. Takes 0.1 microseconds."""
        for pool, seen in self._pools:
            if _cached_blocks(pool) is not seen:
                self._pools = [(each, _cached_blocks(each)) for each, _ in self._pools]
                return True
        return False

    def rise(self, *, reset: bool) -> None:
        """The weights may have changed. ``reset``: the prefix cache is empty now."""
        self.number += 1
        self.assumed = self.usable or self.assumed
        self.known = False
        self._reset |= reset
        self._risen_at = self._clock()

    @property
    def report_needed(self) -> bool:
        """Whether workers shall report their fingerprints with the next step."""
        return not self.known or not (self.weights or self.reason)

    @property
    def usable(self) -> bool:
        """Whether objects may be loaded and stored."""
        return self.known and not self.stale

    @property
    def worth_waiting(self) -> bool:
        """Whether a request should wait for the fingerprint."""
        return not self.known and self._clock() - self._risen_at < WAIT_SECONDS

    def of_loads(self, opened: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the fingerprints that the loads of a step depend on, in rank order; empty while
        the engine is known to have these weights.

        ``opened``: those that the open namespace belongs to, empty if they are not known.
        """
        return () if self.known else opened or (UNKNOWN_WEIGHTS,) * self._ranks

    def take_report(self, report: WorkerReport) -> bool:
        """Takes the fingerprints of a step; returns whether the weights became known by it."""
        if report.identity != self.number or not self.report_needed:
            return False
        by_rank = {rank: (text, reason) for rank, text, reason in report.weights}
        if len(by_rank) != self._ranks:
            return False
        self.reason = next((reason for _, reason in by_rank.values() if reason), "")
        self.weights = () if self.reason else tuple(by_rank[rank][0] for rank in sorted(by_rank))
        became_known = not self.known
        self.known, self.assumed = True, False
        unchanged = bool(self.weights) and self.weights == self._cached
        self.stale = not (self._reset or unchanged)
        if self._reset:
            self._cached, self._reset = self.weights, False
        if self.stale:
            logger.warning(
                "KVTier: nothing is loaded or stored until the prefix cache is reset: the weights "
                "%s since it was filled",
                f"may have changed ({self.reason})" if self.reason else "changed",
            )
        return became_known


def _cached_blocks(pool: Any) -> object:
    return getattr(pool, "cached_block_hash_to_block", None)
