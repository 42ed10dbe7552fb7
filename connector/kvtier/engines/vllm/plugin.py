"""vLLM plugin that attaches KVTier to engines whose command line cannot be changed.

Entry point ``kvtier`` of ``vllm.general_plugins``: vLLM calls ``register`` in every process that
builds engine arguments. If the user configured no KV transfer, the engine gets KVTier's connector
when ``KVTIER_TOPOLOGY`` names a topology directory, or another connector when
``KVTIER_TRANSFER_CONFIG`` holds vLLM's JSON for it. If anything fails, one line is logged and the
engine starts without a connector.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
from collections.abc import Callable
from typing import Any

from kvtier.engines.vllm import offload_region
from kvtier.engines.vllm.config import TOPOLOGY_VARIABLE, use_vllm_log_handlers
from kvtier.tierd import liveness

TRANSFER_CONFIG_VARIABLE = "KVTIER_TRANSFER_CONFIG"
CONNECTOR_NAME = "KVTierConnector"
CONNECTOR_MODULE = "kvtier.engines.vllm.connector"
MULTI_NAME = "WeightedMultiConnector"
MULTI_MODULE = "kvtier.engines.vllm.multi.connector"
_WRAPPED = "_kvtier_wrapped"

logger = logging.getLogger(__name__)


def register() -> None:
    """Wraps vLLM's engine arguments. vLLM calls it repeatedly, in any process. Never raises."""
    _register_connectors()
    directory = os.environ.get(TOPOLOGY_VARIABLE, "").strip()
    if not directory and not os.environ.get(TRANSFER_CONFIG_VARIABLE, "").strip():
        return
    try:
        liveness.reserve_descriptor()
        use_vllm_log_handlers()
        _wrap(directory)
    except Exception as error:  # a plugin that raises ends the engine's start
        logger.exception("KVTier: not attached: this vLLM is not supported: %s", error)
    if directory:
        _watch_weights()
        _start_tierd()


def _register_connectors() -> None:
    """Lets ``--kv-transfer-config`` name KVTier's connectors without a module path."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        for name, module in ((CONNECTOR_NAME, CONNECTOR_MODULE), (MULTI_NAME, MULTI_MODULE)):
            if name not in KVConnectorFactory._registry:
                KVConnectorFactory.register_connector(name, module, name)
    except Exception as error:  # a plugin that raises ends the engine's start
        logger.exception("KVTier: connectors are not registered by name: %s", error)


def _start_tierd() -> None:
    """Starts tierd early, where this is the process of an engine with KVTier's connector."""
    try:
        from kvtier.engines.vllm import early_start

        early_start.start_in_engine_process()
    except Exception as error:  # the connector starts it
        logger.exception("KVTier: cannot start tierd early: %s", error)


def _note_attached(engine_args: Any, directory: str) -> None:
    """The engine will have KVTier's connector, with this topology."""
    from vllm import envs

    from kvtier.engines.vllm import early_start

    transfer = engine_args.kv_transfer_config
    values = transfer if isinstance(transfer, dict) else vars(transfer)
    extra = values.get("kv_connector_extra_config") or {}
    if values.get("kv_connector") == MULTI_NAME:
        # A child's fields have the names of the parent's.
        children = [each for each in extra.get("connectors") or () if isinstance(each, dict)]
        values = next((c for c in children if c.get("kv_connector") == CONNECTOR_NAME), {})
        extra = values.get("kv_connector_extra_config") or {}
    ours = values.get("kv_connector") == CONNECTOR_NAME
    if ours and extra.get("topology", directory) == directory:
        early_start.note_attached(directory, not envs.VLLM_ENABLE_V1_MULTIPROCESSING)


def _watch_weights() -> None:
    """Lets the worker side hash weights that layers consume while the model is loaded."""
    try:
        from kvtier.engines.vllm import early_pool, weights

        weights.install(on_model=early_pool.begin)
    except Exception as error:  # without it objects stay in RAM, and the worker side says why
        logger.exception("KVTier: cannot watch the loading of weights: %s", error)


