"""How far a request's KV is final."""

from __future__ import annotations

from kvtier.planner import Frontier


def test_only_executed_tokens_count() -> None:
    frontier = Frontier()
    assert frontier.storable_chunks(64, 1000, 1000) == 0
    frontier.executed(0, 200)
    assert frontier.storable_chunks(64, 1000, 1000) == 3


def test_the_last_sampled_token_has_no_kv_yet() -> None:
    frontier = Frontier()
    frontier.executed(0, 300)
    assert frontier.storable_chunks(64, 128, 1000) == 1
    assert frontier.storable_chunks(64, 129, 1000) == 2


def test_tokens_without_a_hash_have_no_name() -> None:
    frontier = Frontier()
    frontier.executed(0, 300)
    assert frontier.storable_chunks(64, 301, 96) == 1


def test_tokens_executed_before_a_preemption_do_not_count_for_the_new_blocks() -> None:
    frontier = Frontier()
    frontier.executed(0, 300)
    frontier.lose_blocks()
    frontier.executed(0, 400)
    assert frontier.executed_tokens == 0
    frontier.executed(1, 64)
    assert frontier.executed_tokens == 64


def test_the_frontier_survives_a_preemption() -> None:
    frontier = Frontier()
    frontier.next_chunk = 4
    frontier.lose_blocks()
    assert frontier.next_chunk == 4


def test_a_failed_load_moves_it_back_and_never_forward() -> None:
    frontier = Frontier()
    frontier.next_chunk = 4
    frontier.move_back(2)
    frontier.move_back(3)
    assert frontier.next_chunk == 2


def test_a_late_report_changes_nothing() -> None:
    frontier = Frontier()
    frontier.executed(0, 300)
    frontier.executed(0, 200)
    assert frontier.executed_tokens == 300
