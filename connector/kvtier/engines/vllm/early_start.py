"""Starts tierd while the engine loads its weights, so that the host pool is there before them.

Filling a pool of 36 GiB takes about ten seconds; the connector itself exists only once the weights
are loaded and the KV cache is sized. So the plugin starts tierd in the process in which the
connector's scheduler side will be built, and the connector takes it over.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

from kvtier.config.loader import load_for_engine
from kvtier.config.models import Topology
from kvtier.tierd.supervisor import Supervisor

ATTACHED_VARIABLE = "KVTIER_ATTACHED"
"""Set in the process that configures the engine, and inherited by the engine's own process: the
topology directory of the connector that the engine will have."""
ENGINE_PROCESS = "EngineCore"
"""How vLLM names the process of an EngineCore, with the rank behind it under data parallelism."""
ABANDON_SECONDS = 1.5
_WRAPPED = "_kvtier_starts_tierd"
logger = logging.getLogger(__name__)
_started: dict[str, Supervisor] = {}


def note_attached(directory: str, in_process: bool) -> None:
    """The engine will have KVTier's connector. ``in_process``: its core runs in this process."""
    os.environ[ATTACHED_VARIABLE] = directory
    if in_process:
        start(directory)


def start_in_engine_process() -> None:
    """Starts tierd if this is the process of an engine that will have KVTier's connector."""
    directory = os.environ.get(ATTACHED_VARIABLE, "")
    if directory and multiprocessing.current_process().name.startswith(ENGINE_PROCESS):
        start(directory)


def start_with_core() -> None:
    """Lets ``start_in_engine_process`` run when vLLM creates the core of an engine: before the
    workers, which are other processes under tensor parallelism, load weights.

    Raises ``ImportError`` or ``AttributeError`` for a vLLM without it. Idempotent.
    """
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.__init__
    if getattr(original, _WRAPPED, False):
        return

    @functools.wraps(original)
    def create(self: Any, *arguments: Any, **named: Any) -> None:
        start_in_engine_process()
        original(self, *arguments, **named)

    setattr(create, _WRAPPED, True)
    EngineCore.__init__ = create


def start(directory: str) -> None:
    """Starts tierd unless that was done. Never raises: the connector tries again, and reports."""
    if directory in _started:
        return
    try:
        supervisor = Supervisor(Path(directory), load_for_engine(Path(directory)))
        supervisor.ensure()
    except Exception as error:  # noqa: BLE001 - an early start is worth nothing but time
        logger.warning("KVTier: tierd is started with the connector, not before: %s", error)
        return
    _started[directory] = supervisor


def take(directory: str, topology: Topology) -> Supervisor:
    """Returns the supervisor that was started early, or a new one. The caller owns it."""
    return _started.pop(directory, None) or Supervisor(Path(directory), topology)


def abandon(directory: str) -> None:
    """Ends a tierd that was started early, because the engine serves without tiers."""
    supervisor = _started.pop(directory, None)
    if supervisor is not None:
        supervisor.abandon(ABANDON_SECONDS)
