"""Accepted, StorageReady and Ready on a real API server: every reason, with its message."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support import controllers
from tests.support.controllers import (
    condition,
    file_tier,
    policy,
    running,
    settings,
    settled,
    until,
)

from kvtier_operator.kube.client import ApiClient, connect
from kvtier_operator.kube.resources import CLAIMS, CONFIG_MAPS, POLICIES, VOLUMES

NFS = {"nfs": {"server": "nas.example", "path": "/kv/chat"}}
EXPORTS = [{"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/kv"}}]
NOTHING_CREATED = "No object is created for a policy that is not accepted."


@pytest.fixture(scope="session")
def cluster(kubernetes_cluster: Any) -> Any:
    async def prepare() -> None:
        async with connect(kubernetes_cluster.kubeconfig, kubernetes_cluster.context) as client:
            await controllers.install_definition(client)

    asyncio.run(prepare())
    return kubernetes_cluster


@dataclass(frozen=True)
class Case:
    """A policy, settings and claims, and the expected conditions. ``NS`` and ``CLAIM`` are
    placeholders in messages.
    """

    name: str
    expected: dict[str, tuple[str, str, str]]
    tiers: Sequence[dict[str, Any]] = ()
    spec: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    claim: dict[str, Any] | None = None
    phase: str = ""


def _claimed(sharing: str = "Cluster") -> dict[str, Any]:
    return file_tier("disk", {"persistentVolumeClaim": {"claimName": "mine"}}, sharing)


MISSING_CLAIM = (
    "tier shared: claim NS/CLAIM does not exist; the operator may not create volumes "
    "(storage.createVolumes); ask an administrator to create a PersistentVolume for "
    "nas.example:/kv/chat and this claim"
)
HOST_PATH = (
    'spec.tiers[1].fileSystem.volume.hostPath.path: Forbidden: hostPath "/mnt/kv" is not allowed: '
    'allowedVolumes has no hostPath entry for namespace "NS"'
)
ACCEPTED = ("True", "Accepted", "The policy is valid.")
CASES = [
    Case(
        "accepted without claims",
        {"Accepted": ACCEPTED, "StorageReady": ("True", "NoClaims", "No tier needs a claim.")},
    ),
    Case(
        "a hostPath that is not allowed",
        {
            "Accepted": (
                "False",
                "VolumeNotAllowed",
                HOST_PATH,
            ),
            "StorageReady": ("False", "NotAccepted", NOTHING_CREATED),
            "Ready": (
                "False",
                "VolumeNotAllowed",
                f"Accepted: {HOST_PATH}",
            ),
        },
        tiers=[file_tier("disk", {"hostPath": {"path": "/mnt/kv"}}, "Node")],
    ),
    Case(
        "an export that is not allowed",
        {
            "Accepted": (
                "False",
                "VolumeNotAllowed",
                "spec.tiers[1].fileSystem.volume.nfs: Forbidden: "
                'NFS export "nas.example:/kvx" is not '
                "allowed: allowedVolumes has only nas.example:/kv and below for namespace "
                '"NS"',
            ),
        },
        tiers=[file_tier("shared", {"nfs": {"server": "nas.example", "path": "/kvx"}})],
        sections={"allowedVolumes": EXPORTS, "storage": {"createVolumes": True}},
    ),
    Case(
        "an engine with a connector that it does not have",
        {
            "Accepted": (
                "False",
                "Unsupported",
                'spec.engine.connector: Unsupported value: "LMCache": supported values: "KVTier"',
            ),
        },
        spec={"engine": {"type": "ATOM", "connector": "LMCache"}},
    ),
    Case(
        "fields that another connector has no equivalent of",
        {
            "Accepted": (
                "True",
                "PartlyExpressed",
                "spec.minLoadTokens: Forbidden: vLLM's offloading has no such setting",
            )
        },
        spec={"engine": {"connector": "Offloading"}, "minLoadTokens": 640},
    ),
    Case(
        "another connector with all fields",
        {"Accepted": ACCEPTED},
        spec={"engine": {"connector": "Offloading"}},
    ),
    Case(
        "an export without the permission to create volumes",
        {
            "Accepted": ACCEPTED,
            "StorageReady": (
                "False",
                "ClaimMissing",
                MISSING_CLAIM,
            ),
            "Ready": (
                "False",
                "ClaimMissing",
                f"StorageReady: {MISSING_CLAIM}",
            ),
        },
        tiers=[file_tier("shared", NFS)],
        sections={"allowedVolumes": EXPORTS},
    ),
    Case(
        "a claim that waits for its volume",
        {"StorageReady": ("Unknown", "ClaimPending", "tier shared: claim NS/CLAIM is Pending")},
        tiers=[file_tier("shared", NFS)],
        sections={"allowedVolumes": EXPORTS, "storage": {"createVolumes": True}},
    ),
    Case(
        "a missing claim",
        {
            "StorageReady": (
                "False",
                "ClaimMissing",
                "tier disk: claim NS/mine does not exist; create it",
            )
        },
        tiers=[_claimed()],
    ),
    Case(
        "a bound claim",
        {"StorageReady": ("True", "Bound", "Every claim is bound: mine.")},
        tiers=[_claimed()],
        claim={"accessModes": ["ReadWriteMany"]},
        phase="Bound",
    ),
    Case(
        "a claim that only one node may mount",
        {
            "StorageReady": (
                "False",
                "ClaimNotShared",
                "tier disk: claim NS/mine has accessModes ReadWriteOnce; "
                "sharing: Cluster needs ReadWriteMany",
            )
        },
        tiers=[_claimed()],
        claim={"accessModes": ["ReadWriteOnce"]},
        phase="Bound",
    ),
    Case(
        "a claim that only one node may mount and sharing: Node",
        {"StorageReady": ("True", "Bound", "Every claim is bound: mine.")},
        tiers=[_claimed("Node")],
        claim={"accessModes": ["ReadWriteOnce"]},
        phase="Bound",
    ),
    Case(
        "a claim that has lost its volume",
        {
            "StorageReady": (
                "False",
                "ClaimLost",
                "tier disk: claim NS/mine has lost its volume pv-1",
            )
        },
        tiers=[_claimed()],
        claim={"accessModes": ["ReadWriteMany"], "volumeName": "pv-1"},
        phase="Lost",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conditions_have_reason_and_message(cluster: Any, case: Case) -> None:
    async def scenario() -> None:
        async with connect(cluster.kubeconfig, cluster.context) as client:
            namespace = await controllers.make_namespace(client, "conditions")
            if case.claim is not None:
                await _claim(client, namespace, case.claim, case.phase)
            await client.apply(POLICIES, policy(namespace, tiers=case.tiers, **case.spec))
            async with running(client, settings(namespace, **case.sections)) as controller:
                found = await settled(controller, client, namespace)
            claims = {
                tier["name"]: tier.get("claimName", "")
                for tier in found["status"].get("tiers") or ()
            }
            claim = claims.get("shared", "")
            for name, (status, reason, message) in case.expected.items():
                text = message.replace("NS", namespace).replace("CLAIM", claim)
                accepted = condition(found, name)
                assert (accepted["status"], accepted["reason"]) == (status, reason), accepted
                assert accepted["message"] == text
            await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())


async def _claim(client: ApiClient, namespace: str, spec: dict[str, Any], phase: str) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "mine", "namespace": namespace},
        "spec": {"resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "", **spec},
    }
    await client.create(CLAIMS, namespace, body)
    # What the volume controller would say.
    await client.patch(
        CLAIMS, namespace, "mine", {"status": {"phase": phase}}, subresource="status"
    )


def test_a_terminating_claim_is_not_ready_and_nothing_is_applied_to_it(
    cluster: Any,
) -> None:
    async def scenario() -> None:
        async with connect(cluster.kubeconfig, cluster.context) as client:
            namespace = await controllers.make_namespace(client, "leaving")
            chosen = settings(namespace, allowedVolumes=EXPORTS, storage={"createVolumes": True})
            await client.apply(POLICIES, policy(namespace, tiers=[file_tier("shared", NFS)]))
            async with running(client, chosen) as controller:
                await settled(controller, client, namespace)
                (claim,) = await client.list(CLAIMS, namespace)
                name = claim["metadata"]["name"]
                # Protected by a finalizer, as a claim that a pod mounts, it stays.
                await client.delete(CLAIMS, namespace, name, uid=claim["metadata"]["uid"])
                await client.patch(
                    CLAIMS,
                    namespace,
                    name,
                    {"metadata": {"labels": {"kvtier.io/tier": "tampered"}}},
                )

                async def accepted() -> Any:
                    found = condition(await settled(controller, client, namespace), "StorageReady")
                    return found if found["reason"] == "ClaimTerminating" else None

                assert await until("it is accepted", accepted) == {
                    "status": "False",
                    "reason": "ClaimTerminating",
                    "message": f"tier shared: claim {namespace}/{name} is being deleted; "
                    "it is recreated once no pod uses it",
                }
                held = await client.get(CLAIMS, namespace, name)
                assert held["metadata"]["labels"]["kvtier.io/tier"] == "tampered"
                await client.patch(CLAIMS, namespace, name, {"metadata": {"finalizers": None}})

                async def recreated() -> bool:
                    claims = await client.list(CLAIMS, namespace)
                    return bool(claims) and claims[0]["metadata"]["uid"] != claim["metadata"]["uid"]

                await until("the claim is recreated", recreated)
            await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())


def test_a_changed_allow_list_changes_accepted_and_deletes_nothing(
    cluster: Any,
) -> None:
    async def scenario() -> None:
        async with connect(cluster.kubeconfig, cluster.context) as client:
            namespace = await controllers.make_namespace(client, "allowed")
            await client.apply(POLICIES, policy(namespace, tiers=[file_tier("shared", NFS)]))
            allowing = settings(namespace, allowedVolumes=EXPORTS, storage={"createVolumes": True})
            refusing = settings(namespace, storage={"createVolumes": True})
            async with running(client, refusing) as controller:
                found = await settled(controller, client, namespace)
                assert condition(found, "Accepted")["reason"] == "VolumeNotAllowed"
                assert not await client.list(CLAIMS, namespace)
                assert not await client.list(CONFIG_MAPS, namespace, labels="kvtier.io/policy")
            async with running(client, allowing) as controller:

                async def accepted() -> bool:
                    found = await settled(controller, client, namespace)
                    return condition(found, "Accepted")["status"] == "True"

                await until("it is accepted", accepted)
                (claim,) = await client.list(CLAIMS, namespace)
            async with running(client, refusing) as controller:

                async def refused() -> bool:
                    found = await settled(controller, client, namespace)
                    return condition(found, "Accepted")["status"] == "False"

                await until("it is refused", refused)
            (same,) = await client.list(CLAIMS, namespace)
            assert same["metadata"]["uid"] == claim["metadata"]["uid"]
            assert "deletionTimestamp" not in same["metadata"]
            assert await client.get(VOLUMES, None, claim["spec"]["volumeName"])
            await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())


def test_a_definition_of_a_later_release_disarms_no_policy_and_its_values_are_reported(
    cluster: Any,
) -> None:
    """As after a downgrade: the API server holds fields and values that this operator does not
    know. A field is ignored and named; a value makes the policy invalid, which keeps its objects.
    """

    async def scenario() -> None:
        async with connect(cluster.kubeconfig, cluster.context) as client:
            namespace = await controllers.make_namespace(client, "later")
            await client.apply(POLICIES, policy(namespace))
            async with running(client, settings(namespace)) as controller:
                await settled(controller, client, namespace)
            found = await client.get(controllers.DEFINITIONS, None, "kvtierpolicies.kvtier.io")
            schema = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
            spec = schema["properties"]["spec"]["properties"]
            spec["later"] = {"type": "string", "default": "x"}
            spec["selection"]["enum"].append("Fastest")
            try:
                changed = {"spec": {"versions": found["spec"]["versions"]}}
                await client.patch(
                    controllers.DEFINITIONS, None, "kvtierpolicies.kvtier.io", changed
                )

                async def taken() -> bool:
                    body = {"spec": {"minLoadTokens": 9}}
                    answer = await client.patch(POLICIES, namespace, "chat", body)
                    return answer["spec"].get("later") == "x"

                await until("the API server sets the field", taken)
                async with running(client, settings(namespace)) as controller:
                    found = await settled(controller, client, namespace)
                    assert condition(found, "Accepted") == {
                        "status": "True",
                        "reason": "NotEnforced",
                        "message": "spec.later: has no effect: this version of the operator does "
                        "not know the field",
                    }
                    live = await client.get(CONFIG_MAPS, namespace, "chat-live")
                    assert '"minLoadTokens": 9' in live["data"]["live.json"]
                    body = {"spec": {"selection": "Fastest", "minLoadTokens": 10}}
                    await client.patch(POLICIES, namespace, "chat", body)

                    async def invalid() -> Any:
                        held = condition(await settled(controller, client, namespace), "Accepted")
                        return held if held["reason"] == "Invalid" else None

                    assert await until("it is invalid", invalid) == {
                        "status": "False",
                        "reason": "Invalid",
                        "message": 'spec.selection: Unsupported value: "Fastest": supported '
                        'values: "Cost", "Weighted"',
                    }
                    live = await client.get(CONFIG_MAPS, namespace, "chat-live")
                    assert '"minLoadTokens": 9' in live["data"]["live.json"]
            finally:
                await controllers.install_definition(client)
            await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())


def test_a_policy_whose_structure_is_too_long_for_an_annotation_is_not_accepted(
    cluster: Any,
) -> None:
    async def scenario() -> None:
        async with connect(cluster.kubeconfig, cluster.context) as client:
            namespace = await controllers.make_namespace(client, "long")
            url = "redis://" + "x" * 1900 + ":6379"
            tiers = [
                {"name": f"remote-{number}", "lmcache": {"url": url, "capacity": "1Ti"}}
                for number in range(7)
            ]
            await client.apply(POLICIES, policy(namespace, tiers=tiers))
            async with running(client, settings(namespace)) as controller:
                found = await settled(controller, client, namespace)
            accepted = condition(found, "Accepted")
            assert (accepted["status"], accepted["reason"]) == ("False", "TooLarge")
            words = re.fullmatch(
                r"spec: Too long: the structural document may have at most 16384 bytes and has "
                r"(\d+); shorten URLs, paths and mount options",
                accepted["message"],
            )
            assert words is not None, accepted["message"]
            assert int(words[1]) > 16384
            assert condition(found, "StorageReady")["message"] == NOTHING_CREATED
            assert condition(found, "Ready")["message"] == f"Accepted: {accepted['message']}"
            await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())


def test_transition_times_change_with_the_status_of_a_condition_only(cluster: Any) -> None:
    async def scenario() -> None:
        async with connect(cluster.kubeconfig, cluster.context) as client:
            namespace = await controllers.make_namespace(client, "times")
            await client.apply(POLICIES, policy(namespace))

            def times(found: Any) -> dict[str, str]:
                return {
                    each["type"]: each["lastTransitionTime"]
                    for each in found["status"]["conditions"]
                }

            async with running(client, settings(namespace)) as controller:
                first = times(await settled(controller, client, namespace))
                await asyncio.sleep(1.1)  # times have seconds
                tiers = policy(namespace, tiers=[_claimed()])["spec"]["tiers"]
                await client.patch(POLICIES, namespace, "chat", {"spec": {"tiers": tiers}})

                async def changed() -> Any:
                    found = await settled(controller, client, namespace)
                    return found if condition(found, "StorageReady")["status"] == "False" else None

                second = times(await until("storage is missing", changed))
            assert second["Accepted"] == first["Accepted"]
            assert second["StorageReady"] > first["StorageReady"]
            await controllers.drop_namespace(client, namespace)

    asyncio.run(scenario())
