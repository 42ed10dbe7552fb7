"""Whom objects belong to, and how much each tenant holds.

A tenant is known by a digest of 8 bytes. What it is made of, such as a request's ``cache_salt``,
appears nowhere else: in no message to tierd, no log, no metric and no file.
"""

from __future__ import annotations

from kvtier.hashing import blake3_digest, derived_key, keyed_digest

TENANT_BYTES = 8
NO_TENANT = b""
"""The tenant of objects that belong to none."""
OTHERS = b"\xff" * TENANT_BYTES
"""The account that tenants beyond ``MAX_TENANTS`` share."""
MAX_TENANTS = 4_096
"""Tenants with an account of their own in one tier: about a megabyte."""
UNLIMITED = 1 << 62
_CONTEXT = "kvtier tenant 1"


def tenant_id(name: str, kind: str, isolation_salt: str = "") -> bytes:
    """The digest of a tenant. ``kind``: what ``name`` is, such as ``CacheSalt``. Tenants of
    policies with different ``isolation_salt`` are different ones."""
    key = derived_key(blake3_digest(isolation_salt.encode()), _CONTEXT)
    digest = keyed_digest(key, f"{kind}\0".encode(), name.encode("utf-8", "surrogatepass"))
    found = digest[:TENANT_BYTES]
    # No tenant can be taken for none, or for the shared account.
    return found if found not in (OTHERS, bytes(TENANT_BYTES)) else b"\1" * TENANT_BYTES


def is_tenant(value: object) -> bool:
    """Whether a value can be a tenant, or none."""
    if not isinstance(value, bytes) or value == OTHERS:
        return False
    return not value or (len(value) == TENANT_BYTES and any(value))


class TenantAccounts:
    """What each tenant holds in one tier. Not thread-safe.

    ``held``: bytes of each tenant that holds something, without ``NO_TENANT``. ``over``: tenants
    that hold more than their share, in the order in which that happened.
    """

    def __init__(self) -> None:
        self.held: dict[bytes, int] = {}
        self.over: dict[bytes, None] = {}
        self._limit_bytes = UNLIMITED

    @property
    def limit_bytes(self) -> int:
        """What one tenant may hold; ``UNLIMITED`` without a limit."""
        return self._limit_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """Changes what one tenant may hold."""
        self._limit_bytes = limit_bytes
        self.over = {tenant: None for tenant, held in self.held.items() if held > limit_bytes}

    def account_of(self, tenant: bytes) -> bytes:
        """The account that new objects of a tenant belong to."""
        if not tenant or tenant in self.held or len(self.held) < MAX_TENANTS:
            return tenant
        return OTHERS

    def add(self, account: bytes, size_bytes: int) -> None:
        """A tenant holds more."""
        if not account or not size_bytes:
            return
        held = self.held[account] = self.held.get(account, 0) + size_bytes
        if held > self._limit_bytes:
            self.over.setdefault(account)

    def remove(self, account: bytes, size_bytes: int) -> None:
        """A tenant holds less."""
        if not account or not size_bytes:
            return
        held = self.held[account] - size_bytes
        if held <= self._limit_bytes:
            self.over.pop(account, None)
        if held:
            self.held[account] = held
        else:
            del self.held[account]

    def room(self, account: bytes) -> int:
        """Bytes that a tenant may still add; below 0 if it holds more than its share."""
        if not account or self._limit_bytes == UNLIMITED:
            return UNLIMITED
        return self._limit_bytes - self.held.get(account, 0)


def share_bytes(capacity_bytes: int, max_percent: int) -> int:
    """What one tenant may hold of a tier; ``UNLIMITED`` for 100 percent."""
    return UNLIMITED if max_percent >= 100 else capacity_bytes * max_percent // 100
