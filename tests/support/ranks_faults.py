"""A rank that hangs during a request, and one that dies during a load: a stage of ``ranks_run``."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

HANG_SECONDS = 4.0
"""tierd takes a process without a message for 3 s as lost."""


def run(engine: Any, tokens: list[int]) -> dict[str, Any]:
    """Runs a prompt that is in RAM while rank 1 is stopped, and again while it dies.

    The engine cannot be used afterwards. vLLM ends an engine of which a rank has died.
    """
    driver = engine.driver
    victim = driver.core.model_executor.workers[1].proc.pid
    result: dict[str, Any] = {"tokens": engine.run(tokens)}
    engine.wait("not stored", engine.stored)

    in_flight = engine.scheduler.loads.in_flight
    _queue(engine, "hangs", tokens)
    os.kill(victim, signal.SIGSTOP)
    timer = threading.Timer(HANG_SECONDS, os.kill, (victim, signal.SIGCONT))
    timer.start()
    started = time.monotonic()
    # Whether something is loaded depends on when tierd takes the rank as lost.
    result["hangs"] = driver.finish(["hangs"])["hangs"]["tokens"]
    result["hang_seconds"] = time.monotonic() - started
    timer.join()
    driver.settle()
    result["referenced"] = engine.scheduler.stores.referenced_blocks
    result["loads_left"] = len(in_flight)

    # After a loss the ranks have attached again.
    _queue(engine, "dies", tokens)
    offered = in_flight.counts.offered_tokens
    os.kill(victim, signal.SIGKILL)
    started = time.monotonic()
    try:
        driver.finish(["dies"])
    except Exception as error:  # vLLM's own, of several classes
        result["death"] = f"{type(error).__name__}: {error}"
    result["death_seconds"] = time.monotonic() - started
    result["death_offered"] = in_flight.counts.offered_tokens - offered
    return result


def _queue(engine: Any, name: str, tokens: list[int]) -> None:
    """Queues a prompt that is in RAM, with an empty GPU cache."""
    if not engine.driver.reset_prefix_cache():
        raise TimeoutError("the GPU cache could not be emptied")
    engine.wait("not attached after a reset", engine.attached)
    engine.driver.add(name, tokens, 12)
