"""Shares of prompts by tier, over five minutes."""

from __future__ import annotations

from kvtier.tierd.status import (
    INTERVAL_SECONDS,
    MAX_ENGINES,
    WINDOW_SECONDS,
    HitCounters,
    TokenCounts,
)


def test_totals_of_several_engines_add_up_from_where_each_began() -> None:
    hits = HitCounters()
    hits.record("a", 1_000, (500,), 0.0)
    hits.record("b", 0, (), 0.0)
    hits.record("a", 1_100, (550, 20), 1.0)
    hits.record("b", 10, (0, 5), 2.0)
    assert hits.recent(3.0) == TokenCounts(110, (50, 25)) == hits.total


def test_values_older_than_the_window_count_only_in_the_total() -> None:
    hits = HitCounters()
    hits.record("a", 0, (), 0.0)
    hits.record("a", 100, (40,), 0.0)
    hits.record("a", 200, (90,), 200.0)
    assert hits.recent(WINDOW_SECONDS) == TokenCounts(200, (90,))
    assert hits.recent(WINDOW_SECONDS + 1) == TokenCounts(100, (50,))
    assert hits.recent(2 * WINDOW_SECONDS) == TokenCounts(0, ())
    assert hits.total == TokenCounts(200, (90,))


def test_counters_of_a_restarted_engine_never_decrease() -> None:
    hits = HitCounters()
    hits.record("a", 0, (), 0.0)
    hits.record("a", 100, (40,), 1.0)
    hits.record("a", 0, (), 2.0)
    hits.record("a", 10, (5,), 3.0)
    assert hits.recent(4.0) == TokenCounts(110, (45,))


def test_the_first_report_of_an_engine_started_after_tierd_counts() -> None:
    hits = HitCounters()
    hits.record("a", 100, (40,), 0.0, started_later=True)
    hits.record("a", 110, (50,), 1.0, started_later=True)
    hits.record("b", 1_000, (900,), 1.0)
    assert hits.total == TokenCounts(110, (50,))


def test_memory_is_bounded_for_any_number_of_announcements() -> None:
    hits = HitCounters()
    for number in range(10_000):
        hits.record(str(number // 4), number, (number,), number * 0.5)
        hits.recent(number * 0.5)
    assert len(hits._intervals) <= WINDOW_SECONDS / INTERVAL_SECONDS + 2
    assert len(hits._reported) == MAX_ENGINES
