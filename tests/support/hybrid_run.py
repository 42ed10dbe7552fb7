"""Runs the prompts of one hybrid model on three engines, one after the other in one process:
without KVTier, with it, and with it after a restart, whose RAM is empty.

    python hybrid_run.py NAME DIRECTORY

Prints one line of JSON: by engine, and by pass over the prompts, the tokens of each prompt and how
many tokens were loaded from which tier (0: RAM, 1: files). One process, because most of the time
that an engine takes to start is spent importing vLLM.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from kvtier.config.writer import write
from kvtier.harness.engine_driver import Driver
from kvtier.harness.engine_process import json_answers, prepare_cpu_engine
from kvtier.harness.engine_testbed import ENGINE_OPTIONS, EngineOptions
from kvtier.harness.tiny_model import prompt

NEW_TOKENS = 12
WAIT_SECONDS = 60.0
DISK_BIT = 2


def prompts(chunk_tokens: int) -> list[list[int]]:
    """Prompts that end inside a chunk, at a boundary and one token after it, and one that shares
    the first chunks of another."""
    long = prompt(7 * chunk_tokens + 5, 1)
    return [
        long,
        prompt(3 * chunk_tokens, 2),
        prompt(2 * chunk_tokens + 1, 3),
        long[: 4 * chunk_tokens] + prompt(chunk_tokens, 4),
    ]


class SequentialEngine:
    """One engine of the process, with or without KVTier."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.driver = Driver(options)
        self._count = 0
        self.steps = 0
        """That the last request took."""

    @property
    def scheduler(self) -> Any:
        """KVTier's scheduler side."""
        return self.driver.scheduler.connector._scheduler

    def run(self, tokens: list[int]) -> list[int]:
        """The tokens of one request."""
        self._count += 1
        name = f"r{self._count}"
        self.driver.add(name, tokens, NEW_TOKENS)
        finished = self.driver.finish([name])
        self.steps = finished["steps"]
        found: list[int] = finished[name]["tokens"]
        return found

    def wait(self, what: str, condition: Any) -> None:
        """Steps until ``condition()``."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: {self.driver.connector()}")
            self.driver.settle()
            time.sleep(0.02)

    def attached(self) -> bool:
        """Whether chunks can be stored."""
        scheduler = self.scheduler
        return bool(
            scheduler.session.replica_ready
            and all(scheduler.session.credits)
            and scheduler.stores.conditions.worker_epoch == scheduler.session.epoch
        )

    def stored(self) -> bool:
        """Whether every object is in RAM and in a file, and no block is referenced."""
        replica = self.scheduler.session.replica
        return (
            not self.scheduler.stores.in_flight
            and not self.scheduler.stores.referenced_blocks
            and all(bits & DISK_BIT for bits in replica.all_bits())
        )

    def pass_over(self, wanted: list[list[int]]) -> dict[str, Any]:
        """Runs every prompt with an empty GPU cache."""
        found: list[list[int]] = []
        steps: list[int] = []
        loads = (
            self.scheduler.loads.in_flight if self.driver.scheduler.connector is not None else None
        )
        before = dict(loads.loaded_tokens) if loads is not None else {}
        for tokens in wanted:
            if not self.driver.reset_prefix_cache():
                raise TimeoutError("the GPU cache could not be emptied")
            if loads is not None:
                self.wait("not attached after a reset", self.attached)
            found.append(self.run(tokens))
            steps.append(self.steps)
        loaded: dict[int, int] = {}
        if loads is not None:
            loaded = {t: n - before.get(t, 0) for t, n in loads.loaded_tokens.items()}
        by_tier = {tier: n for tier, n in loaded.items() if n}
        return {"tokens": found, "steps": steps, "loaded": by_tier}

    def close(self) -> None:
        """Ends the engine; its tierd ends with it."""
        self.driver.engine.engine_core.shutdown()
        del self.driver
        gc.collect()


def replica_of(engine: SequentialEngine) -> Any:
    """The keys that the engine knows."""
    return engine.scheduler.session.replica


def run(name: str, directory: Path) -> dict[str, Any]:
    """All three engines."""
    models = _module("hybrid_models")
    model = models.MODELS[name]
    topology = directory / "topology"
    topology.mkdir(parents=True)
    run_directory = Path("/dev/shm") / f"kvtier-hybrid-{os.getpid()}"
    tuning = EngineOptions(chunk_tokens=model.chunk_tokens, persistence="Process")
    (directory / "files").mkdir()
    structural = tuning.structural("hybrid", run_directory, directory / "files")
    write(topology, _topology(structural, tuning))
    options = {
        **ENGINE_OPTIONS,
        "model": str(models.write_hybrid(name, directory / "model")),
        "disable_log_stats": True,
        **model.engine,
    }
    kvtier = {
        **options,
        "kv_transfer_config": {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.engines.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"topology": str(topology)},
        },
    }
    wanted = prompts(model.chunk_tokens)
    plain = SequentialEngine(options)
    result: dict[str, Any] = {"plain": plain.pass_over(wanted)}
    plain.close()
    first = SequentialEngine(kvtier)
    first.wait("not attached", first.attached)
    result["first"] = first.pass_over(wanted)
    first.wait("not stored", first.stored)
    result["ram"] = first.pass_over(wanted)
    result["groups"] = [str(group) for group in first.scheduler._planner.groups]
    result["failures"] = dict(first.scheduler.loads.in_flight.counts.failures)
    result["dropped"] = dict(first.scheduler.stores.dropped)
    result["objects"] = len(first.scheduler.session.replica)
    first.close()
    second = SequentialEngine(kvtier)
    second.wait("not attached after the restart", second.attached)
    second.wait("files not found", lambda: len(replica_of(second)) >= result["objects"])
    result["restarted"] = second.pass_over(wanted)
    result["failures_restarted"] = dict(second.scheduler.loads.in_flight.counts.failures)
    second.close()
    return result


def _topology(structural: Any, tuning: EngineOptions) -> Any:
    from kvtier.config.models import Topology

    return Topology(structural=structural, live=tuning.live())


def _module(name: str) -> ModuleType:
    """A module beside this file."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Command line: see the module's text."""
    answer = json_answers()
    prepare_cpu_engine()
    os.environ.update(_module("hybrid_models").MODELS[sys.argv[1]].environment)
    answer(run(sys.argv[1], Path(sys.argv[2])))
    os._exit(0)


if __name__ == "__main__":
    main()
