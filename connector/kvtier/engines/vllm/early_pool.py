"""Begins to register the host pool with the GPU when the engine begins to load a model.

In each worker process, for the connector that it will have (``early_start``). The worker side takes
the registration over, or abandons it where it stays off.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from kvtier.config.loader import load_for_engine
from kvtier.engines.common.early_registration import (
    Device,
    EarlyRegistration,
    Span,
    filled_end,
)
from kvtier.engines.vllm.early_start import ATTACHED_VARIABLE
from kvtier.store.pool_layout import expected_span
from kvtier.tierd.host_pool import on_tmpfs
from kvtier.tierd.wire import POOL_NAME
from kvtier.transfer.factory import pool_registration

logger = logging.getLogger(__name__)
_started: list[EarlyRegistration] = []


def begin() -> None:
    """Begins, once in this process, if the engine will have KVTier's connector and this thread has
    a GPU. Never raises: the worker side registers the pool otherwise."""
    directory = os.environ.get(ATTACHED_VARIABLE, "")
    if not directory or _started or not torch.cuda.is_initialized():
        return
    try:
        topology = load_for_engine(Path(directory))
        ranges, register, unregister = pool_registration(torch.cuda.current_device())
        early = EarlyRegistration(
            Path(topology.structural.run_directory) / POOL_NAME,
            Device(ranges, register, unregister),
            _filled_end,
            _expected_span(),
        )
        early.start()
    except Exception as error:  # noqa: BLE001 - an early registration is worth nothing but time
        logger.warning("KVTier: the host pool is not registered early: %s", error)
        return
    _started.append(early)


def _expected_span() -> Callable[[int], Span] | None:
    """The range of the pool that this rank will probably use. The groups of the KV cache are not
    known yet: they may have one shard where latent attention is used, and one for each rank
    otherwise."""
    import vllm.config

    current = getattr(vllm.config, "get_current_vllm_config_or_none", None)
    config = None if current is None else current()
    if config is None or getattr(config.model_config, "use_mla", False):
        return None
    ranks, rank = int(config.parallel_config.world_size), int(config.parallel_config.rank)
    if not 0 <= rank < ranks:
        return None
    return lambda pool_bytes: expected_span(pool_bytes, (tuple(range(ranks)),), rank)


def take() -> EarlyRegistration | None:
    """Returns the registration that was started, which the caller owns."""
    return _started.pop() if _started else None


def abandon() -> None:
    """Undoes a registration that was started, because the engine serves without tiers. Does not
    wait for the device, and never raises."""
    early = take()
    if early is None:
        return
    try:
        threading.Thread(
            target=_undo, args=(early,), name="kvtier-early-pool-end", daemon=True
        ).start()
    except RuntimeError as error:
        logger.warning("KVTier: an early registration is not undone: %s", error)


def _undo(early: EarlyRegistration) -> None:
    try:
        early.abandon()
    except Exception as error:  # noqa: BLE001 - the engine serves without it
        logger.warning("KVTier: an early registration is not undone: %s", error)


def _filled_end(path: Path, begin: int) -> int:
    # Elsewhere, holes are not what has not been filled.
    return filled_end(path, begin) if on_tmpfs(path) else 0
