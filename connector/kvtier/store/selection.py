"""Which of the usable prefixes to load. Pure: values in, one explained value out.

Candidates are the prefixes that end where the tier changes (and the whole): ending anywhere else loads less from a tier
that is used anyway. Parts of it may be read by a person, so each decision says what it chose, what it did not, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvtier.topology.models import Selection


@dataclass(frozen=True, slots=True)
class Candidate:
    """A usable prefix: its first ``keys`` keys, ``tokens`` tokens. ``tiers``: indexes of the tiers it needs, in
    document order. ``slowest``: the one of least weight among them, the later one where two weigh the same."""

    keys: int
    tokens: int
    tiers: tuple[int, ...]
    slowest: int
    score: int


@dataclass(frozen=True, slots=True)
class Decision:
    """``chosen`` is None where nothing is usable. ``reason`` is a short fixed word per rule, for counting."""

    chosen: Candidate | None
    runners_up: tuple[Candidate, ...]
    reason: str

    def explain(self, tier_names: Sequence[str]) -> str:
        """One line for people."""
        if self.chosen is None:
            return f"nothing: {self.reason}"

        def text(candidate: Candidate) -> str:
            names = "+".join(tier_names[i] for i in candidate.tiers)
            return f"{candidate.tokens} tokens from {names} (score {candidate.score})"

        rest = "; ".join(map(text, self.runners_up))
        return f"{text(self.chosen)}: {self.reason}" + (f"; instead of {rest}" if rest else "")


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
