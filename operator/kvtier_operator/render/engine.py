"""Configuration of an engine for a topology: arguments, or environment variables alone. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvtier.config.models import Structural
from kvtier.errors import ConfigurationError
from kvtier_operator.api.engine import Connector, EngineType
from kvtier_operator.api.policy import KVTierPolicy

CONNECTOR_CLASS = "KVTierConnector"
CONNECTOR_MODULE = "kvtier.engines.vllm.connector"
ATOM_CONNECTOR = "kvtier"
ATOM_PAYLOAD = "kvtier-atom"
"""Directory of the payload with the module that registers the connector with ATOM."""
PLUGIN_NAME = "kvtier"
"""Name of the entry point in ``vllm.general_plugins``. ``VLLM_PLUGINS``, if set, lists the plugins
that run."""


def transfer_config(topology_directory: str) -> dict[str, Any]:
    """The KV transfer configuration of vLLM.

    ``recompute``: vLLM's default aborts a request whose load fails.
    """
    return {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"topology": topology_directory},
    }


def atom_transfer_config(topology_directory: str) -> dict[str, Any]:
    """The KV transfer configuration of ATOM, which knows the connector once the payload's
    ``sitecustomize`` has run.
    """
    return {
        "kv_connector": ATOM_CONNECTOR,
        "kv_role": "offload",
        "topology": topology_directory,
    }


def arguments(topology_directory: str, engine_type: EngineType = EngineType.VLLM) -> list[str]:
    """Command-line arguments of the engine. Both engines have the same option."""
    is_atom = engine_type is EngineType.ATOM
    config = (atom_transfer_config if is_atom else transfer_config)(topology_directory)
    return ["--kv-transfer-config", json.dumps(config, separators=(",", ":"))]


def payload_path(payload_directory: str, engine_type: EngineType) -> str:
    """What the payload adds to ``PYTHONPATH``. ATOM has no plugins, so Python itself has to import
    the module that registers the connector.
    """
    if engine_type is not EngineType.ATOM:
        return payload_directory
    return f"{payload_directory}/{ATOM_PAYLOAD}:{payload_directory}"


def environment(
    structural: Structural,
    topology_directory: str,
    payload_directory: str | None = None,
    inherited: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Variables of an engine whose command stays as it is.

    ``payload_directory``: of the connector; None if it is installed. ``inherited``: the engine's
    environment; paths and plugin lists are extended, a hash seed is kept (see ``conflicts``).
    """
    return {
        "KVTIER_TOPOLOGY": topology_directory,
        **attaching_variables(
            structural.hash_seed,
            payload_directory,
            inherited or {},
            EngineType(structural.engine_type),
        ),
    }


def attaching_variables(
    hash_seed: str,
    payload_directory: str | None,
    given: Mapping[str, str],
    engine_type: EngineType = EngineType.VLLM,
) -> dict[str, str]:
    """The variables that all connectors need: KVTier's plugin is found and may run, and block
    hashes are equal in all processes.
    """
    variables = {}
    if payload_directory is not None:
        added = payload_path(payload_directory, engine_type)
        others = [
            part
            for part in given.get("PYTHONPATH", "").split(":")
            if part and part not in added.split(":")
        ]
        variables["PYTHONPATH"] = ":".join([added, *others])
    variables["PYTHONHASHSEED"] = given.get("PYTHONHASHSEED") or hash_seed
    if "VLLM_PLUGINS" in given:
        allowed = [name for name in given["VLLM_PLUGINS"].split(",") if name]
        variables["VLLM_PLUGINS"] = ",".join(
            allowed if PLUGIN_NAME in allowed else [*allowed, PLUGIN_NAME]
        )
    return variables


def conflicts(structural: Structural, inherited: Mapping[str, str]) -> list[str]:
    """Notes about variables whose values differ from the policy."""
    seed = inherited.get("PYTHONHASHSEED")
    if seed and seed != structural.hash_seed:
        return [
            f"PYTHONHASHSEED is {seed}, which is kept; the policy's hashSeed is "
            f"{structural.hash_seed}. "
            "Engines with different seeds may not share objects."
        ]
    return []


def check(policy: KVTierPolicy) -> None:
    """Raises ``ConfigurationError`` if this version cannot render the policy's engine."""
    engine = policy.spec.engine
    if engine.connector is not Connector.KVTIER:
        raise ConfigurationError(
            "spec.engine.connector",
            engine.connector.value,
            "must be KVTier, the connector that this version renders",
        )
