"""Registers KVTier with ATOM in engines whose command line cannot be changed.

ATOM has no plugins and reads no connector from its environment. The payload has a directory with a
``sitecustomize`` module, which calls ``install`` in every Python process that has it in its path.
With ``KVTIER_TOPOLOGY`` set, two of ATOM's modules are changed right after they are imported:

* the factory of connectors knows ``kvtier``, in every process;
* a configuration without a connector gets that one, in the process that creates it. ATOM passes
  its configuration on to the others.

With ``KVTIER_LMCACHE_CONFIG`` instead, which names LMCache's configuration file, the connector of
the CacheEngine path (``kvtier-lmcache``) is used, which needs no topology and no tierd.

A connector that the user has configured takes precedence. If anything fails, one line is logged and
the engine starts without KVTier. Only the standard library is imported before ATOM is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

TOPOLOGY_VARIABLE = "KVTIER_TOPOLOGY"
LMCACHE_VARIABLE = "KVTIER_LMCACHE_CONFIG"
LMCACHE_OPTIONS = {
    "run_directory": "KVTIER_LMCACHE_RUN_DIRECTORY",
    "model_revision": "KVTIER_LMCACHE_MODEL_REVISION",
    "salt": "KVTIER_LMCACHE_SALT",
}
"""Options of the CacheEngine path by the variables that set them."""
CONNECTOR_NAME = "kvtier"
LMCACHE_CONNECTOR_NAME = "kvtier-lmcache"
CONNECTOR_MODULE = "kvtier.engines.atom.connector"
CONNECTOR_CLASSES = {
    CONNECTOR_NAME: ("KVTierOffloadConnector", "KVTierOffloadScheduler"),
    LMCACHE_CONNECTOR_NAME: ("KVTierCacheEngineConnector", "KVTierCacheEngineScheduler"),
}
"""The classes of workers and scheduler by the connector's name."""
CONFIG_MODULE = "atom.config"
FACTORY_MODULE = "atom.kv_transfer.disaggregation.factory"
OWN_OFFLOAD_VARIABLE = "ATOM_KV_OFFLOAD"
"""By which newer versions of ATOM turn their own offload connector on."""
_WRAPPED = "_kvtier_wrapped"

logger = logging.getLogger(__name__)


def install() -> None:
    """Watches for ATOM's modules. Idempotent. Never raises."""
    try:
        if not (_variable(TOPOLOGY_VARIABLE) or _variable(LMCACHE_VARIABLE)):
            return
        if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Watcher())
        for name, change in CHANGES.items():
            if name in sys.modules:
                change(sys.modules[name])
    except Exception as error:  # the interpreter must start
        logger.exception("KVTier: not attached: %s", error)


def register(factory_module: ModuleType) -> None:
    """Makes the connectors known to ATOM's factory. Never raises."""
    try:
        factory: Any = factory_module.KVConnectorFactory
        for name, (worker, scheduler) in CONNECTOR_CLASSES.items():
            names = {
                "worker_module": CONNECTOR_MODULE,
                "worker_class": worker,
                "scheduler_module": CONNECTOR_MODULE,
                "scheduler_class": scheduler,
            }
            try:
                factory.register(name, **names, requires_pd_staging=False)
            except TypeError:  # before ATOM had that parameter
                factory.register(name, **names)
    except Exception as error:
        logger.exception("KVTier: not attached: this ATOM is not supported: %s", error)


def configure(config_module: ModuleType) -> None:
    """Makes ``Config`` name the connector unless it names another one. Never raises."""
    try:
        config: Any = config_module.Config
        original = config.__post_init__
        if getattr(original, _WRAPPED, False):
            return

        @functools.wraps(original)
        def complete(self: Any, *arguments: Any, **named: Any) -> None:
            attach(self)
            original(self, *arguments, **named)

        setattr(complete, _WRAPPED, True)
        config.__post_init__ = complete
    except Exception as error:
        logger.exception("KVTier: not attached: this ATOM is not supported: %s", error)


def attach(config: Any) -> None:
    """Sets the connector in an ATOM configuration, if that is possible. Never raises."""
    directory, file = _variable(TOPOLOGY_VARIABLE), _variable(LMCACHE_VARIABLE)
    variable, path = (TOPOLOGY_VARIABLE, directory) if directory else (LMCACHE_VARIABLE, file)
    try:
        reason = _conflict(config)
        if directory and file:
            reason = reason or f"{TOPOLOGY_VARIABLE} and {LMCACHE_VARIABLE} are both set"
        elif directory:
            reason = reason or _unusable(directory)
        else:
            importlib.import_module(CONNECTOR_MODULE)
        if not reason:
            config.kv_transfer_config = (
                transfer_config(directory) if directory else lmcache_transfer_config(file)
            )
    except Exception as error:  # noqa: BLE001 - the engine starts without a connector
        reason = f"{type(error).__name__}: {error}"
    if reason:
        logger.warning("KVTier: not attached: %s", reason)
    else:
        logger.info("KVTier: attached by %s=%s", variable, path)


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()


def lmcache_transfer_config(file: str) -> dict[str, str]:
    """Returns ATOM's KV transfer configuration for the CacheEngine path."""
    given = {name: _variable(variable) for name, variable in LMCACHE_OPTIONS.items()}
    return {
        "kv_connector": LMCACHE_CONNECTOR_NAME,
        "kv_role": "offload",
        "lmcache_config": file,
        "engine_id": uuid.uuid4().hex,
        **{name: value for name, value in given.items() if value},
    }


def transfer_config(directory: str) -> dict[str, str]:
    """Returns ATOM's KV transfer configuration. ``engine_id`` is the same in all its processes."""
    return {
        "kv_connector": CONNECTOR_NAME,
        "kv_role": "offload",
        "topology": directory,
        "engine_id": uuid.uuid4().hex,
    }


def _conflict(config: Any) -> str:
    existing = getattr(config, "kv_transfer_config", None)
    if existing and str(existing).strip() != "{}":
        return "the engine has a KV transfer configuration already"
    if os.environ.get(OWN_OFFLOAD_VARIABLE, "").strip() not in ("", "0"):
        return f"{OWN_OFFLOAD_VARIABLE} is set: ATOM's own offloading takes precedence"
    return ""


def _unusable(directory: str) -> str:
    """Returns why KVTier cannot be used here. An import that fails must fail before ATOM's."""
    from kvtier.config.loader import STRUCTURAL_FILE, load_structural

    engine_type = load_structural(os.path.join(directory, STRUCTURAL_FILE)).engine_type
    if engine_type != "ATOM":
        return f"the topology in {directory} is for engine type {engine_type}"
    importlib.import_module(CONNECTOR_MODULE)
    return ""


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    CONFIG_MODULE: configure,
    FACTORY_MODULE: register,
}


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds ATOM's modules as usual, and changes them once they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = CHANGES.get(fullname)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changer(spec.loader, change)
        return spec


class _Changer(importlib.abc.Loader):
    def __init__(self, loader: Any, change: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)
