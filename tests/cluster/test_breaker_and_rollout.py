"""The injection breaker, overdue pods and workload restarts on a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest
from tests.cluster.status_fixtures import (
    FakeTierdServer,
    StatusNamespace,
    run_story,
    running_controller,
)
from tests.support.controllers import condition, until
from tests.support.pods import status_document

from kvtier_operator.kube.resources import (
    DEPLOYMENTS,
    EVENTS,
    PODS,
    POLICIES,
    QUOTAS,
    REPLICA_SETS,
    ApiError,
    Object,
)

RunScenario = Callable[[Callable[[StatusNamespace], Awaitable[None]]], None]
SHORT = {"attach": {"startTimeoutSeconds": 10, "retrySeconds": 20}}
RESTARTING = {"rollout": {"strategy": "RestartWorkloads"}}


@pytest.fixture
def run(full_cluster: Any, full_api: Any, nodes: ModuleType) -> RunScenario:
    """Runs a scenario in a labelled namespace of its own."""
    return lambda scenario: run_story(scenario, full_cluster, full_api, nodes)


def test_a_failed_mount_is_detected_from_events_and_the_suspension_expires(
    run: RunScenario,
) -> None:
    async def scenario(where: StatusNamespace) -> None:
        async with running_controller(where):
            await where.policy(attach={"startTimeoutSeconds": 10, "retrySeconds": 10})
            written = (await where.until("Attached", "Unknown", "NoPods"))["status"][
                "structuralHash"
            ]
            volume = {"name": "kvtier-tier-nas", "nfs": {"server": "192.0.2.1", "path": "/kv"}}
            await where.deployment(where.injected(9, written, volumes=[volume]))
            (pod,) = await where.pods()
            name = pod["metadata"]["name"]
            await where.hold(name, "kvtier-payload", "PodInitializing")
            event = {
                "metadata": {"name": f"{name}.1"},
                "involvedObject": {
                    "kind": "Pod",
                    "namespace": where.namespace,
                    "name": name,
                    "uid": pod["metadata"]["uid"],
                },
                "type": "Warning",
                "reason": "FailedMount",
                "message": 'MountVolume.SetUp failed for volume "kvtier-tier-nas" : '
                "mount failed: exit status 32",
                "lastTimestamp": where.nodes.now(),
                "source": {"component": "kubelet"},
            }
            await where.client.create(EVENTS, where.namespace, event)
            found = await where.until("Attached", "False", "VolumeNotMounted")
            assert "kvtier-tier-nas cannot be mounted" in condition(found, "Attached")["message"]
            await where.client.patch(
                DEPLOYMENTS, where.namespace, "chat", {"spec": {"replicas": 0}}
            )
            await where.until("Attached", "Unknown", "NoPods", seconds=60)

    run(scenario)


def test_pods_that_a_quota_rejects_because_of_injection_suspend_their_owner(
    run: RunScenario,
) -> None:
    async def scenario(where: StatusNamespace) -> None:
        quota = {"metadata": {"name": "gold"}, "spec": {"hard": {"limits.memory": "1Gi"}}}
        await where.client.create(QUOTAS, where.namespace, quota)
        async with running_controller(where):
            await where.policy(**SHORT)
            written = (await where.until("Attached", "Unknown", "NoPods"))["status"][
                "structuralHash"
            ]
            pod = where.injected(9, written)
            for container in (*pod["spec"]["containers"], pod["spec"]["initContainers"][0]):
                container["resources"] = {"limits": {"memory": "64Mi"}}

            await where.deployment(pod)
            found = await where.until("Attached", "False", "Refused")
            (suspended,) = found["status"]["suspendedOwners"]
            assert (suspended["kind"], suspended["reason"]) == ("ReplicaSet", "Refused")
            assert "exceeded quota: gold" in condition(found, "Attached")["message"]

    run(scenario)


def test_an_unschedulable_pod_is_deleted_if_its_tiers_claim_is_the_cause(run: RunScenario) -> None:
    async def scenario(where: StatusNamespace) -> None:
        async with running_controller(where):
            await where.policy(**SHORT)
            written = (await where.until("Attached", "Unknown", "NoPods"))["status"][
                "structuralHash"
            ]
            volume = {"name": "kvtier-tier-nas", "persistentVolumeClaim": {"claimName": "gone"}}
            await where.deployment(where.injected(9, written, volumes=[volume]))
            found = await where.until("Attached", "False", "Unschedulable")
            assert (
                'persistentvolumeclaim "gone" not found' in condition(found, "Attached")["message"]
            )

    run(scenario)


def test_an_overdue_pod_is_reported_with_node_and_mount(
    run: RunScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier_operator.controller.pods import terminating

    monkeypatch.setattr(terminating, "OVERDUE_SECONDS", 2.0)

    async def scenario(where: StatusNamespace) -> None:
        volume = {"hostPath": {"path": "/mnt/disk"}}
        disk = {
            "name": "disk",
            "fileSystem": {"capacity": "64Mi", "sharing": "Node", "volume": volume},
        }
        allowed = {"allowedVolumes": [{"namespaces": ["*"], "hostPath": "/mnt"}]}
        async with FakeTierdServer() as tierd, running_controller(where, allowed):
            await where.policy(tiers=[disk])
            written = (await where.until("Attached", "Unknown", "NoPods"))["status"][
                "structuralHash"
            ]
            tierd.document = status_document(generation=1)
            pod = where.injected(
                tierd.port, written, volumes=[{"name": "kvtier-tier-disk", **volume}]
            )
            # With none at all, the API server would forget it at once.
            await where.deployment(pod, terminationGracePeriodSeconds=1)
            (found,) = await where.pods()
            name = found["metadata"]["name"]
            await where.run(name)
            await where.until("Attached", "True", "Attached")
            await where.client.delete(PODS, where.namespace, name, uid=found["metadata"]["uid"])
            await where.pods()
            status = await where.until("TiersHealthy", "False", "StuckTerminating")
            message = condition(status, "TiersHealthy")["message"]
            assert f"pod {name} on node {where.node} still exists" in message
            assert "hostPath /mnt/disk (tier disk)" in message
            told_about = {
                event["involvedObject"]["name"] for event in await where.events("StuckTerminating")
            }
            assert name in told_about
            await where.finish(name)
            await where.until("Attached", "False", "Starting")

    run(scenario)


async def replica_sets(where: StatusNamespace, name: str) -> list[Object]:
    found = await where.client.list(REPLICA_SETS, where.namespace)
    return [each for each in found if each["metadata"]["ownerReferences"][0]["name"] == name]


def test_outdated_deployments_are_restarted_one_at_a_time_and_once(run: RunScenario) -> None:
    async def scenario(where: StatusNamespace) -> None:
        async with FakeTierdServer() as tierd, running_controller(where):
            await where.policy()
            first = (await where.until("Attached", "Unknown", "NoPods"))["status"]["structuralHash"]
            for name in ("a", "b"):
                await where.deployment(where.injected(tierd.port, first), name=name)
            for pod in await where.pods(2):
                await where.run(pod["metadata"]["name"])
            await where.until("Ready", "True", "InForce")

            # A structural change alone restarts no workload.
            await where.policy(chunkTokens=512)
            found = await where.until("UpToDate", "False", "Outdated")
            second = found["status"]["structuralHash"]
            assert second != first
            assert found["status"]["pods"]["outdated"] == 2
            assert len(await replica_sets(where, "a")) == 1

            # With restarts enabled, the first is restarted and the second waits for it.
            await where.policy(chunkTokens=512, **RESTARTING)

            async def restarted(name: str) -> bool:
                return len(await replica_sets(where, name)) == 2

            await until("a has another ReplicaSet", lambda: restarted("a"))
            found = await where.until("UpToDate", "False", "RollingOut")
            assert "Deployment a" in condition(found, "UpToDate")["message"]
            assert condition(found, "Ready")["status"] == "True"
            await asyncio.sleep(1.0)
            assert len(await replica_sets(where, "b")) == 1

            # The fake kubelet runs every pod. The fake webhook injects the current structure.
            await roll(where, "a", second)
            await until("b has another ReplicaSet", lambda: restarted("b"))
            await roll(where, "b", second)
            await where.until("UpToDate", "True", "Current")
            for name in ("a", "b"):
                deployment = await where.client.get(DEPLOYMENTS, where.namespace, name)
                annotations = deployment["spec"]["template"]["metadata"]["annotations"]
                assert annotations["kvtier.io/restarted-for"] == second
                assert len(await replica_sets(where, name)) == 2
            assert len(await where.events("WorkloadRestarted")) == 2

    async def roll(where: StatusNamespace, name: str, structural_hash: str) -> None:
        """The new pod of a Deployment runs with another structure, and the old one ends."""
        sets = await replica_sets(where, name)
        marks = {
            each["metadata"]["uid"]: "kvtier.io/restarted-for"
            in each["spec"]["template"]["metadata"]["annotations"]
            for each in sets
        }

        async def pod_of(is_new: bool) -> Object | None:
            for each in await where.client.list(PODS, where.namespace):
                (owner,) = each["metadata"]["ownerReferences"]
                if marks.get(owner["uid"]) is is_new and each["spec"].get("nodeName"):
                    return each
            return None

        fresh = await until(f"the new pod of {name}", lambda: pod_of(True))
        marked = {"metadata": {"annotations": {"kvtier.io/structural-hash": structural_hash}}}
        await where.client.patch(PODS, where.namespace, fresh["metadata"]["name"], marked)
        await where.run(fresh["metadata"]["name"])

        async def old_goes() -> bool:
            old = await pod_of(False)
            if old is not None and "deletionTimestamp" in old["metadata"]:
                await where.finish(old["metadata"]["name"])
            return old is None

        await until(f"the old pod of {name} ends", old_goes)

    run(scenario)


def test_an_owner_that_is_not_restarted_gives_the_reason(run: RunScenario) -> None:
    async def scenario(where: StatusNamespace) -> None:
        async with FakeTierdServer() as tierd, running_controller(where):
            await where.policy(**RESTARTING)
            await where.until("Attached", "Unknown", "NoPods")
            pod = where.injected(tierd.port, "older000")
            body = {
                "metadata": {
                    "name": "alone",
                    **{key: pod["metadata"][key] for key in ("labels", "annotations")},
                },
                "spec": pod["spec"],
            }
            await where.client.create(PODS, where.namespace, body)
            found = await where.until("UpToDate", "False", "RestartUnsupported")
            assert (
                "KVTier does not restart pod alone: it has no owner that would replace it"
                in condition(found, "UpToDate")["message"]
            )

    run(scenario)


def test_a_group_with_different_structures_is_mixed(run: RunScenario) -> None:
    async def scenario(where: StatusNamespace) -> None:
        async with FakeTierdServer() as tierd, running_controller(where):
            await where.policy()
            written = (await where.until("Attached", "Unknown", "NoPods"))["status"][
                "structuralHash"
            ]
            label = {"leaderworkerset.sigs.k8s.io/group-key": "g"}
            for name, structure in (("leader", written), ("worker", "older000")):
                pod = where.injected(tierd.port, structure, **label)
                metadata = {
                    "name": name,
                    **{key: pod["metadata"][key] for key in ("labels", "annotations")},
                }
                await where.client.create(
                    PODS, where.namespace, {"metadata": metadata, "spec": pod["spec"]}
                )
            found = await where.until("UpToDate", "False", "MixedGroup")
            assert (
                "leader, worker: they have different structures"
                in condition(found, "UpToDate")["message"]
            )

    run(scenario)


def test_changing_bytes_cause_few_status_writes(run: RunScenario) -> None:
    async def scenario(where: StatusNamespace) -> None:
        async with (
            FakeTierdServer() as tierd,
            running_controller(where, {"controller": {"pollSeconds": 0.1}}),
        ):
            await where.policy()
            written = (await where.until("Attached", "Unknown", "NoPods"))["status"][
                "structuralHash"
            ]
            await where.deployment(where.injected(tierd.port, written), replicas=2)
            for pod in await where.pods(2):
                await where.run(pod["metadata"]["name"])
            found = await where.until("Ready", "True", "InForce")
            await asyncio.sleep(1.0)
            version = (await where.client.get(POLICIES, where.namespace, "chat"))["metadata"][
                "resourceVersion"
            ]
            for number in range(20):
                tier = {
                    **found["status"]["tiers"][0],
                    "usedBytes": number << 24,
                    "hitTokens": number,
                }
                tierd.document = status_document(tier, generation=1, promptTokens=100)
                await asyncio.sleep(0.15)
            after = await where.client.get(POLICIES, where.namespace, "chat")
            assert after["metadata"]["resourceVersion"] == version

    run(scenario)


def test_the_api_server_accepts_the_status(run: RunScenario) -> None:
    """The API server prunes unknown fields, so a status that is read back whole fits the CRD."""

    async def scenario(where: StatusNamespace) -> None:
        async with running_controller(where):
            await where.policy(**SHORT)
            await where.until("Attached", "Unknown", "NoPods")
            found = await where.client.get(POLICIES, where.namespace, "chat")
            kinds = [each["type"] for each in found["status"]["conditions"]]
            assert kinds == [
                "Ready", "Accepted", "StorageReady", "Attached", "UpToDate", "Tuned",
                "EnginesCompatible", "TiersHealthy",
            ]  # fmt: skip
            with pytest.raises(ApiError, match="404"):
                await where.client.get(POLICIES, where.namespace, "missing")

    run(scenario)
