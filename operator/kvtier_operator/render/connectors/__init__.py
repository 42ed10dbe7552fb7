"""Engine configuration of other connectors (``engine.connector: Offloading | LMCache``). Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.errors import ConfigurationError
from kvtier_operator.api.engine import Connector, Delivery, EngineType
from kvtier_operator.api.policy import KVTierPolicy, PolicySpec
from kvtier_operator.api.validation import FieldError, InvalidDocumentError
from kvtier_operator.render.connectors import lmcache, offloading
from kvtier_operator.render.connectors.base import (
    TRANSFER_CONFIG_VARIABLE,
    Rendered,
    SupportedFields,
    unsupported_fields_of,
)

__all__ = ["TRANSFER_CONFIG_VARIABLE", "Rendered", "policy_errors", "render", "unsupported_fields"]


@dataclass(frozen=True, slots=True)
class _Connector:
    name: str
    supported: SupportedFields
    policy_errors: Callable[[PolicySpec], list[FieldError]]
    render: Callable[[PolicySpec, dict[str, str], int], Rendered]


_CONNECTORS = {
    Connector.OFFLOADING: _Connector(
        offloading.NAME, offloading.SUPPORTED, offloading.policy_errors, offloading.render
    ),
    Connector.LMCACHE: _Connector(
        lmcache.NAME, lmcache.SUPPORTED, lmcache.policy_errors, lmcache.render
    ),
}


def policy_errors(policy: KVTierPolicy) -> list[FieldError]:
    """Why the policy cannot be rendered for its connector. Such a policy is invalid."""
    engine = policy.spec.engine
    if engine.type is EngineType.ATOM:
        return _atom_errors(policy.spec)
    connector = _CONNECTORS.get(engine.connector)
    return connector.policy_errors(policy.spec) if connector is not None else []


def _atom_errors(spec: PolicySpec) -> list[FieldError]:
    """ATOM has KVTier's connector only, and finds it through the payload."""
    engine = spec.engine
    errors = []
    if engine.connector is not Connector.KVTIER:
        errors.append(
            FieldError.unsupported(
                "spec.engine.connector", engine.connector.value, [Connector.KVTIER.value]
            )
        )
    if engine.delivery is Delivery.IMAGE:
        supported = [Delivery.INIT_CONTAINER.value, Delivery.IMAGE_VOLUME.value]
        errors.append(
            FieldError.unsupported("spec.engine.delivery", engine.delivery.value, supported)
        )
    return errors


def unsupported_fields(policy: KVTierPolicy) -> list[FieldError]:
    """Fields that the policy sets and the connector's configuration does not support. The policy is
    valid, and its ``Accepted`` condition lists them.
    """
    connector = _CONNECTORS.get(policy.spec.engine.connector)
    return (
        unsupported_fields_of(policy.spec, connector.supported, connector.name)
        if connector is not None
        else []
    )


def render(policy: KVTierPolicy, tier_paths: dict[str, str], local_ranks: int) -> Rendered:
    """The configuration. ``tier_paths``: where the engine's container mounts each file tier;
    ``local_ranks``: worker ranks in the pod. Raises ``ConfigurationError`` for what
    ``policy_errors`` names, and for KVTier's own connector.
    """
    errors = policy_errors(policy)
    if errors:
        raise InvalidDocumentError(errors)
    connector = _CONNECTORS.get(policy.spec.engine.connector)
    if connector is None:
        raise ConfigurationError(
            "spec.engine.connector",
            policy.spec.engine.connector.value,
            "must be Offloading or LMCache",
        )
    return connector.render(policy.spec, tier_paths, local_ranks)
