"""Whom the objects of a request belong to, and what it asks for them.

The tenant is a digest (``kvtier.tenants``); the salt that it is made of stays in the engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from kvtier.config.models import Honour, Live, Structural, TenantKind
from kvtier.engines.common.hints import NO_HINTS, RequestHints
from kvtier.store.types import MEMORY_BIT, NO_OWNER, Owner
from kvtier.tenants import NO_TENANT, tenant_id

MAX_KNOWN = 1_024
"""Salts whose digests are remembered."""


class Owners:
    """The owners of one engine's requests. The scheduler's thread only."""

    def __init__(self, structural: Structural) -> None:
        policy = structural.policy
        self._isolation_salt = structural.isolation.salt
        self._policy = self._digest(f"{policy.namespace}/{policy.name}", TenantKind.POLICY)
        self._known: OrderedDict[str, bytes] = OrderedDict()

    def _digest(self, name: str, kind: TenantKind) -> bytes:
        return tenant_id(name, kind.value, self._isolation_salt)

    def tenant(self, request: Any, kind: TenantKind) -> bytes:
        """The tenant of a request. One without ``cache_salt`` belongs to no tenant."""
        if kind is TenantKind.POLICY:
            return self._policy
        salt = getattr(request, "cache_salt", None)
        if not isinstance(salt, str) or not salt:
            return NO_TENANT
        found = self._known.get(salt)
        if found is None:
            found = self._known[salt] = self._digest(salt, TenantKind.CACHE_SALT)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return found

    def of(self, state: object, live: Live, tier_names: Sequence[str]) -> Owner:
        """The owner of a request with these live values. ``state``: what the engine's adapter knows
        of it, with ``request`` and ``hints`` where the engine has them. ``tier_names``: of all
        tiers, in order."""
        hints: RequestHints = getattr(state, "hints", NO_HINTS)
        if live.hints.honour is not Honour.ENABLED:
            hints = NO_HINTS
        retain = hints.retain_seconds or live.hints.default_retain_seconds
        tenant = self.tenant(getattr(state, "request", None), live.tenants.by)
        if not tenant and not retain and hints is NO_HINTS:
            return NO_OWNER
        tiers = 0
        if hints.skip_store or hints.invalid:
            # The request adds no secondary tier to those of objects that it loads.
            tiers = MEMORY_BIT
        elif hints.tiers is not None and not hints.tiers.issuperset(tier_names):
            for index, name in enumerate(tier_names):
                tiers |= MEMORY_BIT << index if name in hints.tiers else 0
            # No bit would mean all: then the live document has lost the tier meanwhile.
            tiers = tiers or MEMORY_BIT
        return Owner(tenant, retain, hints.pin, hints.ttl_seconds, tiers)
