"""The child of ``DrivenEngine``: an in-process vLLM engine driven by JSON commands on standard
input.

Each command is one line, answered by one line on standard output: ``{"result": ...}`` or
``{"error": "..."}``. Everything that vLLM prints goes to standard error. The in-process engine
makes a step only on command, so a test can stop it between any two steps.

Commands (``do``), with their arguments:

``add {name, prompt, max_tokens, salt?, lora?, transfer?}``
    queues a request; nothing runs yet. ``lora``: {name, number, path, inplace?}. ``transfer``: its
    ``kv_transfer_params``.
``step {count=1}``
    makes steps; returns the requests that finished: {id: {tokens, cached, reason,
    transfer}}.
``finish {ids, seconds=90}``
    steps until all of ``ids`` have finished; returns the same, and the number of steps as "steps".
``abort {ids}``
    aborts requests.
``settle {seconds=30}``
    steps until the scheduler has no requests.
``reset_prefix_cache {seconds=30}``
    settles and empties the GPU prefix cache; returns whether the engine did so.
``metrics {prefix="vllm:"}``
    Prometheus text of the samples that start with the prefix.
``state {}``
    {waiting, running, requests, free_blocks} of the scheduler.
``connector {}``
    the state of KVTier's scheduler side, with its namespace, and the connector's class and file;
    empty without KVTier.
``set {variables}``
    sets environment variables of the engine's process.
``call {function}``
    calls a function ("module:name") in the engine's process; returns its result.
``lookup_counts {}``
    how often the connector looked up a hit, by request id.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from kvtier.harness.engine_process import json_answers, quiet_environment

HOOKS = "kvtier_hooks"
"""An option of the driver: functions ("module:name") to call before the engine is created."""
PAUSE_SECONDS = 0.002
"""Pause after a step without progress: a request waits for another process, which needs the CPU."""


class Driver:
    """The engine and its commands."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**options)
        self.engine = self.llm.llm_engine
        self.core: Any = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.names: dict[str, str] = {}
        self.lookups: dict[str, int] = {}
        self.done: dict[str, dict[str, Any]] = {}
        self._count_lookups()

    def _count_lookups(self) -> None:
        connector = self.scheduler.connector
        if connector is None:
            return
        original = connector.get_num_new_matched_tokens

        def counted(request: Any, *arguments: Any, **named: Any) -> Any:
            name = self._outside(request.request_id)
            self.lookups[name] = self.lookups.get(name, 0) + 1
            return original(request, *arguments, **named)

        connector.get_num_new_matched_tokens = counted

    def _outside(self, internal: str) -> str:
        return self.names.get(internal, internal)

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        salt: str = "",
        lora: Any = None,
        transfer: dict[str, Any] | None = None,
    ) -> None:
        """Queues one request."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        content: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt:
            content["cache_salt"] = salt
        adapter = None
        if lora is not None:
            adapter = LoRARequest(
                lora["name"], lora["number"], lora["path"], load_inplace=lora.get("inplace", False)
            )
        parameters = SamplingParams(
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            max_tokens=max_tokens,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        internal = self.engine.add_request(name, content, parameters, lora_request=adapter)
        self.names[internal or name] = name

    def step(self, count: int = 1) -> dict[str, Any]:
        """Makes ``count`` steps."""
        finished: dict[str, Any] = {}
        for _ in range(count):
            for output in self.engine.step():
                if output.finished:
                    completion = output.outputs[0]
                    name = self._outside(output.request_id)
                    finished[name] = {
                        "tokens": list(completion.token_ids),
                        "cached": output.num_cached_tokens,
                        "reason": completion.finish_reason,
                        "transfer": getattr(output, "kv_transfer_params", None),
                    }
        self.done.update(finished)
        return finished

    def finish(self, ids: list[str], seconds: float = 90) -> dict[str, Any]:
        """Steps until all of ``ids`` have finished."""
        deadline = time.monotonic() + seconds
        steps = 0
        while not all(each in self.done for each in ids):
            if time.monotonic() > deadline:
                missing = [each for each in ids if each not in self.done]
                raise TimeoutError(
                    f"after {steps} steps and {seconds} s not finished: {missing}; {self.state()}"
                )
            before = self._progress()
            self.step()
            steps += 1
            if self._progress() == before:
                time.sleep(PAUSE_SECONDS)
        return {**{each: self.done.pop(each) for each in ids}, "steps": steps}

    def _progress(self) -> int:
        return sum(
            request.num_computed_tokens + request.num_output_tokens
            for request in self.scheduler.running
        )

    def abort(self, ids: list[str]) -> None:
        """Aborts requests."""
        self.engine.abort_request(
            [internal for internal, name in self.names.items() if name in ids], internal=True
        )

    def settle(self, seconds: float = 30) -> bool:
        """Steps until the scheduler has no requests. A request too short to be cached then flushes
        the results of the last step.
        """
        deadline = time.monotonic() + seconds
        for round_number in range(2):
            while self.scheduler.has_requests():
                if time.monotonic() > deadline:
                    return False
                self.step()
                time.sleep(PAUSE_SECONDS)
            if round_number == 0:
                name = f"settle-{time.monotonic_ns()}"
                self.add(name, [5, 6, 7], 2)
        return True

    def reset_prefix_cache(self, seconds: float = 30) -> bool:
        """Settles and empties the GPU prefix cache."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.settle(max(0.1, deadline - time.monotonic()))
            if self.engine.reset_prefix_cache():
                return True
            time.sleep(0.05)
        return False

    def metrics(self, prefix: str = "vllm:") -> str:
        """Prometheus text of the samples that start with ``prefix``."""
        from prometheus_client import REGISTRY, generate_latest

        lines = generate_latest(REGISTRY).decode().splitlines()
        return "\n".join(line for line in lines if line.startswith(prefix))

    def state(self) -> dict[str, Any]:
        """Requests and free blocks of the scheduler."""
        return {
            "waiting": len(self.scheduler.waiting)
            + len(getattr(self.scheduler, "skipped_waiting", ())),
            "running": len(self.scheduler.running),
            "requests": {
                self._outside(name): str(each.status)
                for name, each in self.scheduler.requests.items()
            },
            "free_blocks": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }

    def connector(self) -> dict[str, Any]:
        """The state of KVTier's scheduler side."""
        connector = self.scheduler.connector
        # Beside other connectors it is a child.
        beside = [child.connector for child in getattr(connector, "_children", ())]
        sides = [getattr(each, "_scheduler", None) for each in (connector, *beside)]
        kvtier = next((side for side in sides if side is not None), None)
        if kvtier is None:
            return {}
        ready = kvtier.session.ready
        return {
            **kvtier.snapshot(),
            "class": f"{type(connector).__module__}.{type(connector).__qualname__}",
            "file": inspect.getfile(type(connector)),
            "namespace": ready.namespace if ready is not None else "",
            "worker_epoch": kvtier.stores.conditions.worker_epoch or 0,
            "credits": sum(len(slots) for slots in kvtier.session.credits),
        }

    def set(self, variables: dict[str, str]) -> None:
        """Sets environment variables."""
        os.environ.update(variables)

    def call(self, function: str) -> Any:
        """Calls ``function`` ("module:name" or "file.py:name") without arguments."""
        return _function(function)()

    def lookup_counts(self) -> dict[str, int]:
        """How often the connector looked up a hit, by request."""
        return dict(self.lookups)


def _function(path: str) -> Callable[[], Any]:
    """Returns the function that ``path`` names: "module:name", or "/path/to/file.py:name"."""
    location, _, name = path.rpartition(":")
    module = (
        _module(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    )
    function: Callable[[], Any] = getattr(module, name)
    return function


@functools.cache
def _module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Reads commands until standard input ends."""
    answer = json_answers()
    os.environ.update(quiet_environment())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    options = json.loads(sys.argv[1])
    for hook in options.pop(HOOKS, ()):
        _function(hook)()
    driver = Driver(options)
    answer({"result": "ready"})
    commands = (
        "add",
        "step",
        "finish",
        "abort",
        "settle",
        "reset_prefix_cache",
        "metrics",
        "state",
        "connector",
        "lookup_counts",
        "set",
        "call",
    )
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        if name == "exit":
            break
        try:
            if name not in commands:
                raise ValueError(f"unknown command: {name}")
            call: Callable[..., Any] = getattr(driver, name)
            answer({"result": call(**command)})
        except Exception as error:  # noqa: BLE001  the test must see any error
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
    answer({"result": "bye"})


if __name__ == "__main__":
    main()
