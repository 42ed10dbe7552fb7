"""With faults (kills, rejections, delays, lost connections) the controller still converges."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from tests.support import controllers
from tests.support.api_faults import Call, Fault, FaultyClient, KilledError
from tests.support.controllers import (
    belongings,
    condition,
    file_tier,
    policy,
    running,
    settings,
    settled,
    until,
)
from tests.support.proxy import Proxy

from kvtier_operator.api.names import SKIPPED_ANNOTATION
from kvtier_operator.kube.client import ApiClient, Limits, connect, open_client
from kvtier_operator.kube.credentials import from_kubeconfig
from kvtier_operator.kube.resources import (
    CONFIG_MAPS,
    EVENTS,
    PODS,
    POLICIES,
    ApiError,
    Kind,
)

EXPORT = file_tier("shared", {"nfs": {"server": "nas.example", "path": "/kv/chat"}})
OTHER = file_tier("other", {"nfs": {"server": "nas.example", "path": "/kv/other"}})
SECTIONS = {
    "storage": {"createVolumes": True},
    "allowedVolumes": [
        {"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/kv"}}
    ],
}
BESIDE = 4
"""Scenarios that run concurrently."""


@pytest.fixture(scope="session")
def cluster(kubernetes_cluster: Any) -> Any:
    async def prepare() -> None:
        async with connect(kubernetes_cluster.kubeconfig, kubernetes_cluster.context) as client:
            await controllers.install_definition(client)

    asyncio.run(prepare())
    return kubernetes_cluster


async def _life(client: ApiClient, faults: dict[int, Fault]) -> tuple[dict[str, Any], list[Call]]:
    """A policy that is made and then changed in everything, and a pod that was left alone and is
    told about in an Event, while the controller meets the faults. Killed, it is started again.
    Returns what there is at the end, and the calls.
    """
    namespace = await controllers.make_namespace(client, "life")
    await _left_alone(client, namespace)
    chosen = settings(namespace, **SECTIONS)
    calls: list[Call] = []
    steps = [
        policy(namespace, tiers=[EXPORT], attach={"mode": "ConfigMapOnly"}),
        policy(namespace, tiers=[OTHER], attach={"mode": "Webhook"}, minLoadTokens=99),
    ]
    try:
        for body in steps:
            await client.apply(POLICIES, body)
            pending = {
                number - len(calls): fault
                for number, fault in faults.items()
                if number > len(calls)
            }
            while True:
                faulty = FaultyClient(client, pending)
                async with running(faulty, chosen) as controller:
                    await _settled_or_killed(controller, client, namespace, faulty)
                calls += faulty.calls
                if not faulty.dead:
                    break
                pending = {}
        return await belongings(client, namespace), calls
    finally:
        await controllers.drop_namespace(client, namespace)


async def _left_alone(client: ApiClient, namespace: str) -> None:
    accounts = Kind("", "v1", "serviceaccounts", "ServiceAccount")
    await client.create(
        accounts,
        namespace,
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}},
    )
    skipped = {
        "policy": "chat",
        "reason": "AlreadyConfigured",
        "message": "It has a configuration of its own.",
    }
    metadata = {
        "name": "pod",
        "labels": {"app": "chat"},
        "annotations": {SKIPPED_ANNOTATION: json.dumps(skipped)},
    }
    spec = {"containers": [{"name": "main", "image": "none"}]}
    await client.create(
        PODS, namespace, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    )


async def _settled_or_killed(
    controller: Any, client: ApiClient, namespace: str, faulty: FaultyClient
) -> None:
    resting = asyncio.ensure_future(settled(controller, client, namespace))
    while not resting.done() and not faulty.dead:
        await asyncio.wait({resting}, timeout=0.05)
    if faulty.dead:
        resting.cancel()
        await asyncio.gather(resting, return_exceptions=True)
    else:
        resting.result()


@pytest.fixture(scope="session")
def without_faults(cluster: Any) -> tuple[dict[str, Any], list[Call]]:
    async def scenario() -> tuple[dict[str, Any], list[Call]]:
        async with connect(cluster.kubeconfig, cluster.context) as client:
            return await _life(client, {})

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "fault",
    [fault for fault in Fault if fault is not Fault.FORBIDDEN],
    ids=lambda fault: fault.value,
)
def test_a_fault_in_any_call_leads_to_the_same_objects(
    cluster: Any, without_faults: tuple[dict[str, Any], list[Call]], fault: Fault
) -> None:
    """Each call in a policy's lifetime fails once. After a kill the operator restarts."""
    expected, calls = without_faults
    assert EVENTS in {call.kind for call in calls}
    if fault is Fault.SLOW:
        numbers = [list(range(1, len(calls) + 1))]
    else:
        numbers = [[number] for number in range(1, len(calls) + 1)]

    async def one(client: ApiClient, places: asyncio.Semaphore, struck: list[int]) -> None:
        async with places:
            found, made = await _life(client, dict.fromkeys(struck, fault))
            what = [str(call) for number, call in enumerate(made, start=1) if number in struck]
            assert found == expected, f"{fault} at {what}: {_difference(expected, found)}"

    async def scenario() -> None:
        places = asyncio.Semaphore(BESIDE)
        async with (
            connect(cluster.kubeconfig, cluster.context) as client,
            asyncio.TaskGroup() as group,
        ):
            for struck in numbers:
                group.create_task(one(client, places, struck))

    asyncio.run(scenario())


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    return json.dumps(
        {
            key: [expected.get(key), found.get(key)]
            for key in expected.keys() | found.keys()
            if expected.get(key) != found.get(key)
        }
    )


