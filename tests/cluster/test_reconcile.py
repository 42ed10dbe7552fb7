"""The controller on a real API server: the objects of a policy over its life."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.support import controllers
from tests.support.api_faults import FaultyClient
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

from kvtier_operator.kube.client import ApiClient, connect
from kvtier_operator.kube.resources import (
    CLAIMS,
    CONFIG_MAPS,
    PODS,
    POLICIES,
    SECRETS,
    VOLUMES,
    ApiError,
)

NFS = {"nfs": {"server": "nas.example", "path": "/kv/chat"}}
ALLOWED = [{"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/kv"}}]
VOLUMES_ALLOWED = {"storage": {"createVolumes": True}, "allowedVolumes": ALLOWED}

Scenario = Callable[[ApiClient, str], Awaitable[None]]


@pytest.fixture(scope="session")
def reconciled(kubernetes_cluster: Any) -> Callable[[Scenario], None]:
    """Runs a scenario in a new namespace of a control plane without controllers."""
    return lambda scenario: asyncio.run(_run_scenario(kubernetes_cluster, scenario))


@pytest.fixture(scope="session")
def governed(full_cluster: Any) -> Callable[[Scenario], None]:
    """The same, where claims are bound and what has no owner is collected."""
    return lambda scenario: asyncio.run(_run_scenario(full_cluster, scenario))


async def _run_scenario(cluster: Any, scenario: Scenario) -> None:
    async with connect(cluster.kubeconfig, cluster.context) as client:
        await controllers.install_definition(client)
        namespace = await controllers.make_namespace(client, "reconcile")
        try:
            await scenario(client, namespace)
        finally:
            await controllers.drop_namespace(client, namespace)


async def _live(client: ApiClient, namespace: str, name: str = "chat-live") -> dict[str, Any]:
    found = await client.get(CONFIG_MAPS, namespace, name)
    document: dict[str, Any] = json.loads(found["data"]["live.json"])
    return document


async def _gone(client: ApiClient, kind: Any, namespace: str | None, name: str) -> bool:
    try:
        await client.get(kind, namespace, name)
    except ApiError as error:
        if error.status == 404:
            return True
        raise
    return False


def test_a_policy_gets_its_live_config_map_its_token_and_a_status(
    reconciled: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        await client.apply(POLICIES, policy(namespace, minLoadTokens=640))
        async with running(client, settings(namespace)) as controller:
            found = await settled(controller, client, namespace)
        live = await _live(client, namespace)
        assert (live["generation"], live["minLoadTokens"]) == (1, 640)
        assert found["status"]["liveGeneration"] == 1
        secret = await client.get(SECRETS, namespace, "chat-token")
        assert set(secret["data"]) == {"token"}
        for made in (secret, await client.get(CONFIG_MAPS, namespace, "chat-live")):
            (owner,) = made["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["name"], owner["uid"]) == (
                "KVTierPolicy",
                "chat",
                found["metadata"]["uid"],
            )
            assert "finalizers" not in made["metadata"]
        assert "finalizers" not in found["metadata"]

    reconciled(scenario)


def test_a_live_change_increments_the_generation_and_a_restart_does_not(
    reconciled: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        await client.apply(POLICIES, policy(namespace))
        async with running(client, settings(namespace)) as controller:
            await settled(controller, client, namespace)
            token = (await client.get(SECRETS, namespace, "chat-token"))["data"]
            await client.patch(POLICIES, namespace, "chat", {"spec": {"minLoadTokens": 1024}})
            found = await settled(controller, client, namespace)
        assert found["status"]["liveGeneration"] == 2
        before = await belongings(client, namespace)
        counting = FaultyClient(client)
        async with running(counting, settings(namespace)) as controller:
            await settled(controller, client, namespace)
        assert await belongings(client, namespace) == before
        assert (await client.get(SECRETS, namespace, "chat-token"))["data"] == token
        assert [str(call) for call in counting.calls] == [
            f"list KVTierPolicy {namespace}/",
            f"get Secret {namespace}/chat-token",
        ]

    reconciled(scenario)


def test_a_change_of_a_policy_costs_two_calls(
    reconciled: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        await client.apply(POLICIES, policy(namespace))
        counting = FaultyClient(client)
        async with running(counting, settings(namespace)) as controller:
            await settled(controller, client, namespace)
            for number, spec in enumerate(
                ({"minLoadTokens": 2048}, {"breaker": {"periodSeconds": 7}}), start=2
            ):
                counting.calls.clear()
                await client.patch(POLICIES, namespace, "chat", {"spec": spec})
                await settled(controller, client, namespace)
                assert [str(call) for call in counting.calls] == [
                    f"apply ConfigMap {namespace}/chat-live",
                    f"apply KVTierPolicy/status {namespace}/chat",
                ]
                assert (await _live(client, namespace))["generation"] == number

    reconciled(scenario)


def test_drift_is_repaired_and_counts_as_a_change_of_live_values(
    reconciled: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        await client.apply(POLICIES, policy(namespace))
        async with running(client, settings(namespace)) as controller:
            await settled(controller, client, namespace)
            tampered = json.dumps({**(await _live(client, namespace)), "minLoadTokens": 1})
            await client.patch(
                CONFIG_MAPS, namespace, "chat-live", {"data": {"live.json": tampered, "mine": "x"}}
            )

            async def repaired() -> bool:
                live = await _live(client, namespace)
                return (live["generation"], live["minLoadTokens"]) == (2, 512)

            await until("the live values are repaired", repaired)
            found = await client.get(CONFIG_MAPS, namespace, "chat-live")
            assert found["data"]["mine"] == "x", "what others added is theirs"
            await client.patch(
                CONFIG_MAPS, namespace, "chat-live", {"metadata": {"ownerReferences": None}}
            )

            async def owned() -> bool:
                owner = (await client.get(CONFIG_MAPS, namespace, "chat-live"))["metadata"].get(
                    "ownerReferences"
                )
                return bool(owner)

            await until("the owner is back", owned)
            metadata = (await client.get(CONFIG_MAPS, namespace, "chat-live"))["metadata"]
            await client.delete(CONFIG_MAPS, namespace, "chat-live", uid=metadata["uid"])

            async def back() -> bool:
                if await _gone(client, CONFIG_MAPS, namespace, "chat-live"):
                    return False
                return bool((await _live(client, namespace))["generation"] == 3)

            await until(
                "a deleted ConfigMap is recreated with a generation no engine has seen", back
            )

    reconciled(scenario)


def test_a_deleted_token_is_replaced_at_the_resync(
    reconciled: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        await client.apply(POLICIES, policy(namespace))
        quick = settings(namespace, controller={"resyncSeconds": 0.5})
        async with running(client, quick) as controller:
            await settled(controller, client, namespace)
            first = await client.get(SECRETS, namespace, "chat-token")
            await client.delete(SECRETS, namespace, "chat-token", uid=first["metadata"]["uid"])
            await until(
                "the token is back", lambda: _present(client, SECRETS, namespace, "chat-token")
            )
        assert (await client.get(SECRETS, namespace, "chat-token"))["data"] != first["data"]

    reconciled(scenario)


async def _present(client: ApiClient, kind: Any, namespace: str | None, name: str) -> bool:
    return not await _gone(client, kind, namespace, name)


def test_foreign_objects_of_the_same_name_are_not_changed(
    reconciled: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        for kind, name in ((CONFIG_MAPS, "chat-live"), (SECRETS, "chat-token")):
            body = {
                "apiVersion": "v1",
                "kind": kind.kind,
                "metadata": {"name": name, "namespace": namespace},
            }
            await client.create(kind, namespace, body)
        await client.apply(POLICIES, policy(namespace))
        async with running(client, settings(namespace)) as controller:
            found = await settled(controller, client, namespace)
        assert condition(found, "Accepted") == {
            "status": "True",
            "reason": "PartlyApplied",
            "message": f"ConfigMap {namespace}/chat-live: another ConfigMap has this name; "
            "rename or delete it, or rename the policy; "
            f"Secret {namespace}/chat-token: another Secret has this name; "
            "rename or delete it, or rename the policy",
        }
        assert "data" not in await client.get(CONFIG_MAPS, namespace, "chat-live")

    reconciled(scenario)


def test_of_two_policies_that_select_a_pod_the_older_governs_it(
    reconciled: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        selector = {"matchLabels": {"app": "shared"}}
        await client.apply(POLICIES, policy(namespace, "older", podSelector=selector))
        await asyncio.sleep(1.1)  # creation times have seconds
        await client.apply(POLICIES, policy(namespace, "newer", podSelector=selector))
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "p", "namespace": namespace, "labels": {"app": "shared"}},
            "spec": {"containers": [{"name": "main", "image": "none"}]},
        }
        async with running(client, settings(namespace)) as controller:
            await settled(controller, client, namespace, "older")
            await settled(controller, client, namespace, "newer")
            await _create_pod(client, namespace, body)
            index, cache = controller.enqueuer.index, controller.cache

            async def seen() -> bool:
                return bool(index.pods((namespace, "older"), cache).governed)

            await until("the pod is seen", seen)
            pods = index.pods((namespace, "newer"), cache)
            assert (pods.governed, pods.governed_by_others) == ((), ("older",))
            uid = (await client.get(POLICIES, namespace, "older"))["metadata"]["uid"]
            await client.delete(POLICIES, namespace, "older", uid=uid)

            async def taken_over() -> bool:
                return bool(index.pods((namespace, "newer"), cache).governed)

            await until("the younger one governs", taken_over)

    reconciled(scenario)


async def _create_pod(client: ApiClient, namespace: str, body: dict[str, Any]) -> None:
    async def made() -> bool:
        try:
            await client.create(PODS, namespace, body)
        except ApiError as error:
            # The namespace's default account comes from a controller, or, without one, never.
            if error.status != 403 or "serviceaccount" not in error.message.lower():
                raise
            account = {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": "default"},
            }
            await client.create(
                controllers.Kind("", "v1", "serviceaccounts", "ServiceAccount"), namespace, account
            )
            return False
        return True

    await until("a pod can be made", made)


def test_config_map_only_creates_both_documents_and_deletes_the_structural_one_afterwards(
    reconciled: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        await client.apply(POLICIES, policy(namespace, attach={"mode": "ConfigMapOnly"}))
        async with running(client, settings(namespace)) as controller:
            found = await settled(controller, client, namespace)
            structural = await client.get(CONFIG_MAPS, namespace, "chat-structural")
            document = json.loads(structural["data"]["structural.json"])
            assert document["contentHash"] == found["status"]["structuralHash"]
            assert document["policy"]["uid"] == found["metadata"]["uid"]
            await client.patch(POLICIES, namespace, "chat", {"spec": {"minLoadTokens": 99}})
            await settled(controller, client, namespace)
            again = await client.get(CONFIG_MAPS, namespace, "chat-structural")
            assert again["metadata"]["resourceVersion"] == structural["metadata"]["resourceVersion"]
            await client.patch(POLICIES, namespace, "chat", {"spec": {"chunkTokens": 512}})
            await settled(controller, client, namespace)
            changed = await client.get(CONFIG_MAPS, namespace, "chat-structural")
            assert json.loads(changed["data"]["structural.json"])["chunkTokens"] == 512
            await client.patch(
                POLICIES, namespace, "chat", {"spec": {"attach": {"mode": "Webhook"}}}
            )
            await settled(controller, client, namespace)
            assert await _gone(client, CONFIG_MAPS, namespace, "chat-structural")

    reconciled(scenario)


def test_a_claim_is_created_from_its_template_and_never_changed(
    governed: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        template = {
            "claimTemplate": {"storageClassName": "none-such", "accessModes": ["ReadWriteMany"]}
        }
        await client.apply(POLICIES, policy(namespace, tiers=[file_tier("disk", template)]))
        async with running(client, settings(namespace)) as controller:
            found = await settled(controller, client, namespace)
            (claim,) = await client.list(CLAIMS, namespace)
            name = claim["metadata"]["name"]
            assert claim["spec"]["resources"]["requests"]["storage"] == "10Gi"
            # The size comes from the tier's capacity, which is live; the claim's is not.
            tiers = [{**tier} for tier in found["spec"]["tiers"]]
            tiers[1]["fileSystem"] = {**tiers[1]["fileSystem"], "capacity": "20Gi"}
            await client.patch(POLICIES, namespace, "chat", {"spec": {"tiers": tiers}})
            await settled(controller, client, namespace)
            (same,) = await client.list(CLAIMS, namespace)
            assert same["spec"] == claim["spec"]
            await client.patch(
                CLAIMS, namespace, name, {"metadata": {"labels": {"kvtier.io/tier": None}}}
            )

            async def labelled() -> bool:
                (held,) = await client.list(CLAIMS, namespace)
                return bool(held["metadata"]["labels"].get("kvtier.io/tier") == "disk")

            await until("the label is back", labelled)
            # Another template is another claim; the first one goes once no pod mounts it.
            tiers[1]["fileSystem"] = {
                **tiers[1]["fileSystem"],
                "volume": {"claimTemplate": {"storageClassName": "other"}},
            }
            await client.patch(POLICIES, namespace, "chat", {"spec": {"tiers": tiers}})

            async def replaced() -> bool:
                names = [each["metadata"]["name"] for each in await client.list(CLAIMS, namespace)]
                return len(names) == 1 and names != [name]

            await until("the claim is another one", replaced)

    governed(scenario)


def test_a_mounted_claim_stays_until_its_pod_is_gone(
    governed: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        volume = {
            "claimTemplate": {"storageClassName": "none-such", "accessModes": ["ReadWriteMany"]}
        }
        await client.apply(POLICIES, policy(namespace, tiers=[file_tier("disk", volume)]))
        async with running(client, settings(namespace)) as controller:
            await settled(controller, client, namespace)
            (claim,) = await client.list(CLAIMS, namespace)
            name = claim["metadata"]["name"]
            body = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "p", "namespace": namespace, "labels": {"app": "chat"}},
                "spec": {
                    "containers": [{"name": "main", "image": "none"}],
                    "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": name}}],
                },
            }
            await _create_pod(client, namespace, body)

            async def seen() -> bool:
                return controller.cache.get(PODS, namespace, "p") is not None

            await until("the pod is seen", seen)
            await client.patch(
                POLICIES, namespace, "chat", {"spec": {"tiers": policy(namespace)["spec"]["tiers"]}}
            )
            await settled(controller, client, namespace)
            held = await client.get(CLAIMS, namespace, name)
            assert "deletionTimestamp" not in held["metadata"]
            pod = await client.get(PODS, namespace, "p")
            await client.delete(PODS, namespace, "p", uid=pod["metadata"]["uid"])
            await until("the claim is removed", lambda: _gone(client, CLAIMS, namespace, name))

    governed(scenario)


def test_an_export_gets_a_volume_and_a_claim_that_bind(
    governed: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        await client.apply(POLICIES, policy(namespace, tiers=[file_tier("shared", NFS)]))
        async with running(client, settings(namespace, **VOLUMES_ALLOWED)) as controller:

            async def bound() -> bool:
                found = await settled(controller, client, namespace)
                return condition(found, "StorageReady").get("status") == "True"

            await until("storage is ready", bound)
        (claim,) = await client.list(CLAIMS, namespace)
        volume = await client.get(VOLUMES, None, claim["spec"]["volumeName"])
        assert volume["spec"]["nfs"] == {"server": "nas.example", "path": "/kv/chat"}
        assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
        assert volume["spec"]["mountOptions"] == ["soft", "timeo=50", "retrans=2"]
        found = await client.get(POLICIES, namespace, "chat")
        assert condition(found, "StorageReady") == {
            "status": "True",
            "reason": "Bound",
            "message": f"Every claim is bound: {claim['metadata']['name']}.",
        }

    governed(scenario)


def test_a_recreated_policy_does_not_use_the_objects_of_its_predecessor(
    governed: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        body = policy(namespace, tiers=[file_tier("shared", NFS)])
        await client.apply(POLICIES, body)
        async with running(
            client, settings(namespace, **VOLUMES_ALLOWED, controller={"resyncSeconds": 1})
        ) as controller:

            async def bound() -> Any:
                found = await settled(controller, client, namespace)
                return found if condition(found, "StorageReady").get("status") == "True" else None

            first = await until("storage is ready", bound)
            (volume,) = [each for each in await client.list(VOLUMES) if _of(each, namespace)]
            token = (await client.get(SECRETS, namespace, "chat-token"))["data"]
            await client.delete(POLICIES, namespace, "chat", uid=first["metadata"]["uid"])
            await client.apply(POLICIES, body)
            second = await until("storage is ready again", bound)
            assert second["metadata"]["uid"] != first["metadata"]["uid"]
            await until(
                "the predecessor's volume is removed",
                lambda: _gone(client, VOLUMES, None, volume["metadata"]["name"]),
            )
            (other,) = [each for each in await client.list(VOLUMES) if _of(each, namespace)]
            assert other["spec"]["nfs"] == volume["spec"]["nfs"]

            async def renewed() -> bool:
                if await _gone(client, SECRETS, namespace, "chat-token"):
                    return False
                found = await client.get(SECRETS, namespace, "chat-token")
                owners = {owner["uid"] for owner in found["metadata"]["ownerReferences"]}
                return owners == {second["metadata"]["uid"]} and found["data"] != token

            await until("the token is another one", renewed)
            live = await client.get(CONFIG_MAPS, namespace, "chat-live")
            assert {owner["uid"] for owner in live["metadata"]["ownerReferences"]} == {
                second["metadata"]["uid"]
            }

    governed(scenario)


def _of(volume: Any, namespace: str) -> bool:
    return bool(volume["metadata"].get("labels", {}).get("kvtier.io/policy-namespace") == namespace)


def test_a_deleted_claim_is_recreated_and_binds(governed: Callable[[Scenario], None]) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        await client.apply(POLICIES, policy(namespace, tiers=[file_tier("shared", NFS)]))
        async with running(client, settings(namespace, **VOLUMES_ALLOWED)) as controller:

            async def bound() -> bool:
                found = await settled(controller, client, namespace)
                return condition(found, "StorageReady").get("status") == "True"

            await until("storage is ready", bound)
            (claim,) = await client.list(CLAIMS, namespace)
            await client.delete(
                CLAIMS, namespace, claim["metadata"]["name"], uid=claim["metadata"]["uid"]
            )

            async def another() -> bool:
                claims = await client.list(CLAIMS, namespace)
                return bool(
                    claims
                    and claims[0]["metadata"]["uid"] != claim["metadata"]["uid"]
                    and claims[0].get("status", {}).get("phase") == "Bound"
                )

            await until("another claim is bound", another)
            await until("storage is ready again", bound)

    governed(scenario)


def test_volumes_of_deleted_policies_are_removed_at_the_next_start(
    governed: Callable[[Scenario], None],
) -> None:
    async def scenario(client: ApiClient, namespace: str) -> None:
        await client.apply(POLICIES, policy(namespace, tiers=[file_tier("shared", NFS)]))
        chosen = settings(namespace, **VOLUMES_ALLOWED)
        async with running(client, chosen) as controller:
            found = await settled(controller, client, namespace)
        (volume,) = [each for each in await client.list(VOLUMES) if _of(each, namespace)]
        await client.delete(POLICIES, namespace, "chat", uid=found["metadata"]["uid"])

        async def claims_gone() -> bool:
            return not await client.list(CLAIMS, namespace)

        await until("the cluster has removed the claim", claims_gone)
        async with running(client, chosen):
            await until(
                "the volume is removed",
                lambda: _gone(client, VOLUMES, None, volume["metadata"]["name"]),
            )

    governed(scenario)
