"""tierd takes the requests of an engine's queue from a message, and ends each one by its number."""

from __future__ import annotations

import pytest
from tests.unit.store.store_fixture import block_hash
from tests.unit.tierd.test_owner_messages import Tierd

from kvtier.store.types import MAX_QUEUED_REQUESTS
from kvtier.tierd.wire import Cancel, Prefetch, Queued


def ranks(tierd: Tierd) -> dict[int, int]:
    return {
        number: request.rank
        for (_, number), request in tierd.fixture.store._queued._requests.items()
    }


def test_the_requests_of_a_message_are_queued_in_its_order_until_they_are_cancelled() -> None:
    tierd = Tierd()
    tierd.send(Queued(requests=tuple((n, ((0, block_hash(n)),)) for n in (7, 5, 6))))
    tierd.send(Queued(requests=((4, ()),)))
    found = ranks(tierd)
    assert sorted(found, key=found.__getitem__) == [7, 5, 6, 4]
    tierd.send(Prefetch(promotion=8, keys=((0, block_hash(1)),), queued=4))
    for number in (8, 5, 4):
        tierd.send(Cancel(promotion=number))
    assert list(ranks(tierd)) == [7, 6]
    assert tierd.fixture.counted("late_cancels") == 0


@pytest.mark.parametrize("key", [b"", b"x" * 1_000, block_hash(1)])
def test_no_message_takes_more_than_its_bound(key: bytes) -> None:
    tierd = Tierd()
    number = range(1, 3 * MAX_QUEUED_REQUESTS)
    tierd.send(Queued(requests=tuple((each, ((0, key),) * 50) for each in number)))
    assert len(ranks(tierd)) == MAX_QUEUED_REQUESTS
    assert len(tierd.fixture.store._queued._awaited) == 1
    rejected = tierd.fixture.counted("queued_requests_rejected")
    assert rejected == len(number) - MAX_QUEUED_REQUESTS
    tierd.send(Queued(requests=((-1, ((300, key),)),)))
    assert tierd.fixture.counted("protocol_violations", "", "unknown_group") == 1
    tierd.fixture.store.close_engine("e", True)
    assert len(tierd.fixture.store._queued._awaited) == 0
