"""The two classes that ATOM's factory creates: what is refused, and what an error costs."""

from __future__ import annotations

import json
from collections import Counter
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.atom_schedules import Bench, run_schedule
from tests.support.atom_tiers import RankFaults, topology

from kvtier.config.models import Topology
from kvtier.config.writer import write
from kvtier.engines.atom.config import engine_name, limits_of, planner_for
from kvtier.engines.atom.connector import KVTierOffloadConnector, KVTierOffloadScheduler
from kvtier.engines.atom.metadata import AtomLoad, AtomSave, AtomStepMetadata
from kvtier.engines.atom.types import KVConnectorOutput, LoadOperationId, SaveOperationId
from kvtier.engines.common.jobs import BlockRun, LoadJob, StoreJob
from kvtier.testing.atom_sequence import StandInSequence, Status


def config(**changes: Any) -> SimpleNamespace:
    """ATOM's configuration as far as it is read."""
    values: dict[str, Any] = {
        "kv_transfer_config": {"kv_connector": "kvtier", "engine_id": "e", "topology": "/nowhere"},
        "tensor_parallel_size": 2,
        "kv_cache_block_size": 16,
        "num_kvcache_blocks": 100,
        "max_num_batched_tokens": 10_000,
        "runner_qualname": "atom.model_engine.model_runner.ModelRunner",
        "parallel_config": SimpleNamespace(data_parallel_rank=3),
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: Invalid value: 2: must be 1"),
        ({"decode_context_parallel_size": 4}, "decode_context_parallel_size"),
        ({"prefill_context_parallel_size": 8}, "prefill_context_parallel_size"),
        ({"enable_rapidserve": True}, "enable_rapidserve"),
        ({"runner_qualname": "atom.rollout.model_runner_ext.RLHFModelRunner"}, "runner_qualname"),
        ({"pool_entries": {"slot": 4}}, "state per request"),
        ({"kv_transfer_config": {"kv_role": "kv_producer"}}, "kv_role"),
        ({"kv_transfer_config": {"topology": "/nowhere"}}, "/nowhere"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_and_the_engine_serves(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    document = topology(512)
    write(tmp_path / "t", Topology(structural=document.structural, live=document.live))
    given = config(**changes)
    given.kv_transfer_config = {"topology": str(tmp_path / "t"), **given.kv_transfer_config}
    if given.kv_transfer_config["topology"] == "/nowhere" and "kv_transfer_config" not in changes:
        given.kv_transfer_config["topology"] = str(tmp_path / "t")
    scheduler, worker = KVTierOffloadScheduler(given), KVTierOffloadConnector(given)
    assert reason in scheduler.off_reason
    assert reason in worker.off_reason
    seq = StandInSequence(1, list(range(40)), 16, 1)
    assert scheduler.get_num_new_matched_tokens(seq) == (0, False)
    scheduler.update_state_after_alloc(seq)
    assert not scheduler.should_park_for_load_after_alloc(seq)
    assert scheduler.adjust_prefill_chunk_after_alloc(seq, 7) == 7
    assert scheduler.build_connector_meta().requests == []
    assert not scheduler.should_defer_free(seq)
    assert not scheduler.has_pending_work()
    worker.register_kv_caches({}, num_blocks=4)
    assert worker.get_finished() == KVConnectorOutput()


def test_a_rank_that_is_off_reports_what_the_scheduler_side_has_started() -> None:
    worker = KVTierOffloadConnector(config())
    load = LoadJob(3, "1#1", (BlockRun(0, 0, (1,)),), 1.0)
    store = StoreJob(4, 0, 1, BlockRun(0, 0, (1,)))
    jobs = AtomStepMetadata(
        [AtomLoad(LoadOperationId(1, 3), load), AtomSave(SaveOperationId("kvtier", 4), store)]
    )
    worker.start_load_kv(jobs)
    output = worker.get_finished()
    assert output.failed_loading == {LoadOperationId(1, 3)}
    assert output.finished_saving == {SaveOperationId("kvtier", 4)}
    assert worker.get_finished() == KVConnectorOutput()


@pytest.mark.parametrize("hook", ["build_connector_meta", "process_completions"])
def test_an_unexpected_error_turns_kvtier_off_and_no_parked_sequence_is_forgotten(
    hook: str,
) -> None:
    outer = KVTierOffloadScheduler(config())
    bench = Bench.make(connector=outer)
    outer._scheduler, outer._guard.off_reason = bench.tiers.connector, ""
    prompt = list(range(41))
    bench.add(prompt, number=900)
    bench.run()
    bench.forget_gpu()
    seq = bench.add(prompt, number=1)
    bench.engine.step()
    assert seq.status in (Status.WAITING_FOR_REMOTE_KVS, Status.RUNNING)

    def fail(*_: Any) -> None:
        raise ValueError("the test says so")

    setattr(bench.tiers.connector, hook, fail)
    bench.run(seq)
    bench.check(seq)
    assert "the test says so" in outer.off_reason
    assert outer.get_statistics()["errors"] >= 1


@pytest.mark.parametrize(
    "hook",
    [
        "build_connector_meta",
        "has_pending_work",
        "process_completions",
        "request_finished",
        "should_defer_free",
        "should_park_partial_prefill_for_load",
    ],
)
def test_after_an_unexpected_error_blocks_are_freed_once_their_copies_have_ended(hook: str) -> None:
    outer = KVTierOffloadScheduler(config())
    bench = Bench.make(connector=outer)
    outer._scheduler, outer._guard.off_reason = bench.tiers.connector, ""
    faults = bench.tiers.ranks.faults
    prompt = list(range(41))
    bench.add(prompt, number=900)
    bench.run()
    bench.forget_gpu()
    bench.tiers.ranks.faults = RankFaults(progress=0.0)
    sequences = [bench.add(prompt, number=1), bench.add(list(range(1_000, 1_041)), number=2)]
    for _ in range(8):
        bench.engine.step()
    assert not any(seq in bench.engine.finished for seq in sequences[:1]), "its load runs"
    assert bench.tiers.connector.get_statistics()["saves_pending"] > 0

    def fail(*_: Any) -> None:
        raise ValueError("the test says so")

    setattr(bench.tiers.connector, hook, fail)
    for _ in range(8):
        bench.engine.step()
    assert bench.blocks.free < bench.blocks.num_blocks, "copies run"
    bench.tiers.ranks.faults = faults
    bench.run()
    bench.check(*sequences)
    assert bench.blocks.free == bench.blocks.num_blocks
    assert not bench.engine.scheduler.deferred_free_blocks
    assert "the test says so" in outer.off_reason
    assert not outer.has_pending_work()


FAILING = (
    "adjust_prefill_chunk_after_alloc",
    "build_connector_meta",
    "get_num_new_matched_tokens",
    "has_pending_work",
    "process_completions",
    "request_finished",
    "should_defer_free",
    "should_park_for_load_after_alloc",
    "should_park_partial_prefill_for_load",
    "update_state_after_alloc",
)


def test_random_schedules_in_which_a_hook_fails_keep_tokens_blocks_and_sequences() -> None:
    ended = Counter[bool]()
    for seed in range(120):
        random = Random(seed)
        outer = KVTierOffloadScheduler(config())

        def fail(
            bench: Bench,
            hook: str = random.choice(FAILING),
            first: int = random.randrange(1, 60),
            again: bool = random.random() < 0.5,
            afterwards: bool = random.random() < 0.5,
            outer: KVTierOffloadScheduler = outer,
        ) -> None:
            inner = bench.tiers.connector
            outer._scheduler, outer._guard.off_reason = inner, ""
            bench.engine.scheduler.kv_connector = outer
            real, calls = getattr(inner, hook), count(1)

            def failing(*arguments: Any) -> Any:
                number = next(calls)
                if number < first or (number > first and not again):
                    return real(*arguments)
                if afterwards:
                    real(*arguments)
                raise ValueError("the test says so")

            setattr(inner, hook, failing)

        run_schedule(seed, fail)
        ended[bool(outer.off_reason)] += 1
    assert ended[True] >= 40, ended


def test_names_and_numbers_follow_atoms_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = planner_for(config(), 100)
    assert (planner.chunk_tokens, planner.ranks, planner.hashes_per_chunk) == (112, 2, 1)
    assert engine_name(config()) == "e/dp3"
    monkeypatch.setenv("OFFLOAD_MIN_LOAD_TOKENS", "8192")
    monkeypatch.setenv("OFFLOAD_MIN_SAVE_TOKENS", "many")
    limits = limits_of(config(long_prefill_token_threshold=5_000))
    assert (limits.min_load_tokens, limits.min_save_tokens) == (8_192, None)
    assert limits.step_tokens == 5_000 - 5_000 % 64
    assert limits_of(config()).step_tokens == 10_000 - 10_000 % 64
    assert json.dumps(limits.num_blocks) == "100"
