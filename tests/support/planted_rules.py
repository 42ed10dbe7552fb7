"""Takes one rule of KVTier away at a time, as the code was before it, and runs its tests.

    python planted_rules.py

Prints one line of JSON: by rule, pytest's exit status and how many of its tests failed. Each rule
is taken away in a process of its own, which is forked after the imports.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.engines.common import (
    lora,
    model_identity,
    request_state,
    scheduler_stores,
    worker_state,
    worker_stores,
)
from kvtier.engines.vllm import (
    config,
    engine_signals,
    hook_guard,
    identity_environment,
    identity_fields,
    tensor_digests,
    weights,
    weights_state,
)
from kvtier.store import context
from kvtier.tierd import sessions, shard_layout

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tests" / "unit"
OPTIONS = ("-q", "-n", "0", "-p", "no:cacheprovider", "--rootdir", str(ROOT))
Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def _code(function: Callable[..., Any], replacement: Callable[..., Any]) -> Plant:
    """Replaces what a function does, for every module that has imported it."""

    def plant(patch: Patch) -> None:
        target: Any = function
        patch.setattr(target, "__code__", replacement.__code__)

    return plant


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _false(*_: Any, **__: Any) -> bool:
    return False


def _empty(*_: Any, **__: Any) -> dict[str, object]:
    return {}


def _own_size(group: int, sizes: Any, writer_of: Any) -> Any:
    layout = shard_layout.SlotLayout
    where = [rank * shard_layout.aligned(size) for rank, size in enumerate(sizes)]
    return layout(
        sum(shard_layout.aligned(size) for size in sizes),
        tuple(range(len(sizes))),
        tuple(sizes),
        tuple(
            shard_layout.ShardRange(offset, size, True)
            for offset, size in zip(where, sizes, strict=True)
        ),
    )


def shards_at_rank_times_own_size(patch: Patch) -> None:
    patch.setattr(shard_layout, "_layout", _own_size)


def ranks_take_any_range(patch: Patch) -> None:
    def trust(self: Any, ready: Any) -> str:
        self._offsets = tuple(offset for offset, _, _ in ready.shards)
        self._writes = tuple(writes for _, _, writes in ready.shards)
        return ""

    patch.setattr(worker_state.RankShards, "set", trust)


def non_causal_groups_are_full_attention(patch: Patch) -> None:
    original = config.group_of

    def group_of(group: Any) -> Any:
        causal = types.SimpleNamespace(**vars(group))
        if getattr(group.kv_cache_spec, "non_causal", False):
            causal.kv_cache_spec = _causal(group.kv_cache_spec)
        return original(causal)

    patch.setattr(config, "group_of", group_of)


def _causal(spec: Any) -> Any:
    import dataclasses

    return dataclasses.replace(spec, non_causal=False)


def sixteen_samples_of_each_weight(patch: Patch) -> None:
    original = tensor_digests.dense_bytes

    def samples(tensor: Any) -> Any:
        found = original(tensor)
        return found[:: max(1, len(found) // 16)].contiguous()

    patch.setattr(tensor_digests, "dense_bytes", samples)


def stale_blocks_are_trusted(patch: Patch) -> None:
    original = weights_state.WeightsState.take_report

    def take_report(self: Any, report: Any) -> bool:
        found = original(self, report)
        self.stale = False
        return found

    patch.setattr(weights_state.WeightsState, "take_report", take_report)


def no_persistent_tier_after_a_reset(patch: Patch) -> None:
    original = weights_state.WeightsState.take_report

    def take_report(self: Any, report: Any) -> bool:
        found = original(self, report)
        if self.number:
            self.weights, self.reason = (), "the prefix cache was reset"
        return found

    patch.setattr(weights_state.WeightsState, "take_report", take_report)


def sleep_is_not_noticed(patch: Patch) -> None:
    _code(weights.watch_sleep, _nothing)(patch)


def parts_are_swapped(patch: Patch) -> None:
    number = sessions.part_numbers

    def swapped(layouts: Any) -> Any:
        parts, reason = number(layouts)
        return parts[::-1], reason

    patch.setattr(sessions, "part_numbers", swapped)


def pieces_are_swapped(patch: Patch) -> None:
    pieces = context.Pieces
    patch.setattr(context, "Pieces", lambda views: pieces(views[::-1]))


def ranks_copy_to_the_range_that_they_expected(patch: Patch) -> None:
    def first_part(self: Any, pool_bytes: int) -> tuple[int, int]:
        return self._span if self._span == worker_state.WHOLE_POOL else (0, pool_bytes // 2)

    patch.setattr(worker_state.RankShards, "span", first_part)


RULES: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "1: shards of unequal size lie where tierd says": (
        shards_at_rank_times_own_size,
        ("worker/test_shards.py::test_stages_of_unequal_size_share_a_slot",),
    ),
    "1: a rank refuses a range that cannot hold its shard": (
        ranks_take_any_range,
        ("worker/test_shards.py::test_a_range_that_cannot_hold_the_shard_is_refused",),
    ),
    "1: each rank uses the part of its shard": (
        parts_are_swapped,
        (
            "tierd/test_pool_parts.py::test_the_ranks_of_all_engines_register_the_pool_once_per_engine",
        ),
    ),
    "1: the shards of an object in parts are in rank order": (
        pieces_are_swapped,
        (
            "store/test_pool_parts.py::test_the_shards_of_an_engine_lie_in_parts_from_its_first_"
            "object_on",
            "store/test_pool_parts.py::test_objects_written_under_one_layout_are_read_under_the_"
            "other",
        ),
    ),
    "1: a rank copies within the range that tierd names": (
        ranks_copy_to_the_range_that_they_expected,
        ("worker/test_pool_parts.py::test_a_store_goes_to_the_part_and_nowhere_else",),
    ),
    "2: off where vLLM disabled prefix caching": (
        _code(config.check_prefix_caching, _nothing),
        ("scheduler/test_connector.py::test_without_prefix_caching_in_vllm_kvtier_is_off",),
    ),
    "2: off with non-causal attention": (
        non_causal_groups_are_full_attention,
        ("scheduler/test_connector.py::test_non_causal_attention_turns_kvtier_off",),
    ),
    "3: every byte of the weights counts": (
        sixteen_samples_of_each_weight,
        (
            "worker/test_weights.py::test_one_bit_of_one_element_of_a_large_weight_changes_the_"
            "digest",
            "worker/test_weights.py::test_a_negated_part_of_a_large_weight_changes_the_digest",
        ),
    ),
    "3: a reset of the prefix cache is noticed": (
        _code(weights_state.WeightsState.was_reset, _false),
        (
            "scheduler/test_resets.py::test_after_a_reset_with_other_weights_another_namespace_is_used",
        ),
    ),
    "3: an update by RPC is noticed": (
        _code(engine_signals._signal, _nothing),
        ("scheduler/test_resets.py::test_rpcs_that_may_change_weights_are_signals",),
    ),
    "3: an update that keeps the cache stops loads and stores": (
        stale_blocks_are_trusted,
        (
            "scheduler/test_resets.py::test_weights_that_change_without_a_reset_stop_loads_and_"
            "stores_until_a_reset",
        ),
    ),
    "3: the preprocessor is part of the identity": (
        _code(model_identity.is_multimodal, _false),
        ("scheduler/test_identity.py::test_the_preprocessor_is_part_of_a_multimodal_identity",),
    ),
    "3: settings that shape KV are part of the identity": (
        _code(identity_fields.values_of, _empty),
        ("scheduler/test_identity_fields.py::test_a_value_that_shapes_kv_changes_the_namespace",),
    ),
    "3: environment variables that shape KV are part of the identity": (
        _code(identity_environment.environment_settings, _empty),
        (
            "scheduler/test_identity_environment.py::test_a_variable_that_shapes_kv_changes_the_"
            "namespace",
        ),
    ),
    "3: an adapter is compared with its files after a removal": (
        _code(lora.AdapterDigests.check_again, _nothing),
        (
            "scheduler/test_lora.py::test_an_adapter_whose_files_changed_before_it_was_loaded_"
            "again_takes_no_part",
        ),
    ),
    "3: media that a client names take no part": (
        _code(request_state._named_by_client, _false),
        (
            "scheduler/test_matches.py::test_requests_that_must_not_be_loaded_are_skipped_and_"
            "counted_by_reason",
        ),
    ),
    "4: a reset gives back the blocks of stores": (
        _code(scheduler_stores.SchedulerStores.give_back_blocks, _nothing),
        ("scheduler/test_resets.py::test_a_reset_gives_back_the_blocks_of_stores_in_flight",),
    ),
    "4: what a reset voids is not delivered": (
        _code(worker_stores.WorkerStores.void, _nothing),
        ("worker/test_resets.py::test_a_voided_store_is_not_delivered",),
    ),
    "4: the tiers stay after a reset": (
        no_persistent_tier_after_a_reset,
        (
            "scheduler/test_resets.py::test_after_a_reset_with_the_same_weights_the_namespace_"
            "opens_again",
        ),
    ),
    "4: copies end before the engine sleeps": (
        sleep_is_not_noticed,
        (
            "worker/test_resets.py::test_sleep_and_wake_up_of_the_worker_are_noticed",
            "worker/test_resets.py::test_a_release_of_the_memory_of_the_kv_cache_is_noticed",
        ),
    ),
    "5: engines over several nodes are refused": (
        _code(config.check_one_node, _nothing),
        (
            "scheduler/test_connector.py::test_an_engine_over_several_nodes_is_refused_with_the_numbers",
        ),
    ),
    "5: one rank writes what all hold": (
        _code(config.is_replicated, _false),
        ("scheduler/test_connector.py::test_with_mla_the_first_rank_of_each_stage_writes",),
    ),
    "6: an unexpected error does not end the tiers": (
        _code(hook_guard.HookGuard.rearm, _false),
        (
            "scheduler/test_connector.py::test_after_an_unexpected_exception_kvtier_rearms"
            "_with_back_off_a_few_times_and_counts_it",
        ),
    ),
}
"""By fault and rule: how it is taken away, and the tests that notice it."""


class _Outcomes:
    """Counts the outcomes of a run of pytest."""

    def __init__(self) -> None:
        self.failed = 0
        self.passed = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed += report.failed
        self.passed += report.when == "call" and report.passed


def _run(plant: Plant, tests: tuple[str, ...]) -> dict[str, int]:
    """Runs the tests in a child without the rule. The child never returns."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with os.fdopen(reader) as answers:
            text = answers.read()
        os.waitpid(child, 0)
        return json.loads(text) if text else {"status": -1, "failed": 0, "passed": 0}
    outcomes = _Outcomes()
    os.dup2(2, 1)
    with Patch.context() as patch:
        plant(patch)
        ids = [str(UNIT / each) for each in tests]
        status = pytest.main(
            [*OPTIONS, *ids],
            plugins=[outcomes],
        )
    found = {"status": int(status), "failed": outcomes.failed, "passed": outcomes.passed}
    os.write(writer, json.dumps(found).encode())
    os._exit(0)


def main() -> None:
    """Command line: see the module's text."""
    os.chdir(ROOT)
    # The children share what the tests import.
    answers = os.dup(1)
    os.dup2(2, 1)
    files = sorted({each.partition("::")[0] for _, tests in RULES.values() for each in tests})
    pytest.main([*OPTIONS, "--collect-only", *(str(UNIT / each) for each in files)])
    os.dup2(answers, 1)
    print(json.dumps({name: _run(*rule) for name, rule in RULES.items()}))


if __name__ == "__main__":
    sys.exit(main())
