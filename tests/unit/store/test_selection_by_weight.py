"""Selection ``Weighted``."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.config.models import Selection
from kvtier.store.selection import choose_prefix, prefix_candidates

NAMES = ("ram", "disk", "nfs")


def test_candidates_end_where_the_tier_changes() -> None:
    found = prefix_candidates([0, 0, 1, 1, 2], [100, 100, 100], [256] * 5)
    assert [(c.keys, c.tokens, c.tiers) for c in found] == [
        (2, 512, (0,)),
        (4, 1024, (0, 1)),
        (5, 1280, (0, 1, 2)),
    ]


def test_weighted_lets_the_slowest_tier_of_a_candidate_decide() -> None:
    decision = choose_prefix(Selection.WEIGHTED, [0, 0, 0, 1], [100, 50, 1], [256] * 4)
    assert decision.chosen is not None
    assert decision.chosen.keys == 3
    assert decision.explain(NAMES) == (
        "768 tokens from ram (score 76800): highest_score; "
        "instead of 1024 tokens from ram+disk (score 51200)"
    )


def test_weighted_takes_the_longer_prefix_where_it_makes_up_for_the_weight() -> None:
    decision = choose_prefix(Selection.WEIGHTED, [0, 1, 1, 1], [100, 50, 1], [256] * 4)
    assert decision.chosen is not None
    assert decision.chosen.keys == 4


def test_a_tie_goes_to_the_earlier_tier() -> None:
    decision = choose_prefix(Selection.WEIGHTED, [0, 1], [100, 50, 1], [256] * 2)
    assert decision.chosen is not None
    assert decision.chosen.tiers == (0,)


def test_without_an_estimate_cost_takes_the_longest() -> None:
    decision = choose_prefix(Selection.COST, [0, 2], [100, 50, 1], [256] * 2)
    assert decision.chosen is not None
    assert decision.chosen.keys == 2
    assert decision.reason == "longest_without_estimate"


def test_the_decision_without_a_usable_tier_is_explained() -> None:
    decision = choose_prefix(Selection.WEIGHTED, [], [100], [])
    assert decision.chosen is None
    assert decision.explain(NAMES) == "nothing: nothing_usable"


@given(
    tiers=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    weights=st.tuples(*[st.integers(1, 100)] * 3),
)
def test_weighted_never_chooses_less_than_another_prefix_would_score(
    tiers: list[int], weights: tuple[int, ...]
) -> None:
    decision = choose_prefix(Selection.WEIGHTED, tiers, weights, [1] * len(tiers))
    assert decision.chosen is not None
    best = max((i + 1) * min(weights[t] for t in tiers[: i + 1]) for i in range(len(tiers)))
    assert decision.chosen.score == best


@given(tiers=st.lists(st.integers(0, 2), max_size=20))
def test_the_same_values_give_the_same_decision(tiers: list[int]) -> None:
    values = (Selection.WEIGHTED, tiers, (100, 50, 10), [256] * len(tiers))
    assert choose_prefix(*values) == choose_prefix(*values)
