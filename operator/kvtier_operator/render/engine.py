"""What attaches an engine to a topology: arguments, or environment alone. Pure."""

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
PLUGIN_NAME = "kvtier"
"""Name of the entry point in ``vllm.general_plugins``; ``VLLM_PLUGINS``, where set, lists the
names that may run."""


def transfer_config(topology_directory: str) -> dict[str, Any]:
    """The KV transfer configuration of vLLM.

    ``recompute``: its own default ends a request whose load failed.
    """
    return {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"topology": topology_directory},
    }


def arguments(topology_directory: str) -> list[str]:
    """Command-line arguments that attach vLLM."""
    return [
        "--kv-transfer-config",
        json.dumps(transfer_config(topology_directory), separators=(",", ":")),
    ]


def environment(
    structural: Structural,
    topology_directory: str,
    payload_directory: str | None = None,
    inherited: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Variables that attach an engine whose command stays as it is.

    ``payload_directory`` is where the connector was written (None: it is installed). ``inherited``
    is what the engine's environment holds already: paths and plugin lists are extended, a hash
    seed that is set stays (see ``conflicts``).
    """
    return {
        "KVTIER_TOPOLOGY": topology_directory,
        **attaching_variables(structural.hash_seed, payload_directory, inherited or {}),
    }


def attaching_variables(
    hash_seed: str, payload_directory: str | None, given: Mapping[str, str]
) -> dict[str, str]:
    """The part of ``environment`` that is the same for all connectors: KVTier's plugin is found and may run, and block
    hashes are the same in every process.
    """
    variables = {}
    if payload_directory is not None:
        others = [
            part
            for part in given.get("PYTHONPATH", "").split(":")
            if part and part != payload_directory
        ]
        variables["PYTHONPATH"] = ":".join([payload_directory, *others])
    variables["PYTHONHASHSEED"] = given.get("PYTHONHASHSEED") or hash_seed
    if "VLLM_PLUGINS" in given:
        allowed = [name for name in given["VLLM_PLUGINS"].split(",") if name]
        variables["VLLM_PLUGINS"] = ",".join(
            allowed if PLUGIN_NAME in allowed else [*allowed, PLUGIN_NAME]
        )
    return variables


def conflicts(structural: Structural, inherited: Mapping[str, str]) -> list[str]:
    """What the environment sets otherwise than the policy, in words."""
    seed = inherited.get("PYTHONHASHSEED")
    if seed and seed != structural.hash_seed:
        return [
            f"PYTHONHASHSEED is {seed} and stays so; the policy's hashSeed is "
            f"{structural.hash_seed}. "
            "Engines with different seeds may not share objects."
        ]
    return []


def check(policy: KVTierPolicy) -> None:
    """Raises ``ConfigurationError`` where the policy asks for an engine configuration that is
    not rendered."""
    engine = policy.spec.engine
    if engine.connector is not Connector.KVTIER:
        raise ConfigurationError(
            "spec.engine.connector",
            engine.connector.value,
            "KVTier, which is what this version renders",
        )
    if engine.type is not EngineType.VLLM:
        raise ConfigurationError(
            "spec.engine.type", engine.type.value, "VLLM, which is what this version renders"
        )
