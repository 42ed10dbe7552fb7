"""Runs prompts on engines with several ranks: without KVTier, with it, and after a restart.

    python ranks_run.py SPECIFICATION DIRECTORY

``SPECIFICATION``: a JSON list of objects with

* ``model``: "llama", or a name of ``hybrid_models``; ``layers`` of "llama", and ``changes`` to the
  configuration of the others
* ``options`` of ``vllm.LLM``, and ``environment``
* ``deferred``: copies to the KV cache of the second engine run when kernels are ordered behind them
* ``engines``: how many serve at the same time with one tierd. ``coordinated``: they are one
  deployment of a mixture of experts. vLLM has no such mode for other models, whose engines do not
  know of each other.
* ``updates``, ``lora`` or ``faults``: see the modules ``ranks_*`` of these names

Prints one line of JSON for each, by engine, as ``hybrid_run`` does.

Every engine is a child that is forked after the import of vLLM, which takes most of an engine's
start, and its ranks are forked by vLLM.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.config.models import Topology
from kvtier.config.writer import write
from kvtier.harness.engine_process import cpu_environment, free_port, quiet_environment
from kvtier.harness.engine_testbed import ENGINE_OPTIONS, EngineOptions
from kvtier.harness.tiny_model import TinyLlama, write_llama, write_lora

# The directory of this script is on the path, and no package.
hybrid_models = importlib.import_module("hybrid_models")
hybrid_run = importlib.import_module("hybrid_run")
deferred_copies = importlib.import_module("deferred_copies")
ranks_faults = importlib.import_module("ranks_faults")
ranks_lora = importlib.import_module("ranks_lora")
ranks_updates = importlib.import_module("ranks_updates")
ranks_vllm = importlib.import_module("ranks_vllm")
ENGINE_SECONDS = 300.0
"""Only an engine that hangs takes as long."""
SHAPE = TinyLlama(layers=4, kv_heads=4)
PR_SET_PDEATHSIG = 1
KINDS = ("updates", "lora", "faults")
"""Of specifications that do more than to reload prompts."""
Stage = Callable[[dict[str, Any], list[list[int]], dict[str, Any]], dict[str, Any]]


def end_with_parent() -> None:
    """The kernel kills this process when its parent ends, so that no engine outlives a test."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Child:
    """A forked process that computes one JSON value."""

    pid: int
    pipe: int

    @classmethod
    def start(cls, compute: Callable[[], Any], environment: dict[str, str]) -> Child:
        """Forks. ``environment``: more variables of the child."""
        read, write_end = os.pipe()
        pid = os.fork()
        if pid:
            os.close(write_end)
            return cls(pid, read)
        os.setsid()
        end_with_parent()
        os.environ.update(environment)
        try:
            answer = json.dumps({"result": compute()})
        except BaseException as error:
            traceback.print_exc()
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        with os.fdopen(write_end, "w") as pipe:
            pipe.write(answer + "\n")
        os._exit(0)

    def kill(self) -> None:
        """Ends the child with its ranks."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def result(self) -> Any:
        """Waits for the value, and ends the child with its ranks."""
        deadline = time.monotonic() + ENGINE_SECONDS
        content = b""
        try:
            while not content.endswith(b"\n"):
                left = max(0.0, deadline - time.monotonic())
                if not select.select([self.pipe], [], [], left)[0]:
                    raise TimeoutError(f"an engine did not answer within {ENGINE_SECONDS:.0f} s")
                piece = os.read(self.pipe, 1 << 20)
                if not piece:
                    raise RuntimeError("an engine ended without an answer")
                content += piece
        finally:
            self.kill()
            os.waitpid(self.pid, 0)
            os.close(self.pipe)
        answer = json.loads(content)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]


def _plain(options: dict[str, Any], wanted: list[list[int]], _: dict[str, Any]) -> dict[str, Any]:
    engine = hybrid_run.SequentialEngine(options)
    return {"plain": engine.pass_over(wanted)}


def _first(options: dict[str, Any], wanted: list[list[int]], _: dict[str, Any]) -> dict[str, Any]:
    if os.environ.get("RANKS_DEFERRED"):
        deferred_copies.install()
    engine = hybrid_run.SequentialEngine(options)
    engine.wait("not attached", engine.attached)
    result = {"first": engine.pass_over(wanted)}
    engine.wait("not stored", engine.stored)
    result["ram"] = engine.pass_over(wanted)
    loads = engine.scheduler.loads
    result["groups"] = [str(group) for group in engine.scheduler._planner.groups]
    result["ranks"] = engine.scheduler._planner.ranks
    result["failures"] = dict(loads.in_flight.counts.failures)
    result["objects"] = len(engine.scheduler.session.replica)
    result["namespace"] = engine.scheduler.session.ready.namespace
    executor = engine.driver.core.model_executor
    result["shard_bytes"] = executor.collective_rpc(_shard_bytes)
    result["reported_early"] = executor.collective_rpc(deferred_copies.reported_early)
    _close_together(engine, "first")
    return result


def _shard_bytes(_: Any) -> list[int]:
    """In a rank: the bytes of its shards by group."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return list(connector._worker.codec.shard_bytes)


