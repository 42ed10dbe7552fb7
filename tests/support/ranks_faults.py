"""A rank that hangs, and one that dies, during a load: a stage of ``ranks_run``."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

HANG_SECONDS = 3.0
"""Longer than the limit of a load."""


def run(engine: Any, tokens: list[int]) -> dict[str, Any]:
    """Runs a prompt that is in RAM while rank 1 is stopped, and again while it dies.

    The engine cannot be used afterwards. vLLM ends an engine of which a rank has died.
    """
    driver = engine.driver
    victim = driver.core.model_executor.workers[1].proc.pid
    result: dict[str, Any] = {"tokens": engine.run(tokens)}
    engine.wait("not stored", engine.stored)

    _begin_load(engine, "hangs", tokens)
    os.kill(victim, signal.SIGSTOP)
    timer = threading.Timer(HANG_SECONDS, os.kill, (victim, signal.SIGCONT))
    timer.start()
    started = time.monotonic()
    result["hangs"] = driver.finish(["hangs"])["hangs"]["tokens"]
    result["hang_seconds"] = time.monotonic() - started
    timer.join()
    driver.settle()
    result["referenced"] = engine.scheduler.stores.referenced_blocks
    result["loads_left"] = len(engine.scheduler.loads.in_flight)

    _begin_load(engine, "dies", tokens)
    os.kill(victim, signal.SIGKILL)
    started = time.monotonic()
    try:
        driver.finish(["dies"])
    except Exception as error:  # vLLM's own, of several classes
        result["death"] = f"{type(error).__name__}: {error}"
    result["death_seconds"] = time.monotonic() - started
    return result


def _begin_load(engine: Any, name: str, tokens: list[int]) -> None:
    """Queues the prompt, and steps until its load has begun."""
    if not engine.driver.reset_prefix_cache():
        raise TimeoutError("the GPU cache could not be emptied")
    engine.wait("not attached after a reset", engine.attached)
    engine.driver.add(name, tokens, 12)
    deadline = time.monotonic() + 60
    begun: list[int] = []
    in_flight = engine.scheduler.loads.in_flight
    start = in_flight.start

    def noted(*arguments: Any) -> None:
        start(*arguments)
        begun.append(1)

    in_flight.start = noted
    try:
        # The load is begun while vLLM schedules, so that its workers get it in this step.
        while not begun:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} is not loaded")
            engine.driver.step()
    finally:
        in_flight.start = start
