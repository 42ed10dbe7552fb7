"""Which of the usable prefixes to load. Pure: values in, one explained value out. ``Cost`` itself is in cost.py.

Candidates are the prefixes that end where the tier changes (and the whole): ending anywhere else loads less from a tier
that is used anyway. Parts of it may be read by a person, so each decision says what it chose, what it did not, and why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvtier.topology.models import Selection


@dataclass(frozen=True, slots=True)
class Candidate:
    """A usable prefix: its first ``keys`` keys, ``tokens`` tokens. ``tiers``: indexes of the tiers it needs, in
    document order. ``slowest``: the one of least weight among them, the later one where two weigh the same.

    Estimates of ``Cost``, infinite where there are none: ``ready_seconds`` until the whole prompt is computed with this
    loaded, ``judged_seconds`` the same with the tiers' weights. ``parallel``: reads of a tier at a time, 0 for as many as it
    has threads. ``cut``: the request's clock is expected to end it before it is through.
    """

    keys: int
    tokens: int
    tiers: tuple[int, ...]
    slowest: int
    score: int
    ready_seconds: float = math.inf
    judged_seconds: float = math.inf
    parallel: int = 0
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """``chosen`` is None where nothing is to be loaded. ``reason`` is a short fixed word per rule, for counting.

    ``recompute_seconds``: of computing everything, None without an estimate. ``too_slow``: tiers that hold a part of the prompt
    and were found too slow for it.
    """

    chosen: Candidate | None
    runners_up: tuple[Candidate, ...]
    reason: str
    recompute_seconds: float | None = None
    too_slow: tuple[int, ...] = ()

    def explain(self, tier_names: Sequence[str]) -> str:
        """One line for people."""

        def text(candidate: Candidate) -> str:
            names = "+".join(tier_names[i] for i in candidate.tiers)
            if math.isinf(candidate.ready_seconds):
                judged = f"score {candidate.score}"
            else:
                judged = (
                    f"ready in {candidate.ready_seconds * 1e3:.1f} ms{', cut by the clock' if candidate.cut else ''}"
                )
            return f"{candidate.tokens} tokens from {names} ({judged})"

        rest = "; ".join(map(text, self.runners_up))
        if self.recompute_seconds is not None and self.chosen is not None:
            rest += ("; " if rest else "") + f"recomputing ({self.recompute_seconds * 1e3:.1f} ms)"
        chosen = "nothing" if self.chosen is None else text(self.chosen)
        if self.recompute_seconds is not None and self.chosen is None:
            chosen += f" ({self.recompute_seconds * 1e3:.1f} ms)"
        return f"{chosen}: {self.reason}" + (f"; instead of {rest}" if rest else "")


def candidates(tiers: Sequence[int], weights: Sequence[int], tokens: Sequence[int]) -> list[Candidate]:
    """The prefixes worth comparing, shortest first.

    ``tiers[i]`` is the index of the tier that key i would come from, ``tokens[i]`` how many tokens it adds,
    ``weights[t]`` the load weight of tier t.
    """
    found = []
    used: set[int] = set()
    ends = list(accumulate(tokens))
    for i, tier in enumerate(tiers):
        used.add(tier)
        if i + 1 < len(tiers) and tiers[i + 1] == tier:
            continue
        slowest = min(used, key=lambda t: (weights[t], -t))
        found.append(Candidate(i + 1, ends[i], tuple(sorted(used)), slowest, ends[i] * weights[slowest]))
    return found


def choose(selection: Selection, tiers: Sequence[int], weights: Sequence[int], tokens: Sequence[int]) -> Decision:
    """Chooses a prefix.

    ``Weighted``: the most tokens x weight of the slowest tier used; ties to the earlier of the slowest tiers, then to
    the longer prefix. ``Cost``, before anything was measured: the longest (DATAPATH 3).
    """
    found = candidates(tiers, weights, tokens)
    if not found:
        return Decision(None, (), "nothing_usable")
    if selection is Selection.WEIGHTED:
        best = max(found, key=lambda c: (c.score, -c.slowest, c.tokens))
        reason = "highest_score"
    else:
        best = found[-1]
        reason = "longest_without_estimate"
    return Decision(best, tuple(c for c in found if c is not best), reason)
