"""The configuration of ``WeightedMultiConnector``: vLLM's KV transfer configuration of each child,
with a weight.

    {"kv_connector": "WeightedMultiConnector", "kv_role": "kv_both",
     "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"connectors": [
        {"kv_connector": "NixlConnector", "weight": 100, "required": true},
        {"kv_connector": "KVTierConnector", "weight": 60,
         "kv_connector_extra_config": {"topology": "/etc/kvtier"}}]}}

Every process of an engine resolves the same document, so positions of children agree without a
message. Everything that a person must correct raises ``ConfigurationError`` when the engine starts.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvtier.engines.vllm.config import group_of
from kvtier.engines.vllm.plugin import CONNECTOR_MODULE, CONNECTOR_NAME, MULTI_NAME
from kvtier.errors import ConfigurationError
from kvtier.planner import GroupKind

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

EXTRA = "kv_connector_extra_config"
NESTED = ("MultiConnector", MULTI_NAME)
RESERVED = "HiSparseConnector"
DEFAULT_WEIGHT = 100
MAX_WAIT_SECONDS = 10.0
"""Longer than any promotion of KVTier may take by default, shorter than a client's patience."""


class MultiDocument(BaseModel):
    """``kv_connector_extra_config`` of the parent.

    ``max_wait_seconds``: how long a request waits for children that answer "not yet", if no other
    child has anything for it.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    connectors: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=16)]
    max_wait_seconds: Annotated[float, Field(ge=0, le=600)] = MAX_WAIT_SECONDS


class ChildOptions(BaseModel):
    """What an entry of ``connectors`` has beyond vLLM's own fields.

    ``weight``: tokens times weight decides which child loads; with 0 the child never does.
    ``name``: the label of its metrics. ``required``: the engine does not start without the child.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    weight: Annotated[int, Field(ge=0, le=10_000)] = DEFAULT_WEIGHT
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,63}$")] | None = None
    required: bool = False


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child. ``transfer``: its own KV transfer configuration. ``connector_class``: a subclass
    of vLLM's ``KVConnectorBase_V1``."""

    index: int
    name: str
    weight: int
    required: bool
    transfer: KVTransferConfig
    connector_class: Any

    @property
    def field(self) -> str:
        """The path of the child's entry in the configuration."""
        return f"{EXTRA}.connectors[{self.index}]"

    def vllm_config(self, parent: VllmConfig) -> VllmConfig:
        """Returns the engine's configuration as the child sees it."""
        own = copy.copy(parent)
        own.kv_transfer_config = self.transfer
        return own


@dataclass(frozen=True, slots=True)
class MultiSettings:
    """The resolved configuration."""

    children: tuple[ChildSpec, ...]
    max_wait_seconds: float


def resolve(transfer: KVTransferConfig | None) -> MultiSettings:
    """Returns the settings of an engine. Raises ``ConfigurationError``."""
    extra = transfer.kv_connector_extra_config if transfer is not None else {}
    return resolve_extra(extra, transfer)


def resolve_extra(
    extra: Mapping[str, Any], transfer: KVTransferConfig | None = None
) -> MultiSettings:
    """Returns the settings in a ``kv_connector_extra_config``. Raises ``ConfigurationError``.

    Fields that a child leaves out are those of ``transfer``, the parent's configuration.
    """
    document = _validated(MultiDocument, dict(extra), EXTRA)
    children: list[ChildSpec] = []
    for index, entry in enumerate(document.connectors):
        child = _child(index, entry, transfer, children)
        if any(child.name == other.name for other in children):
            raise ConfigurationError(
                f"{child.field}.name", child.name, "must differ from the names of other children"
            )
        children.append(child)
    return MultiSettings(tuple(children), document.max_wait_seconds)


def check_engine(transfer: KVTransferConfig | None) -> None:
    """Raises ``ConfigurationError`` unless a load that fails is recomputed."""
    policy = getattr(transfer, "kv_load_failure_policy", "recompute")
    if policy != "recompute":
        raise ConfigurationError(
            "kv_load_failure_policy",
            policy,
            "must be 'recompute': with other policies a failure of one connector fails requests",
        )


