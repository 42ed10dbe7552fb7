"""ATOM's stand-in on the CacheEngine path: real lookups, and a real LMCache engine per rank."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvtier.engines.atom.cache_engine_config import CacheEngineOptions, options_of
from kvtier.engines.atom.cache_engine_scheduler import CacheEngineScheduler
from kvtier.engines.atom.cache_engine_worker import CacheEngineWorker, identity_digest
from kvtier.engines.atom.lookup_connection import LookupConnection
from kvtier.engines.atom.metadata import AtomStepMetadata
from kvtier.engines.atom.rank import RankIdentity
from kvtier.engines.atom.scheduler import AtomLimits
from kvtier.engines.atom.types import KVConnectorOutput
from kvtier.engines.common.model_identity import EngineIdentity
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.lookup.client import greeting
from kvtier.lookup.wire import SCHEDULER
from kvtier.planner import GroupKind, KVCacheGroup, Planner
from kvtier.testing.atom_blocks import StandInBlocks
from kvtier.testing.atom_engine import Cells, StandInEngine, expected_output
from kvtier.testing.atom_scheduler import SchedulerOptions, StandInScheduler
from kvtier.testing.atom_sequence import StandInSequence

BLOCK, CHUNK, BLOCKS = 4, 8, 64
ENGINE = "engine/dp0"
IDENTITY = EngineIdentity('{"model":"stand-in"}', "")
SECONDS = 300.0
LOAD_SECONDS = 120.0
"""How long a busy machine may take for one load, or for the answer to a lookup."""


def read_options(config: Path, run_directory: Path, **others: Any) -> CacheEngineOptions:
    """The options of an ATOM configuration for this test."""
    given = {
        "kv_connector": "kvtier-lmcache",
        "lmcache_config": str(config),
        "run_directory": str(run_directory),
        "model_revision": "one",
        "lookup_seconds": 1.0,
        "load_seconds": LOAD_SECONDS,
        **others,
    }
    return options_of(SimpleNamespace(kv_transfer_config=given))


def is_live(connection: LookupConnection) -> bool:
    """Whether the scheduler side has been told all that it is told of a server: its client is
    attached a moment before."""
    with connection._lock:
        return connection._live


@dataclass
class RealRanks:
    """The workers, with completions aggregated over ranks as ATOM does it."""

    workers: list[CacheEngineWorker]
    _ended: dict[Any, list[bool]] = field(default_factory=dict)

    def start(self, metadata: AtomStepMetadata) -> None:
        for worker in self.workers:
            worker.start_load_kv(pickle.loads(pickle.dumps(metadata)))

    def finished(self) -> KVConnectorOutput:
        for worker in self.workers:
            found = worker.get_finished()
            for name, whole in (
                ("finished_loading", True),
                ("failed_loading", False),
                ("finished_saving", True),
            ):
                for operation in getattr(found, name):
                    self._ended.setdefault(operation, []).append(whole)
        output = KVConnectorOutput()
        for operation, results in list(self._ended.items()):
            if len(results) < len(self.workers):
                continue
            del self._ended[operation]
            if type(operation).__name__ == "SaveOperationId":
                output.finished_saving.add(operation)
            else:
                (output.finished_loading if all(results) else output.failed_loading).add(operation)
        return output


class CacheEngineBench:
    """One engine. ``caches[r]``: the KV of rank r, which its worker sees as tensors."""

    def __init__(
        self,
        options: CacheEngineOptions,
        ranks: int = 2,
        open_cache: Callable[..., Any] | None = None,
    ) -> None:
        self.options = options
        self.caches: list[Cells] = [
            np.zeros((BLOCKS, BLOCK), dtype=np.uint64) for _ in range(ranks)
        ]
        self.workers = [
            CacheEngineWorker(
                options,
                RankIdentity(ENGINE, rank, BLOCK, CHUNK),
                ranks,
                lambda: IDENTITY,
                open_cache,
            )
            for rank in range(ranks)
        ]
        for worker, cache in zip(self.workers, self.caches, strict=True):
            tensor = torch.from_numpy(cache.view(np.int64))
            worker.register_kv_caches({0: SimpleNamespace(k_cache=tensor)}, BLOCKS)
            if worker.off_reason:
                raise RuntimeError(worker.off_reason)
        group = KVCacheGroup(GroupKind.FULL, BLOCK, "stand-in")
        planner = Planner.build([group], CHUNK, CHUNK, ranks)
        self.connection = LookupConnection(
            options.run_directory,
            greeting(SCHEDULER, ENGINE, ranks, 0, identity_digest(IDENTITY)),
            LOAD_SECONDS,
        )
        session = TierdSession(
            options.topology(), planner, ENGINE, lambda: IDENTITY, self.connection.connect
        )
        self.connector = CacheEngineScheduler(
            self.connection,
            session,
            planner,
            AtomLimits(BLOCKS, 64, min_load_tokens=8, min_save_tokens=8),
            options.load_seconds,
        )
        self.connector.start()
        self.blocks = StandInBlocks(BLOCKS, BLOCK)
        connector: Any = self.connector
        scheduler = StandInScheduler(self.blocks, SchedulerOptions(alignment=BLOCK), connector)
        self.engine = StandInEngine(scheduler, RealRanks(self.workers), self.caches)
        self._numbers = 0

    def wait_ready(self) -> None:
        """Waits until the ranks have opened LMCache and lookups are answered."""
        self.wait(lambda: all(worker.ready for worker in self.workers) and is_live(self.connection))

    def wait(self, condition: Callable[[], object]) -> None:
        """Raises ``TimeoutError``."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(self.describe())
            time.sleep(0.002)

    def serve(self, tokens: list[int], max_tokens: int = 3) -> StandInSequence:
        """A request from its arrival until everything has ended. Its tokens must be right."""
        self._numbers += 1
        seq = StandInSequence(self._numbers, list(tokens), BLOCK, max_tokens)
        self.engine.scheduler.add(seq)
        deadline = time.monotonic() + SECONDS
        while not self.engine.idle:
            self.engine.step()
            time.sleep(0.0005)
            if time.monotonic() > deadline:
                raise TimeoutError(self.describe())
        if seq.output != expected_output(tokens, max_tokens):
            raise AssertionError(f"wrong tokens: {self.describe()}")
        if self.blocks.free != BLOCKS:
            raise AssertionError(f"{BLOCKS - self.blocks.free} blocks leaked")
        return seq

    def forget_gpu(self) -> None:
        """The prefix cache in GPU memory is lost, so that what follows can only be loaded."""
        self.blocks.clear_index()
        for cache in self.caches:
            cache[:] = 0

    def wait_committed(self, tokens: list[int], serving: list[int] | None = None) -> None:
        """Waits until every chunk of a prompt can be looked up; meanwhile serves ``serving`` from
        GPU memory: an engine that has nothing to do does not store what it has lost."""
        from kvtier.engines.atom.token_keys import chain
        from kvtier.keys import group_prefix

        keys = [group_prefix(0) + each for each in chain(tokens, CHUNK)]

        def committed() -> bool:
            if all(self.connection.client.ask(keys, 1.0) or (0,)):
                return True
            if serving is not None:
                self.serve(serving)
            return False

        self.wait(committed)

    def count(self, name: str) -> int:
        """A count of the scheduler side."""
        return self.connector.get_statistics().get(name, 0)

    def describe(self) -> str:
        """The state, for messages."""
        counts = [worker.counts() for worker in self.workers]
        reasons = [worker.off_reason for worker in self.workers]
        return f"{self.connector.get_statistics()}, workers {counts} {reasons}"

    def close(self) -> None:
        """Ends the engine."""
        self.connector.shutdown()
        for worker in reversed(self.workers):
            worker.shutdown()
