"""Requests name their tenant, and what they ask for their objects, in messages to tierd."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.scheduler.scheduler_testbed import RAM, FakeRequest, SchedulerTestbed, topology

from kvtier.config.models import HintSettings, Honour, TenantKind, TenantSettings
from kvtier.store.types import NO_OWNER, Owner
from kvtier.tenants import tenant_id
from kvtier.tierd.wire import Keep, LiveSettings, Load, Promote, Reserve, encode

SALT = "customer-17"
TENANT = tenant_id(SALT, "CacheSalt")


@pytest.fixture
def testbed() -> SchedulerTestbed:
    made = SchedulerTestbed()
    made.client.credit(32)
    return made


def configure(testbed: SchedulerTestbed, **values: Any) -> None:
    live = topology().live.model_copy(update=values)
    testbed.client.sink(LiveSettings(settings=live.model_dump_json(by_alias=True)))


def computed(
    testbed: SchedulerTestbed,
    name: str = "r",
    seed: int = 0,
    salt: str | None = None,
    **hints: object,
) -> FakeRequest:
    request = testbed.request(300, name, seed)
    request.cache_salt = salt
    request.kv_transfer_params = {f"kvtier.{hint}": value for hint, value in hints.items()}
    assert testbed.ask(request) == 0
    testbed.run({name: 300})
    request.append(1)
    return request


def test_stores_name_the_tenant_and_never_the_salt(testbed: SchedulerTestbed) -> None:
    computed(testbed, salt=SALT)
    assert len(testbed.build({"r": 1}).stores) == 4
    (message,) = testbed.client.take(Reserve)
    assert message.owners == ((4, Owner(TENANT)),)
    assert SALT.encode() not in encode(message)


def test_stores_of_several_requests_have_their_owners_in_order(testbed: SchedulerTestbed) -> None:
    computed(testbed, "first", 1)
    computed(testbed, "second", 2, SALT, pin=True, ttl_seconds=60)
    computed(testbed, "third", 3)
    testbed.build({"first": 1, "second": 1, "third": 1})
    messages = testbed.client.take(Reserve)
    named = [run for message in messages for run in message.owners]
    items = [len(message.items) for message in messages]
    assert sum(items) == 12
    assert (4, Owner(TENANT, pin=True, ttl_seconds=60)) in named
    assert all(owner in (NO_OWNER, Owner(TENANT, 0, True, 60)) for _, owner in named)


def test_without_salt_and_hints_messages_are_as_they_were(testbed: SchedulerTestbed) -> None:
    computed(testbed)
    testbed.build({"r": 1})
    assert testbed.client.take(Reserve)[0].owners == ()
    assert testbed.client.take(Keep) == []


def test_what_tiers_hold_already_is_kept_without_a_store(testbed: SchedulerTestbed) -> None:
    probe = testbed.request(300, "probe", 7)
    testbed.hold(probe.keys(0, 2), RAM)
    request = testbed.request(300, "r", 7)
    request.kv_transfer_params = {"kvtier.pin": True, "kvtier.skip_load": True}
    testbed.ask(request)
    testbed.run({"r": 300})
    request.append(1)
    testbed.build({"r": 1})
    (message,) = testbed.client.take(Keep)
    assert message.owner == Owner(pin=True)
    assert [bytes([group]) + key for group, key in message.keys] == probe.keys(0, 2)
    testbed.build({"r": 1})
    assert testbed.client.take(Keep) == [], "sent again at every step"


def test_loads_and_promotions_name_the_owner(testbed: SchedulerTestbed) -> None:
    request = testbed.request(600, "r", 9)
    request.cache_salt = SALT
    testbed.hold(request.keys(0, 6), 2)
    assert testbed.ask(request) is None
    (promote,) = testbed.client.take(Promote)
    assert promote.owner == Owner(TENANT)
    other = testbed.request(600, "other", 10)
    other.cache_salt = SALT
    testbed.hold(other.keys(0, 6), RAM)
    loaded = testbed.ask(other)
    assert loaded
    testbed.admit(other, 0, loaded)
    assert testbed.client.take(Load)[0].owner == Owner(TENANT)


def test_live_values_decide_who_is_a_tenant_and_what_hints_do(testbed: SchedulerTestbed) -> None:
    policy = topology().structural.policy
    configure(
        testbed,
        tenants=TenantSettings(by=TenantKind.POLICY),
        hints=HintSettings(default_retain_seconds=30),
    )
    computed(testbed, salt=SALT)
    testbed.build({"r": 1})
    expected = Owner(tenant_id(f"{policy.namespace}/{policy.name}", "Policy"), 30)
    assert testbed.client.take(Reserve)[0].owners == ((4, expected),)
    configure(testbed, hints=HintSettings(honour=Honour.DISABLED))
    computed(testbed, "second", 5, None, pin=True, retain=60)
    testbed.build({"second": 1})
    assert testbed.client.take(Reserve)[0].owners == ()


@pytest.mark.parametrize("salt", [None, "", 17, b"bytes"])
def test_what_is_no_salt_makes_no_tenant(testbed: SchedulerTestbed, salt: Any) -> None:
    computed(testbed, salt=salt)
    testbed.build({"r": 1})
    assert testbed.client.take(Reserve)[0].owners == ()
