"""Engine configuration for connectors other than KVTier's own (``engine.connector: Offloading | LMCache``).

Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.errors import ConfigurationError
from kvtier_operator.api.engine import Connector, EngineType
from kvtier_operator.api.policy import KVTierPolicy, PolicySpec
from kvtier_operator.api.validation import FieldError, InvalidDocumentError
from kvtier_operator.render.connectors import lmcache, offloading
from kvtier_operator.render.connectors.base import (
    TRANSFER_CONFIG_VARIABLE,
    Expressed,
    Rendered,
    unexpressed,
)

__all__ = ["TRANSFER_CONFIG_VARIABLE", "Rendered", "gaps", "impossible", "render"]


@dataclass(frozen=True, slots=True)
class _Other:
    name: str
    expressed: Expressed
    impossible: Callable[[PolicySpec], list[FieldError]]
    render: Callable[[PolicySpec, dict[str, str], int], Rendered]


_OTHERS = {
    Connector.OFFLOADING: _Other(
        offloading.NAME, offloading.EXPRESSED, offloading.impossible, offloading.render
    ),
    Connector.LMCACHE: _Other(lmcache.NAME, lmcache.EXPRESSED, lmcache.impossible, lmcache.render),
}


def impossible(policy: KVTierPolicy) -> list[FieldError]:
    """Why the policy cannot be rendered for its connector at all; the policy is then not
    accepted."""
    engine = policy.spec.engine
    if engine.type is not EngineType.VLLM:
        return [
            FieldError.unsupported("spec.engine.type", engine.type.value, [EngineType.VLLM.value])
        ]
    other = _OTHERS.get(engine.connector)
    return other.impossible(policy.spec) if other is not None else []


def gaps(policy: KVTierPolicy) -> list[FieldError]:
    """What the policy sets and the connector's own configuration cannot say, field by field. Such a policy is used all
    the same, and its ``Accepted`` condition lists them.
    """
    other = _OTHERS.get(policy.spec.engine.connector)
    return unexpressed(policy.spec, other.expressed, other.name) if other is not None else []


def render(policy: KVTierPolicy, tier_paths: dict[str, str], local_ranks: int) -> Rendered:
    """The configuration. ``tier_paths``: where the engine's container mounts each file tier; ``local_ranks``: worker
    ranks in the pod. Raises ``ConfigurationError`` for what ``impossible`` names, and for KVTier's
    own connector.
    """
    errors = impossible(policy)
    if errors:
        raise InvalidDocumentError(errors)
    other = _OTHERS.get(policy.spec.engine.connector)
    if other is None:
        raise ConfigurationError(
            "spec.engine.connector",
            policy.spec.engine.connector.value,
            "Offloading or LMCache here",
        )
    return other.render(policy.spec, tier_paths, local_ranks)
