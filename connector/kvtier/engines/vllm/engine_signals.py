"""Signals of EngineCore after which weights or adapters may be others: RPCs to the workers, and
resuming.

Updates of weights, sleep and functions of the user reach the workers through
``EngineCore.collective_rpc``, whose name and arguments are the same in all supported versions. Each
name that is not known to be harmless counts. Engine steps do not pass it.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any, Protocol

logger = logging.getLogger(__name__)
_WRAPPED = "_kvtier_signals"
REMOVAL = "remove_lora"
"""Changes no weights, but what an adapter's number stands for."""
HARMLESS_CALLS = frozenset(
    {
        "add_lora",
        "check_health",
        "compute_weight_checksums",
        "execute_dummy_batch",
        "get_kv_cache_spec",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "synchronize_device",
    }
)


class SignalListener(Protocol):
    """A scheduler side."""

    def on_engine_signal(self, name: str) -> None:
        """The engine's thread is about to do something that can change weights."""
        ...

    def on_adapter_removed(self) -> None:
        """The engine's thread is about to remove a LoRA adapter."""
        ...


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(listener: SignalListener) -> None:
    """Signals of all engines of this process go to ``listener`` as long as it exists.

    Raises ``ImportError`` or ``AttributeError`` for a vLLM without these methods.
    """
    from vllm.v1.engine.core import EngineCore

    _listeners.add(listener)
    for name in ("collective_rpc", "resume_scheduler", "wake_up", REMOVAL):
        _wrap(EngineCore, name)


def _wrap(owner: type, name: str) -> None:
    original = getattr(owner, name, None)
    if original is None or getattr(original, _WRAPPED, False):
        return

    @functools.wraps(original)
    def signalling(self: Any, *arguments: Any, **named: Any) -> Any:
        called = name
        if name == "collective_rpc":
            method = arguments[0] if arguments else named.get("method")
            called = method if isinstance(method, str) else "a function"
        if called == REMOVAL or called not in HARMLESS_CALLS:
            _signal(called)
        return original(self, *arguments, **named)

    setattr(signalling, _WRAPPED, True)
    setattr(owner, name, signalling)


def _signal(name: str) -> None:
    for listener in list(_listeners):
        try:
            if name == REMOVAL:
                listener.on_adapter_removed()
            else:
                listener.on_engine_signal(name)
        except Exception as error:  # the call is vLLM's and goes on in any case
            logger.exception("KVTier: cannot handle the signal %s: %s", name, error)