def _wrap(directory: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, _WRAPPED, False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *arguments: Any, **named: Any) -> Any:
        return attach(self, directory, lambda: original(self, *arguments, **named))

    setattr(create_engine_config, _WRAPPED, True)
    EngineArgs.create_engine_config = create_engine_config


def attach(engine_args: Any, directory: str, create: Callable[[], Any]) -> Any:
    """Creates the engine's configuration, with KVTier's connector where that is possible.

    ``create`` builds the configuration from ``engine_args``. Without a ``directory`` the connector
    is the one in ``KVTIER_TRANSFER_CONFIG``.
    """
    reason = _conflict(engine_args) or _configure(engine_args, directory)
    if reason:
        logger.warning("KVTier: not attached: %s", reason)
        config = create()
        if directory and engine_args.kv_transfer_config is not None:
            # The user's configuration may name the same connector.
            _note_attached(engine_args, directory)
        return config
    try:
        config = create()
        if not getattr(config.model_config, "is_encoder_decoder", False):
            if directory:
                _note_attached(engine_args, directory)
                logger.info("KVTier: attached by %s=%s", TOPOLOGY_VARIABLE, directory)
            else:
                connector = engine_args.kv_transfer_config.kv_connector
                logger.info(
                    "KVTier: connector %s configured by %s", connector, TRANSFER_CONFIG_VARIABLE
                )
            return config
        reason = "vLLM does not support KV connectors for encoder-decoder models"
    except Exception as error:  # noqa: BLE001 - the engine starts without a connector
        reason = f"{type(error).__name__}: {error}"
    engine_args.kv_transfer_config = None
    config = create()
    logger.warning("KVTier: not attached: %s", reason)
    return config


def _conflict(engine_args: Any) -> str:
    """Returns which configuration of the user takes precedence; empty if there is none."""
    existing = getattr(engine_args, "kv_transfer_config", None)
    if existing is not None:
        name = (
            existing.get("kv_connector")
            if isinstance(existing, dict)
            else getattr(existing, "kv_connector", existing)
        )
        return f"the engine has a KV transfer configuration already ({name})"
    if getattr(engine_args, "kv_offloading_size", None):
        return "kv_offloading_size is set: vLLM's own offloading takes precedence"
    return ""


def _configure(engine_args: Any, directory: str) -> str:
    """Sets the KV transfer configuration; returns why it cannot be set."""
    from vllm.config import KVTransferConfig

    try:
        if not directory:
            transfer = KVTransferConfig(**json.loads(os.environ.get(TRANSFER_CONFIG_VARIABLE, "")))
            _import_connector(transfer)
            if transfer.kv_connector == "OffloadingConnector":
                reason = offload_region.prepare(transfer)
                if reason:
                    return reason
            engine_args.kv_transfer_config = transfer
            return ""
        # In here a failure to import costs a log line, not the engine's start.
        from kvtier.config.loader import STRUCTURAL_FILE, load_structural

        engine_type = load_structural(os.path.join(directory, STRUCTURAL_FILE)).engine_type
        if engine_type != "VLLM":
            return f"the topology in {directory} is for engine type {engine_type}"
        # A failure to import ends here in a log line; in vLLM it ends the engine's start.
        importlib.import_module(CONNECTOR_MODULE)
        engine_args.kv_transfer_config = KVTransferConfig(**transfer_config(directory))
    except Exception as error:  # noqa: BLE001 - the caller logs it
        return f"{type(error).__name__}: {error}"
    return ""


def _import_connector(transfer: Any) -> None:
    """Raises if this image lacks the connector, before vLLM imports it and ends the start."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory.get_connector_class(transfer)
    if str(transfer.kv_connector).startswith("LMCache"):
        # vLLM imports it only when it creates the connector.
        importlib.import_module("lmcache.integration.vllm.vllm_v1_adapter")


def transfer_config(directory: str) -> dict[str, Any]:
    """Returns vLLM's KV transfer configuration for KVTier."""
    return {
        "kv_connector": CONNECTOR_NAME,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"topology": directory},
    }
