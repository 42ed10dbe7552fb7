"""Makes the engine-neutral modules of ``kvtier.engines.vllm`` importable without vLLM.

Loads, stores, the transfer thread and the session with tierd know no engine, except that the
messages in ``kvtier.engines.vllm.metadata`` have two base classes of vLLM. Where vLLM is not
installed, ``prepare`` imports that module with empty base classes. Nothing named ``vllm`` stays in
``sys.modules``, so other code still sees that vLLM is absent.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from types import ModuleType

logger = logging.getLogger(__name__)
MESSAGES = "kvtier.engines.vllm.metadata"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_CLASSES = ("KVConnectorMetadata", "KVConnectorWorkerMetadata")


def prepare() -> None:
    """Imports the messages. Idempotent. Call it before importing any module that uses them."""
    if MESSAGES in sys.modules:
        return
    if importlib.util.find_spec("vllm") is not None:
        try:
            importlib.import_module(MESSAGES)
        except Exception as error:  # noqa: BLE001 - a vLLM that cannot be imported is not needed
            logger.debug("KVTier: vLLM is installed and cannot be imported: %s", error)
        else:
            return
    _import_with_placeholders()


def _import_with_placeholders() -> None:
    parts = _BASE.split(".")
    names = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    previous = {name: sys.modules.get(name) for name in names}
    for name in names:
        placeholder = ModuleType(name)
        placeholder.__path__ = []
        sys.modules[name] = placeholder
    for name in _CLASSES:
        setattr(sys.modules[_BASE], name, type(name, (), {"__slots__": ()}))
    try:
        importlib.import_module(MESSAGES)
    finally:
        for name, module in previous.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
