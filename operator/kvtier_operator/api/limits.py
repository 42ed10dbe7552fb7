"""LimitRanges and ResourceQuotas, decoded into the fields that KVTier reads. See ``api.pods``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvtier_operator.api.pods import ApiObject, LocalObjectReference, ResourceList, decode


class LimitRangeItem(ApiObject, frozen=True):
    """Bounds for objects of one type: ``Container``, ``Pod`` or ``PersistentVolumeClaim``."""

    type: str = ""
    min: ResourceList = msgspec.field(default_factory=dict)
    max: ResourceList = msgspec.field(default_factory=dict)
    default: ResourceList = msgspec.field(default_factory=dict)
    default_request: ResourceList = msgspec.field(default_factory=dict)
    max_limit_request_ratio: ResourceList = msgspec.field(default_factory=dict)


class LimitRangeSpec(ApiObject, frozen=True):
    """``spec`` of a LimitRange."""

    limits: tuple[LimitRangeItem, ...] = ()


class LimitRange(ApiObject, frozen=True):
    """Bounds of a namespace for each object."""

    metadata: LocalObjectReference = LocalObjectReference()
    spec: LimitRangeSpec = LimitRangeSpec()


class QuotaScope(ApiObject, frozen=True):
    """Restricts a quota to some pods."""

    scope_name: str = ""
    operator: str = "Exists"
    values: tuple[str, ...] = ()


class ScopeSelector(ApiObject, frozen=True):
    """Scopes, all of which must match."""

    match_expressions: tuple[QuotaScope, ...] = ()


class ResourceQuotaSpec(ApiObject, frozen=True):
    """``spec`` of a ResourceQuota."""

    hard: ResourceList = msgspec.field(default_factory=dict)
    scopes: tuple[str, ...] = ()
    scope_selector: ScopeSelector = ScopeSelector()

    @property
    def all_scopes(self) -> tuple[QuotaScope, ...]:
        """Of both fields."""
        named = (QuotaScope(scope_name=name) for name in self.scopes)
        return (*named, *self.scope_selector.match_expressions)


class ResourceQuotaStatus(ApiObject, frozen=True):
    """``status`` of a ResourceQuota."""

    hard: ResourceList = msgspec.field(default_factory=dict)
    used: ResourceList = msgspec.field(default_factory=dict)


class ResourceQuota(ApiObject, frozen=True):
    """Bounds of a namespace for all its objects together."""

    metadata: LocalObjectReference = LocalObjectReference()
    spec: ResourceQuotaSpec = ResourceQuotaSpec()
    status: ResourceQuotaStatus = ResourceQuotaStatus()


def decode_limit_range(document: Mapping[str, Any]) -> LimitRange:
    """Raises ``InvalidObjectError``."""
    return decode(document, LimitRange)


def decode_quota(document: Mapping[str, Any]) -> ResourceQuota:
    """Raises ``InvalidObjectError``."""
    return decode(document, ResourceQuota)
