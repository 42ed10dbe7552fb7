"""vLLM's own scheduler with KVTier's scheduler side, and ranks with KVTier's worker side, of which
the last one is a process of its own. All have real sessions with a real tierd.

The step of vLLM's executor is ``begin`` and ``end``: a test chooses how long it waits for a rank,
where vLLM waits ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.support.hybrid_world import World, WorldOptions
from tests.support.rank_process import BLOCK, BLOCKS, ENGINE, Rank, RankProcess, make_planner
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvtier.engines.common.tierd_session import connect_scheduler

RANKS = 2
LIMIT_SECONDS = 60.0
"""Only a failing test waits as long."""


class ProcessWorld(World):
    """One engine with two ranks. ``other``: the second one, a process."""

    def __init__(self, directory: Path, run_directory: Path) -> None:
        options = WorldOptions("full", directory / "model", RANKS)
        self.options, self.run_directory = options, str(run_directory)
        self.requests: dict[str, Any] = {}
        self.finished: set[str] = set()
        self.clock: Any = time.monotonic
        self.tierd: Any = SimpleNamespace(connect=connect_scheduler)
        self.planner = make_planner(RANKS)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)],
            hash_block_size=BLOCK,
        )
        self.other = RankProcess(run_directory, 1, RANKS, directory / "rank.log")
        self.first = Rank(run_directory, 0, RANKS)
        self.engine_name = f"{ENGINE}/dp0"
        self.scheduler = self._scheduler(config, BLOCK)
        self._output: Any = None
        self._metadata: Any = None
        self._reports: dict[str, int] = {}  # type: ignore[misc]
        self.reasons: list[str] = []
        """Why ranks did not load something."""

    # Steps.

    def begin(self) -> None:
        """Schedules a step and runs it on both ranks. The second one may not answer."""
        self._output = output = self.scheduler.schedule()
        reads, writes = self._blocks(output)
        arguments = (output.kv_connector_metadata, reads, writes)
        self.other.begin("step", *arguments)
        self._first = self.first.step(*arguments)

    def end(self) -> None:
        """Waits for the second rank, and passes the results of the step on."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output, found = self._output, [self._first, self.other.end()]
        invalid: set[int] = set().union(*(each[1] for each in found))
        for *_, report in found:
            self.reasons += [each.reason for each in report.loads if each.reason]
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[self._sampled(name) for name in names],
            kv_connector_output=KVConnectorOutput(
                finished_recving=self._of_all([each[0] for each in found]) or None,
                invalid_block_ids=invalid,
                kv_connector_worker_meta=found[0][2].aggregate(found[1][2]),
            ),
        )
        self.scheduler.update_from_output(output, result)
        self.finished |= set(self.requests) - set(self.scheduler.requests)

    def _of_all(self, recving: list[set[str]]) -> set[str]:
        """Requests that both ranks have reported, as vLLM's aggregator finds them."""
        done = set()
        for name in set().union(*recving):
            count = self._reports.get(name, 0) + sum(name in each for each in recving)
            self._reports[name] = count
            if count == RANKS:
                del self._reports[name]
                done.add(name)
        return done

    def _sampled(self, name: str) -> list[int]:
        request = self.requests[name]
        started = self._started[name]
        ended = started + self._output.num_scheduled_tokens[name] >= request.num_tokens
        return [7] if ended else []

    def _blocks(self, output: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """What the kernels of the step read and write: (block, value), whole blocks of prompts."""
        started = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        started.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._started = started
        reads, writes = [], []
        for name, count in output.num_scheduled_tokens.items():
            table = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
            tokens = self.requests[name].all_token_ids
            for position, block in enumerate(table):
                if (position + 1) * BLOCK > started[name] + count:
                    break
                value = tokens[position * BLOCK] + position
                written = (position + 1) * BLOCK <= started[name]
                (reads if written else writes).append((block, value))
        return reads, writes

    def step(self, move: float = 1.0) -> None:
        """One whole step."""
        self.begin()
        self.end()

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Steps until ``condition()``."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.kvtier.snapshot()}"
            self.step()
            time.sleep(0.005)

    # State.

    @property
    def attached(self) -> bool:
        """Whether chunks can be stored and loaded."""
        kvtier = self.kvtier
        return bool(
            kvtier.session.replica_ready
            and all(kvtier.session.credits)
            and kvtier.stores.conditions.worker_epoch == kvtier.session.epoch
        )

    @property
    def nothing_held(self) -> bool:
        """Whether no load is in flight and every block has been given back."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return (
            not self.kvtier.loads.in_flight
            and self.kvtier.stores.referenced_blocks == 0
            and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        )

    def close(self) -> None:
        """Ends everything but tierd."""
        self.connector.shutdown()
        self.first.close()
        self.other.close()