def check_hybrid(
    settings: MultiSettings, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    """Raises ``ConfigurationError`` if a child does not support the KV cache groups of the model.

    vLLM asks only the parent, which supports them. Without the hybrid KV cache manager, or with one
    group of full attention, every connector works.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return
    groups = [group_of(group) for group in kv_cache_config.kv_cache_groups]
    if len(groups) == 1 and groups[0].kind is GroupKind.FULL:
        return
    kinds = ", ".join(str(group) for group in groups)
    for child in settings.children:
        if not base.supports_hma(child.connector_class):
            raise ConfigurationError(
                f"{child.field}.kv_connector",
                child.transfer.kv_connector,
                "must support vLLM's hybrid KV cache manager (SupportsHMA), because the model has "
                f"the KV cache groups {kinds}: remove the connector, or start vLLM with "
                "--disable-hybrid-kv-cache-manager",
            )
    if len(groups) > 1 and not hasattr(base, "KVConnectorTransferResults"):
        raise ConfigurationError(
            "kv_connector",
            MULTI_NAME,
            f"must not be used with several KV cache groups ({kinds}) on this vLLM, which cannot "
            "recompute a load that fails there: use vLLM 0.32 or later",
        )


def _child(
    index: int, entry: Mapping[str, Any], parent: KVTransferConfig | None, others: list[ChildSpec]
) -> ChildSpec:
    field = f"{EXTRA}.connectors[{index}]"
    known = set(ChildOptions.model_fields)
    options = _validated(ChildOptions, {k: v for k, v in entry.items() if k in known}, field)
    transfer = _transfer(field, {k: v for k, v in entry.items() if k not in known}, parent)
    repeated = [each for each in others if each.transfer.kv_connector == transfer.kv_connector]
    connector = str(transfer.kv_connector)
    if repeated and connector == CONNECTOR_NAME:
        raise ConfigurationError(
            f"{field}.kv_connector", connector, "must be listed once: one policy has all tiers"
        )
    name = options.name or (f"{connector}-{len(repeated) + 1}" if repeated else connector)
    if repeated and "engine_id" not in entry:
        # Connectors of one kind name shared memory and sockets by it.
        transfer = dataclasses.replace(transfer, engine_id=f"{transfer.engine_id}-{name}")
    return ChildSpec(
        index, name, options.weight, options.required, transfer, _class(field, transfer)
    )


def _transfer(
    field: str, entry: Mapping[str, Any], parent: KVTransferConfig | None
) -> KVTransferConfig:
    from vllm.config import KVTransferConfig

    allowed = {each.name for each in dataclasses.fields(KVTransferConfig)}
    for key in entry:
        if key not in allowed:
            names = ", ".join(sorted(allowed | set(ChildOptions.model_fields)))
            raise ConfigurationError(f"{field}.{key}", entry[key], f"must be one of: {names}")
    connector = entry.get("kv_connector")
    if not isinstance(connector, str) or not connector:
        raise ConfigurationError(
            f"{field}.kv_connector", connector, "must be the name of a vLLM KV connector"
        )
    if connector in NESTED:
        raise ConfigurationError(
            f"{field}.kv_connector", connector, "must not have children: list those here"
        )
    if connector == RESERVED:
        raise ConfigurationError(
            f"{field}.kv_connector",
            connector,
            "must be used alone: vLLM reserves its host pool only there or in MultiConnector",
        )
    policy = entry.get("kv_load_failure_policy", "recompute")
    if policy != "recompute":
        raise ConfigurationError(
            f"{field}.kv_load_failure_policy",
            policy,
            "must be 'recompute': vLLM applies the policy of the engine to every connector",
        )
    values: dict[str, Any] = {
        "kv_role": getattr(parent, "kv_role", None) or "kv_both",
        "engine_id": getattr(parent, "engine_id", None),
        "kv_load_failure_policy": "recompute",
        **entry,
    }
    if parent is not None and "kv_buffer_device" not in entry:
        values["kv_buffer_device"] = parent.kv_buffer_device
    try:
        return KVTransferConfig(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(
            f"{field}.{path}" if path else field, first.get("input"), _requirement(first)
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(field, dict(entry), str(error)) from error


def _class(field: str, transfer: KVTransferConfig) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if transfer.kv_connector == CONNECTOR_NAME and not transfer.kv_connector_module_path:
        transfer = dataclasses.replace(transfer, kv_connector_module_path=CONNECTOR_MODULE)
    try:
        return KVConnectorFactory.get_connector_class(transfer)
    except Exception as error:
        where = transfer.kv_connector_module_path or "vLLM"
        raise ConfigurationError(
            f"{field}.kv_connector",
            transfer.kv_connector,
            f"must be a KV connector that can be imported from {where}: "
            f"{type(error).__name__}: {error}",
        ) from error


def _validated(model: type[Any], values: dict[str, Any], field: str) -> Any:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
        )
        if first["type"] == "extra_forbidden":
            requirement = f"must be one of: {', '.join(sorted(model.model_fields))}"
        else:
            requirement = _requirement(first)
        raise ConfigurationError(f"{field}{path}", first.get("input"), requirement) from error


def _requirement(error: Any) -> str:
    message = str(error["msg"])
    return message[:1].lower() + message[1:].replace("nput should", "nput must")
