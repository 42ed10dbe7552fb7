"""Shares of prompts by tier, over five minutes."""

from __future__ import annotations

from kvtier.tierd.status import MAX_ENGINES, PIECE_SECONDS, WINDOW_SECONDS, Hits, Tokens


def test_totals_of_several_engines_add_up_from_where_each_began() -> None:
    hits = Hits()
    hits.heard("a", 1_000, (500,), 0.0)
    hits.heard("b", 0, (), 0.0)
    hits.heard("a", 1_100, (550, 20), 1.0)
    hits.heard("b", 10, (0, 5), 2.0)
    assert hits.recent(3.0) == Tokens(110, (50, 25)) == hits.total


def test_what_is_older_than_the_window_does_not_count_but_stays_in_the_total() -> None:
    hits = Hits()
    hits.heard("a", 0, (), 0.0)
    hits.heard("a", 100, (40,), 0.0)
    hits.heard("a", 200, (90,), 200.0)
    assert hits.recent(WINDOW_SECONDS) == Tokens(200, (90,))
    assert hits.recent(WINDOW_SECONDS + 1) == Tokens(100, (50,))
    assert hits.recent(2 * WINDOW_SECONDS) == Tokens(0, ())
    assert hits.total == Tokens(200, (90,))


def test_an_engine_that_starts_anew_is_not_counted_backwards() -> None:
    hits = Hits()
    hits.heard("a", 0, (), 0.0)
    hits.heard("a", 100, (40,), 1.0)
    hits.heard("a", 0, (), 2.0)
    hits.heard("a", 10, (5,), 3.0)
    assert hits.recent(4.0) == Tokens(110, (45,))


def test_the_first_words_of_an_engine_that_is_younger_than_tierd_count() -> None:
    hits = Hits()
    hits.heard("a", 100, (40,), 0.0, younger=True)
    hits.heard("a", 110, (50,), 1.0, younger=True)
    hits.heard("b", 1_000, (900,), 1.0)
    assert hits.total == Tokens(110, (50,))


def test_memory_is_bounded_however_often_is_heard() -> None:
    hits = Hits()
    for number in range(10_000):
        hits.heard(str(number // 4), number, (number,), number * 0.5)
        hits.recent(number * 0.5)
    assert len(hits._pieces) <= WINDOW_SECONDS / PIECE_SECONDS + 2
    assert len(hits._known) == MAX_ENGINES