def test_two_concurrent_controllers_converge_to_the_same_objects(
    cluster: Any, without_faults: tuple[dict[str, Any], list[Call]]
) -> None:
    async def scenario() -> None:
        async with connect(cluster.kubeconfig, cluster.context) as client:
            namespace = await controllers.make_namespace(client, "two")
            await _left_alone(client, namespace)
            chosen = settings(namespace, **SECTIONS)
            left, right = FaultyClient(client), FaultyClient(client)
            async with running(left, chosen) as first, running(right, chosen) as second:
                for body in (
                    policy(namespace, tiers=[EXPORT], attach={"mode": "ConfigMapOnly"}),
                    policy(namespace, tiers=[OTHER], attach={"mode": "Webhook"}, minLoadTokens=99),
                ):
                    await client.apply(POLICIES, body)
                    await asyncio.gather(
                        settled(first, client, namespace), settled(second, client, namespace)
                    )
                await asyncio.sleep(0.5)
                count = len(left.calls) + len(right.calls)
                await asyncio.sleep(1.5)
                assert len(left.calls) + len(right.calls) == count, (
                    "they do not undo each other's work"
                )
                assert await belongings(client, namespace) == without_faults[0]
            await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())


def test_a_silently_dropped_connection_is_detected_and_the_controller_continues(
    cluster: Any,
) -> None:
    async def scenario() -> None:
        access = await from_kubeconfig(cluster.kubeconfig, cluster.context)
        async with (
            connect(cluster.kubeconfig, cluster.context) as client,
            Proxy(access.server) as proxy,
        ):
            namespace = await controllers.make_namespace(client, "silent")
            await client.apply(POLICIES, policy(namespace))
            limits = Limits(deadline_seconds=2, attempt_seconds=1)
            pace = replace(controllers.QUICK, inactivity_seconds=1.0, watch_seconds=30)
            async with (
                open_client(replace_server(access, proxy.server), limits) as through,
                running(through, settings(namespace), pace=pace) as controller,
            ):
                await settled(controller, client, namespace)
                proxy.fall_silent()
                await client.patch(POLICIES, namespace, "chat", {"spec": {"minLoadTokens": 77}})

                async def reported() -> bool:
                    return bool(controller.cache.problems(stale_seconds=1.0))

                await until("silence is a problem that readiness can show", reported)
                proxy.cut()
                proxy.speak()
                await settled(controller, client, namespace)
                assert not controller.cache.problems()
            live = json.loads(
                (await client.get(CONFIG_MAPS, namespace, "chat-live"))["data"]["live.json"]
            )
            assert live["minLoadTokens"] == 77
            await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())


def replace_server(access: Any, server: str) -> Any:
    access.configuration.host = server
    return access


