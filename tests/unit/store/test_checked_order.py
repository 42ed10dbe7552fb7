"""The checks of the eviction order accept what the order may do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
from tests.support.checked_order import CheckedOrder

from kvtier.store.memory_tier import LruPolicy


@dataclass(eq=False)
class _Object:
    key: bytes
    previous: bytes = b""
    namespace: str = "n"
    account: bytes = b""


def checked() -> CheckedOrder:
    inner = LruPolicy[Any, Any](
        lambda each: (each.namespace, each.key),
        lambda each: (each.namespace, each.previous) if each.previous else None,
        tenant=lambda each: each.account,
    )
    return CheckedOrder(inner)


@pytest.mark.parametrize("tenant", [b"", b"t"])
def test_of_objects_that_follow_one_another_in_a_ring_one_is_an_end(tenant: bytes) -> None:
    order = checked()
    ring = [
        _Object(bytes([each]), bytes([each - 1]).strip(b"\0"), "n", tenant) for each in (1, 2, 3)
    ]
    other = _Object(b"other")
    for each in (*ring, other):
        order.admit(cast(Any, each))
    ring[0].previous = ring[-1].key
    order.follow(cast(Any, ring[0]))
    if tenant:
        assert order.next_of(tenant) is cast(Any, ring[-1])
    found = [order.victim() for _ in range(4)]
    assert found == [*reversed(ring), other]
    assert order.victim() is None
