"""Injection on a real node under conditions that could prevent an engine from starting or harm a
running one: each test ends with a serving engine and a reported reason. A stub engine starts in a
second and attaches as vLLM's connector does.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import images
import pytest

pytest.importorskip(
    "helm_python", reason="charts are installed by Helm's own code: helm-python-sdk"
)


@pytest.fixture(scope="module")
def engines() -> ModuleType:
    """The module ``stub_engine_pods``."""
    import stub_engine_pods

    return stub_engine_pods


def test_an_attached_engine_stores_and_loads(operator_on_node: Any, engines: ModuleType) -> None:
    with operator_on_node.namespace("plain") as place:
        place.apply_policy(engines.policy())
        place.apply(engines.deployment())
        pod = place.ready()
        assert engines.injected(pod)
        place.attached(pod)
        assert engines.do(pod, "store", n=8)["done"] == 8
        assert engines.do(pod, "load", n=8)["done"] == 8
        assert engines.seen(pod)["wrong"] == 0


# Storage


def test_an_unreachable_storage_server_delays_only_the_first_pod(
    operator_on_node: Any, engines: ModuleType, nodes: ModuleType
) -> None:
    with operator_on_node.namespace("server-away") as place:
        export = {"nfs": {"server": "192.0.2.1", "path": "/kv"}}
        place.apply_policy(
            engines.policy(
                engines.memory(), engines.files(export, sharing="Cluster"), attach=engines.IMPATIENT
            )
        )
        place.apply(engines.deployment())
        pod = place.ready(120)
        # Either it was known in time that the storage is not there, or the breaker gave the owner a
        # pod without it.
        assert not any("persistentVolumeClaim" in volume for volume in pod["spec"]["volumes"])
        nodes.wait_for(
            "the policy says why",
            lambda: _are_false(place, "Attached", "StorageReady"),
            60,
        )


def test_a_pod_without_a_tiers_claim_gets_the_other_tiers(
    operator_on_node: Any, engines: ModuleType, nodes: ModuleType
) -> None:
    with operator_on_node.namespace("claim-missing") as place:
        claim = {"persistentVolumeClaim": {"claimName": "none"}}
        place.apply_policy(engines.policy(engines.memory(), engines.files(claim)))
        nodes.wait_for(
            "StorageReady", lambda: place.condition("StorageReady").get("status") == "False", 30
        )
        place.apply(engines.deployment())
        pod = place.ready()
        assert engines.injected(pod)
        place.attached(pod)
        assert engines.do(pod, "store", n=2)["done"] == 2


# The sidecar


def test_a_missing_sidecar_image_delays_only_the_first_pod(
    operator_on_node: Any, engines: ModuleType, nodes: ModuleType
) -> None:
    operator_on_node.upgrade(images={"tierd": "registry.local/none:1"})
    try:
        with operator_on_node.namespace("image-missing") as place:
            place.apply_policy(engines.policy(attach=engines.IMPATIENT))
            place.apply(engines.deployment())
            pod = place.ready(120)
            assert not engines.injected(pod)
            assert engines.skip_annotation(pod)["reason"] == "Suspended"
            suspended = place.policy()["status"]["suspendedOwners"]
            assert [entry["kind"] for entry in suspended] == ["ReplicaSet"] or suspended[0][
                "kind"
            ] == "Deployment"
            assert place.condition("Attached")["status"] == "False"
    finally:
        operator_on_node.upgrade()


def test_a_crashing_sidecar_does_not_prevent_the_engine_from_starting(
    operator_on_node: Any, engines: ModuleType, nodes: ModuleType, tmp_path: Path
) -> None:
    archive = images.crashing(tmp_path)
    if archive is None:
        pytest.skip("the crashing program is written for x86-64")
    operator_on_node.cluster.load(archive)
    operator_on_node.upgrade(images={"tierd": images.CRASHING})
    try:
        with operator_on_node.namespace("sidecar-crashes") as place:
            place.apply_policy(engines.policy())
            # The sidecar runs as the engine's user. This image names none, and root is rejected.
            place.apply(engines.deployment(container={"securityContext": {"runAsUser": 1000}}))
            pod = place.ready()
            assert engines.injected(pod)
            assert not engines.seen(pod)["attached"]
            nodes.wait_for(
                "the policy says so",
                lambda: place.condition("Attached").get("status") == "False",
                60,
            )
    finally:
        operator_on_node.upgrade()


# Pods that the API server would reject


def _rejected(
    place: Any, engines: ModuleType, nodes: ModuleType, body: dict[str, Any], *words: str
) -> None:
    """The engine starts without tiers; pod and policy report what would have been rejected."""
    place.apply(body)
    pod = place.ready()
    assert not engines.injected(pod)
    annotation = engines.skip_annotation(pod)
    assert annotation["reason"] == "WouldBeRefused"
    for word in words:
        assert word in annotation["message"]
    skipped = nodes.wait_for("the policy names the pod", place.skipped, 30)
    assert skipped[0]["name"] == pod["metadata"]["name"]
    assert skipped[0]["reason"] == "WouldBeRefused"


def test_a_limit_range_that_the_sidecar_exceeds(
    operator_on_node: Any, engines: ModuleType, nodes: ModuleType
) -> None:
    with operator_on_node.namespace("limit-range") as place:
        limit = {"type": "Container", "max": {"memory": "512Mi"}}
        place.apply(
            {
                "apiVersion": "v1",
                "kind": "LimitRange",
                "metadata": {"name": "small"},
                "spec": {"limits": [limit]},
            }
        )
        place.apply_policy(engines.policy())
        _rejected(place, engines, nodes, engines.deployment(), "small", "512Mi")


def test_a_quota_on_limits_without_headroom(
    operator_on_node: Any, engines: ModuleType, nodes: ModuleType
) -> None:
    with operator_on_node.namespace("quota") as place:
        hard = {"limits.memory": "600Mi"}
        place.apply(
            {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "tight"},
                "spec": {"hard": hard},
            }
        )
        place.apply_policy(engines.policy())
        _rejected(place, engines, nodes, engines.deployment(), "tight", "limits.memory")


def test_pod_level_memory_without_headroom(
    operator_on_node: Any, engines: ModuleType, nodes: ModuleType
) -> None:
    with operator_on_node.namespace("pod-level") as place:
        place.apply_policy(engines.policy())
        resources = {"limits": {"memory": "512Mi"}, "requests": {"memory": "128Mi"}}
        _rejected(place, engines, nodes, engines.deployment(pod={"resources": resources}), "512Mi")


def test_a_host_path_under_the_baseline_pod_security_standard(
    operator_on_node: Any, engines: ModuleType, nodes: ModuleType
) -> None:
    with operator_on_node.namespace(
        "baseline", {"pod-security.kubernetes.io/enforce": "baseline"}
    ) as place:
        volume = {"hostPath": {"path": str(operator_on_node.directory("baseline"))}}
        place.apply_policy(engines.policy(engines.memory(), engines.files(volume)))
        _rejected(place, engines, nodes, engines.deployment(), "baseline", "hostPath")


RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def test_ram_under_the_restricted_pod_security_standard_is_attached(
    operator_on_node: Any, engines: ModuleType
) -> None:
    with operator_on_node.namespace(
        "restricted", {"pod-security.kubernetes.io/enforce": "restricted"}
    ) as place:
        place.apply_policy(engines.policy())
        place.apply(
            engines.deployment(container={"securityContext": {**RESTRICTED, "runAsUser": 1000}})
        )
        pod = place.ready()
        assert engines.injected(pod)
        place.attached(pod)
        assert engines.do(pod, "store", n=2)["done"] == 2


# Memory


def test_a_killed_tierd_recovers_its_memory_tier_while_the_engine_is_at_its_memory_limit(
    operator_on_node: Any, engines: ModuleType, nodes: ModuleType
) -> None:
    with operator_on_node.namespace("pressure") as place:
        place.apply_policy(engines.policy(engines.memory("64Mi")))
        place.apply(engines.deployment())
        pod = place.ready()
        place.attached(pod)
        assert engines.do(pod, "store", n=32)["done"] == 32
        # The engine has 256Mi, maps 64Mi of the pool, and takes nearly all of its limit for itself.
        engines.do(pod, "touch", bytes=150 << 20)
        assert engines.do(pod, "load", n=32)["done"] == 32
        before = engines.seen(pod)
        for victim in _tierd_processes(pod):
            victim.kill()
        nodes.wait_for(
            "the engine lost its daemon", lambda: engines.seen(pod)["lost"] > before["lost"], 30
        )
        place.attached(pod)
        assert engines.do(pod, "load", n=32)["done"] == 32
        after = place.pods()[0]
        for name in ("engine", "kvtier-tierd"):
            assert _status(after, name)["restartCount"] == 0, place.explain()
        assert engines.seen(pod)["wrong"] == 0


# Users and modes


@pytest.mark.parametrize(
    ("user", "group"), [(1000, 2000), (0, 0)], ids=["a user", "root without capabilities"]
)
def test_files_belong_to_the_storage_group_and_the_run_volume_to_both(
    operator_on_node: Any, engines: ModuleType, user: int, group: int
) -> None:
    name = f"users-{user}"
    with operator_on_node.namespace(name) as place:
        directory = operator_on_node.directory(name)
        place.apply_policy(
            engines.policy(engines.memory(), engines.files({"hostPath": {"path": str(directory)}}))
        )
        context = {"runAsUser": user, "runAsGroup": group, "capabilities": {"drop": ["ALL"]}}
        place.apply(engines.deployment(container={"securityContext": context}))
        pod = place.ready()
        place.attached(pod)
        assert engines.do(pod, "store", n=4)["done"] == 4
        stored = _wait_files(directory, 4)
        assert {path.stat().st_gid for path in stored} == {engines.STORAGE_GID}
        assert {oct(path.stat().st_mode & 0o7777) for path in stored} == {"0o660"}
        folders = {path.parent for path in stored}
        assert {oct(path.stat().st_mode & 0o7777) for path in folders} == {"0o2770"}
        # A second pod, of yet another user, reads what the first wrote.
        place.apply(
            engines.deployment(
                container={"securityContext": {"runAsUser": 4321, "runAsGroup": 4321}}
            )
        )
        other = place.ready(other_than=pod["metadata"]["uid"])
        place.attached(other)
        assert engines.do(other, "load", n=4)["done"] == 4
        assert engines.seen(other)["promoted"] == 4


# Policies


def test_a_deleted_policy_does_not_affect_running_pods_and_its_successor_serves_new_pods(
    operator_on_node: Any, engines: ModuleType
) -> None:
    with operator_on_node.namespace("again") as place:
        directory = operator_on_node.directory("again")
        body = engines.policy(
            engines.memory(), engines.files({"hostPath": {"path": str(directory)}})
        )
        place.apply_policy(body)
        place.apply(engines.deployment())
        first = place.ready()
        place.attached(first)
        assert engines.do(first, "store", n=4)["done"] == 4
        uid = place.policy()["metadata"]["uid"]
        operator_on_node.cluster.kubectl("-n", "again", "delete", "kvtp", "tiers")
        assert engines.do(first, "load", n=4)["done"] == 4
        assert place.pods()[0]["metadata"]["uid"] == first["metadata"]["uid"]
        operator_on_node.cluster.kubectl(
            "-n", "again", "rollout", "restart", "deployment", "engine"
        )
        second = place.ready(other_than=first["metadata"]["uid"])
        assert not engines.injected(second)
        place.apply_policy(body)
        assert place.policy()["metadata"]["uid"] != uid
        operator_on_node.cluster.kubectl(
            "-n", "again", "delete", "pod", second["metadata"]["name"], "--wait=false"
        )
        third = place.ready(other_than=second["metadata"]["uid"])
        assert engines.injected(third)
        place.attached(third)
        assert engines.do(third, "store", n=4)["done"] == 4


def _are_false(place: Any, *kinds: str) -> bool:
    return any(place.condition(kind).get("status") == "False" for kind in kinds)


def _status(pod: dict[str, Any], name: str) -> dict[str, Any]:
    from serving import container_status

    return container_status(pod, name)


def _tierd_processes(pod: dict[str, Any]) -> list[Any]:
    """The daemon in the sidecar, without the supervisor that is the container's process 1."""
    import psutil

    identifier = _status(pod, "kvtier-tierd")["containerID"].removeprefix("containerd://")
    found = []
    for process in psutil.process_iter():
        try:
            groups = Path(f"/proc/{process.pid}/cgroup").read_text()
            inside = (
                Path(f"/proc/{process.pid}/status")
                .read_text()
                .split("NSpid:")[1]
                .splitlines()[0]
                .split()[-1]
            )
        except OSError:
            continue
        if identifier in groups and inside != "1":
            found.append(process)
    assert found, "no daemon in the sidecar"
    return found


def _wait_files(directory: Path, count: int) -> list[Path]:
    from nodes import wait_for

    return list(
        wait_for(
            f"{count} files in {directory}",
            lambda: found if len(found := sorted(directory.rglob("*.kv"))) >= count else None,
            30,
        )
    )