def test_a_slow_api_server_delays_and_changes_nothing(
    cluster: Any, without_faults: tuple[dict[str, Any], list[Call]]
) -> None:
    async def scenario() -> None:
        access = await from_kubeconfig(cluster.kubeconfig, cluster.context)
        async with (
            connect(cluster.kubeconfig, cluster.context) as client,
            Proxy(access.server) as proxy,
        ):
            namespace = await controllers.make_namespace(client, "slow")
            await _left_alone(client, namespace)
            proxy.delay_seconds = 0.2
            async with (
                open_client(replace_server(access, proxy.server)) as through,
                running(through, settings(namespace, **SECTIONS)) as controller,
            ):
                for body in (
                    policy(namespace, tiers=[EXPORT], attach={"mode": "ConfigMapOnly"}),
                    policy(namespace, tiers=[OTHER], attach={"mode": "Webhook"}, minLoadTokens=99),
                ):
                    await client.apply(POLICIES, body)
                    await settled(controller, client, namespace)
            assert await belongings(client, namespace) == without_faults[0]
            await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())


def test_a_rejected_object_is_reported_and_retried(cluster: Any) -> None:
    async def scenario() -> None:
        async with connect(cluster.kubeconfig, cluster.context) as client:
            namespace = await controllers.make_namespace(client, "refused")
            await client.apply(POLICIES, policy(namespace, tiers=[EXPORT]))
            refusing = FaultyClient(client, every=_refuse_claims)
            async with running(refusing, settings(namespace, **SECTIONS)) as controller:
                found = await settled(controller, client, namespace)
                storage = condition(found, "StorageReady")
                assert (storage["status"], storage["reason"]) == ("False", "ApplyRefused")
                claim = next(
                    call.name
                    for call in refusing.calls
                    if call.verb == "apply" and "shared" in call.name
                )
                assert storage["message"].endswith(
                    "the API server rejected it: injected: apply PersistentVolumeClaim "
                    f"{namespace}/{claim.removeprefix(f'kvtier-{namespace}-')}"
                )
                assert condition(found, "Ready")["status"] == "False"
                assert condition(found, "Accepted")["status"] == "True"
                assert not await _missing(client, CONFIG_MAPS, namespace, "chat-live"), (
                    "the rest is applied"
                )
                refusing.every = lambda call: None
                controller.queue.add((namespace, "chat"))

                async def made() -> bool:
                    found = await settled(controller, client, namespace)
                    return condition(found, "StorageReady")["reason"] == "ClaimPending"

                await until("the claim is made once nothing is in the way", made)
            await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())


def test_a_policy_whose_live_values_are_not_written_is_not_ready(cluster: Any) -> None:
    async def scenario() -> None:
        async with connect(cluster.kubeconfig, cluster.context) as client:
            namespace = await controllers.make_namespace(client, "unwritten")
            await client.apply(POLICIES, policy(namespace))
            refusing = FaultyClient(client, every=_refuse_config_maps)
            async with running(refusing, settings(namespace, **SECTIONS)) as controller:
                found = await settled(controller, client, namespace)
                assert condition(found, "Ready") == {
                    "status": "False",
                    "reason": "PartlyApplied",
                    "message": "The live values are not written: ConfigMap "
                    f"{namespace}/chat-live: the API server rejected it: injected: apply "
                    f"ConfigMap {namespace}/chat-live",
                }
                refusing.every = lambda call: None
                controller.queue.add((namespace, "chat"))

                async def ready() -> bool:
                    found = await settled(controller, client, namespace)
                    return condition(found, "Ready")["status"] == "True"

                await until("the policy is ready once the values are written", ready)
            await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())


def _refuse_config_maps(call: Call) -> Fault | None:
    return Fault.FORBIDDEN if call.verb == "apply" and call.kind is CONFIG_MAPS else None


def _refuse_claims(call: Call) -> Fault | None:
    return (
        Fault.FORBIDDEN
        if call.verb == "apply" and call.kind.kind == "PersistentVolumeClaim"
        else None
    )


async def _missing(client: ApiClient, kind: Kind, namespace: str, name: str) -> bool:
    try:
        await client.get(kind, namespace, name)
    except ApiError as error:
        return error.status == 404
    return False


def test_a_killed_controller_does_not_count_as_settled(cluster: Any) -> None:
    async def scenario() -> None:
        async with connect(cluster.kubeconfig, cluster.context) as client:
            faulty = FaultyClient(client, {1: Fault.KILLED_BEFORE})
            with pytest.raises(KilledError):
                await faulty.get(POLICIES, "default", "none")
            with pytest.raises(KilledError):
                await faulty.get(POLICIES, "default", "none")
            assert len(faulty.calls) == 1

    asyncio.run(scenario())