def _restarted(
    options: dict[str, Any], wanted: list[list[int]], first: dict[str, Any]
) -> dict[str, Any]:
    engine = hybrid_run.SequentialEngine(options)
    engine.wait("not attached after the restart", engine.attached)
    replica = hybrid_run.replica_of(engine)
    engine.wait("files not found", lambda: len(replica) >= first["objects"])
    result = {"restarted": engine.pass_over(wanted)}
    result["failures_restarted"] = dict(engine.scheduler.loads.in_flight.counts.failures)
    _close_together(engine, "restarted")
    return result


def _close_together(engine: Any, stage: str) -> None:
    """Closes an engine when all have come so far: the first one has started the tierd of all."""
    directory, engines = Path(os.environ["RANKS_DIRECTORY"]), int(os.environ["RANKS_ENGINES"])
    (directory / f"{stage}-{os.getpid()}").touch()
    deadline = time.monotonic() + ENGINE_SECONDS
    while len(list(directory.glob(f"{stage}-*"))) < engines and time.monotonic() < deadline:
        engine.driver.settle()
        time.sleep(0.05)
    engine.close()


class Run:
    """One specification in one directory."""

    def __init__(self, specification: dict[str, Any], directory: Path) -> None:
        options = dict(specification["options"])
        if options.get("pipeline_parallel_size", 1) > 1:
            ranks_vllm.repair_pipelines()
        topology = directory / "topology"
        topology.mkdir(parents=True)
        (directory / "files").mkdir()
        name = specification["model"]
        if name == "llama":
            shape = replace(SHAPE, layers=specification.get("layers", SHAPE.layers))
            model, chunk = write_llama(directory / "model", shape), 64
            self.models = (model, write_llama(directory / "other", shape, seed=7))
        else:
            family = hybrid_models.MODELS[name]
            chunk = family.chunk_tokens
            changes = specification.get("changes", {})
            model = Child.start(
                lambda: str(hybrid_models.write_hybrid(name, directory / "model", **changes)), {}
            ).result()
            options = {**family.engine, **options}
        run_directory = Path("/dev/shm") / f"kvtier-ranks-{os.getpid()}"
        tuning = EngineOptions(chunk_tokens=chunk, persistence="Process")
        structural = tuning.structural("ranks", run_directory, directory / "files")
        write(topology, Topology(structural=structural, live=tuning.live()))
        self.plain = {
            **ENGINE_OPTIONS,
            "disable_log_stats": True,
            "model": str(model),
            **options,
        }
        self.kvtier = {
            **self.plain,
            "kv_transfer_config": {
                "kv_connector": "KVTierConnector",
                "kv_connector_module_path": "kvtier.engines.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"topology": str(topology)},
            },
        }
        self.directory = directory
        self.engines = specification.get("engines", 1)
        self.coordinated = specification.get("coordinated", False)
        self.environment = specification.get("environment", {})
        if specification.get("deferred"):
            self.environment = {**self.environment, "RANKS_DEFERRED": "1"}
        self.wanted = hybrid_run.prompts(chunk)

    def stage(
        self, stage: Stage, options: dict[str, Any], *before: dict[str, Any], engines: int = 0
    ) -> Any:
        """Runs a stage in every engine, or in ``engines``, at the same time; the result of each."""
        ports = {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(free_port())}
        children = []
        for number in range(engines or self.engines):
            known = before[number] if before else {}
            environment = {
                **self.environment,
                "RANKS_DIRECTORY": str(self.directory),
                "RANKS_ENGINES": str(self.engines),
            }
            if self.coordinated:
                environment |= {
                    **ports,
                    "VLLM_DP_SIZE": str(self.engines),
                    "VLLM_DP_RANK": str(number),
                    "VLLM_DP_RANK_LOCAL": str(number),
                }
            children.append(
                Child.start(lambda known=known: stage(options, self.wanted, known), environment)
            )
        try:
            return [child.result() for child in children]
        finally:
            for child in children:
                child.kill()

    def updates(self) -> dict[str, Any]:
        """The answers of an engine without KVTier and of one with it."""

        def compute(
            options: dict[str, Any], wanted: list[list[int]], _: dict[str, Any]
        ) -> dict[str, Any]:
            engine = hybrid_run.SequentialEngine(options)
            if engine.driver.scheduler.connector is not None:
                engine.wait("not attached", engine.attached)
            answers = ranks_updates.run(engine, wanted[0], *self.models)
            engine.close()
            return {"answers": answers}

        more = {"weight_transfer_config": {"backend": ranks_updates.BACKEND}}
        (plain,) = self.stage(compute, {**self.plain, **more})
        (kvtier,) = self.stage(compute, {**self.kvtier, **more})
        return {"plain": plain["answers"], "kvtier": kvtier["answers"]}

    def lora(self) -> dict[str, Any]:
        """The answers of an engine without KVTier and of one with it, with adapters."""
        adapters = [
            write_lora(self.directory / name, SHAPE, seed=seed)
            for seed, name in enumerate(("first", "second"))
        ]

        def compute(
            options: dict[str, Any], wanted: list[list[int]], _: dict[str, Any]
        ) -> dict[str, Any]:
            engine = hybrid_run.SequentialEngine(options)
            result: dict[str, Any] = {"answers": ranks_lora.run(engine, wanted[0], adapters)}
            if engine.driver.scheduler.connector is not None:
                ready = engine.scheduler.session.ready
                result["namespace"], result["persistent"] = ready.namespace, ready.persistent
                result["failures"] = dict(engine.scheduler.loads.in_flight.counts.failures)
            return result

        (plain,) = self.stage(compute, {**self.plain, **ranks_lora.OPTIONS})
        (kvtier,) = self.stage(compute, {**self.kvtier, **ranks_lora.OPTIONS})
        return {"plain": plain, "kvtier": kvtier}

    def faults(self) -> dict[str, Any]:
        """The answers of an engine with a rank that hangs and dies, and of the next one."""

        def compute(
            options: dict[str, Any], wanted: list[list[int]], _: dict[str, Any]
        ) -> dict[str, Any]:
            engine = hybrid_run.SequentialEngine(options)
            engine.wait("not attached", engine.attached)
            result: dict[str, Any] = ranks_faults.run(engine, wanted[0])
            return {**result, "objects": len(engine.scheduler.session.replica)}

        (first,) = self.stage(compute, self.kvtier)
        (again,) = self.stage(_restarted, self.kvtier, first)
        return {**first, **again}

    def all(self) -> list[dict[str, Any]]:
        """All three engines, or the three generations of each."""
        started = time.monotonic()
        plain = self.stage(_plain, self.plain, engines=self.engines if self.coordinated else 1)
        plain *= self.engines // len(plain)
        first = self.stage(_first, self.kvtier)
        again = self.stage(_restarted, self.kvtier, *first)
        seconds = {"seconds": round(time.monotonic() - started, 1)}
        return [{**a, **b, **c, **seconds} for a, b, c in zip(plain, first, again, strict=True)]


def main() -> None:
    """Command line: see the module's text."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(quiet_environment())
    os.environ.update(cpu_environment())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["PYTHONHASHSEED"] = "0"
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    import vllm  # noqa: F401 - once for all children

    ranks_vllm.prepare()
    ranks_updates.register()
    directory = Path(sys.argv[2])
    for number, specification in enumerate(json.loads(sys.argv[1])):
        try:
            run = Run(specification, directory / str(number))
            kind = next((each for each in KINDS if specification.get(each)), "")
            result: Any = getattr(run, kind)() if kind else run.all()
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(result) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
