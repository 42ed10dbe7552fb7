"""The fault wrapper injects exactly the fault that is set."""

import errno
import threading

import pytest
from tests.support.dict_tier import DictTier

from kvtier.errors import (
    TierCorruptError,
    TierError,
    TierMissError,
    TierNoSpaceError,
    TierUnavailableError,
)
from kvtier.testing.faulty_tier import OPERATIONS, FaultyTier, TierFault
from kvtier.testing.objects import buffer, make_object
from kvtier.tiers.base import ForwardingTier, Tier


@pytest.fixture
def tier() -> FaultyTier:
    tier = FaultyTier(DictTier())
    tier.write(*make_object(1))
    return tier


def test_a_fault_applies_only_to_its_operations(tier: FaultyTier) -> None:
    tier.set_fault(TierFault("unavailable", ("write",), after=1, times=1))
    tier.write(*make_object(2))
    with pytest.raises(TierUnavailableError):
        tier.write(*make_object(3))
    tier.write(*make_object(3))
    assert tier.usage().objects == 3


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("unavailable", TierUnavailableError),
        ("corrupt", TierCorruptError),
        ("vanished", TierMissError),
        ("no_space", TierNoSpaceError),
    ],
)
def test_each_kind_is_the_error_that_a_tier_raises(
    tier: FaultyTier, kind: str, error: type[TierError]
) -> None:
    ref, payload, meta = make_object(1)
    tier.set_fault(TierFault(kind))
    with pytest.raises(error):
        tier.read(ref, buffer(payload.nbytes))
    tier.set_fault(None)
    assert tier.read(ref, buffer(payload.nbytes)) == meta


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.EIO, TierUnavailableError),
        (errno.ENOSPC, TierNoSpaceError),
        (errno.ESTALE, TierUnavailableError),
    ],
)
def test_an_errno_is_mapped_as_in_the_file_tier(
    tier: FaultyTier, number: int, error: type[TierError]
) -> None:
    tier.set_fault(TierFault("errno", ("write",), number=number))
    with pytest.raises(error, match=errno.errorcode[number]):
        tier.write(*make_object(2))


def test_a_corrupt_read_leaves_wrong_bytes_in_memory(tier: FaultyTier) -> None:
    ref, payload, _ = make_object(1)
    into = buffer(payload.nbytes)
    into[:] = payload
    tier.set_fault(TierFault("corrupt"))
    with pytest.raises(TierCorruptError):
        tier.read(ref, into)
    assert into != payload


def test_latency_uses_the_given_sleep() -> None:
    slept: list[float] = []
    tier = FaultyTier(DictTier(), slept.append)
    tier.set_fault(TierFault("latency", OPERATIONS, seconds=0.25))
    tier.write(*make_object(1))
    tier.check()
    assert slept == [0.25, 0.25]


def test_setting_another_fault_releases_hanging_calls(tier: FaultyTier) -> None:
    ref, payload, meta = make_object(1)
    tier.set_fault(TierFault("hang"))
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(tier.read(ref, buffer(payload.nbytes))))
    thread.start()
    hung = threading.Event()
    while not tier.hanging and not hung.wait(0.001):
        continue
    assert results == []
    assert tier.contains(ref)
    tier.set_fault(None)
    thread.join(60)
    assert results == [meta]
    assert tier.hanging == 0


def test_closing_releases_hanging_calls(tier: FaultyTier) -> None:
    tier.set_fault(TierFault("hang", ("check",)))
    thread = threading.Thread(target=tier.check)
    thread.start()
    tier.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_wrapper_passes_on_every_method_of_a_tier() -> None:
    public = {name for name in vars(Tier) if not name.startswith("_")}
    assert public - vars(ForwardingTier).keys() == set()
