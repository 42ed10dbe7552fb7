"""Actions on an in-process vLLM engine between two steps, for ``drive("call")``.

``install`` is a hook of ``kvtier.harness.engine_driver``: it notes the engine while it is created.
The argument of an action is in the environment.
"""

from __future__ import annotations

import os
from typing import Any

_cores: list[Any] = []


def install() -> None:
    """Call it before the engine is created."""
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.__init__

    def noted(self: Any, *arguments: Any, **named: Any) -> None:
        _cores.append(self)
        original(self, *arguments, **named)

    EngineCore.__init__ = noted


def _core() -> Any:
    (core,) = _cores
    return core


def pause_and_clear() -> None:
    """Pauses the scheduler, aborts everything and clears the caches."""
    _core().pause_scheduler("abort", clear_cache=True)


def sleep() -> None:
    """Level 1: also clears the caches."""
    _core().sleep(1)


def resume() -> None:
    """Ends a pause or a sleep."""
    core = _core()
    if core.model_executor.is_sleeping:
        core.wake_up()
    else:
        core.resume_scheduler()


def reset_prefix_cache() -> bool:
    """Resets vLLM's prefix cache, and not that of connectors."""
    return bool(_core().reset_prefix_cache())


def update_weights() -> None:
    """Loads the weights of another directory into the running engine."""
    _core().collective_rpc(
        "reload_weights", kwargs={"weights_path": os.environ["CONTROL_ARGUMENT"]}
    )


def remove_adapter() -> bool:
    """Removes the LoRA adapter of a number."""
    return bool(_core().remove_lora(int(os.environ["CONTROL_ARGUMENT"])))
