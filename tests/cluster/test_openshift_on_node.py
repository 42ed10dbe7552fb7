"""On a real node: users that OpenShift assigns, and pods that share the node's network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip(
    "helm_python", reason="charts are installed by Helm's own code: helm-python-sdk"
)

import openshift
import stub_engine_pods as engines
from charts import NAMESPACE
from nodes import wait_for

FIRST = openshift.FIRST_USER


def claim(name: str, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A claim, and the volume that an administrator made for it."""
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{name}-volume"},
        "spec": {
            **common,
            "capacity": {"storage": "1Gi"},
            "hostPath": {"path": str(directory)},
            "persistentVolumeReclaimPolicy": "Retain",
        },
    }
    request = {"resources": {"requests": {"storage": "1Gi"}}}
    body = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {**common, **request, "volumeName": f"{name}-volume"},
    }
    return volume, body


def users(words: str) -> set[tuple[int, int]]:
    """User and group of processes whose command has these words."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        try:
            if words in " ".join(process.info["cmdline"] or ()):
                found.add((process.uids().real, process.gids().real))
        except psutil.Error:
            continue
    return found


def test_operator_and_tiers_work_as_users_that_the_images_do_not_know(
    operator_on_node: Any,
) -> None:
    kubectl = operator_on_node.cluster.kubectl
    pods = json.loads(kubectl("-n", NAMESPACE, "get", "pods", "-o", "json"))
    for pod in pods["items"]:
        assert pod["metadata"]["annotations"]["openshift.io/scc"] == "restricted-v2"
        assert pod["spec"]["containers"][0]["securityContext"]["runAsUser"] == FIRST
    with operator_on_node.namespace("assigned") as place:
        openshift.constrain(operator_on_node.api, "assigned", openshift.RESTRICTED_V2)
        directory = operator_on_node.directory("assigned")
        place.apply(*claim("kv", directory))
        place.apply_policy(
            engines.policy(
                engines.memory(),
                engines.files({"persistentVolumeClaim": {"claimName": "kv"}}),
            )
        )
        # No user in the pod: the namespace's is assigned, to the engine and to what is injected.
        place.apply(engines.deployment())
        pod = place.ready()
        place.attached(pod)
        assert engines.do(pod, "store", n=4)["done"] == 4
        assert engines.do(pod, "load", n=4)["done"] == 4

        def stored() -> list[Path]:
            return [path for path in directory.rglob("*") if path.suffix == ".kv"]

        wait_for("files are written", lambda: len(stored()) >= 4, 30)
        assert {(each.stat().st_uid, each.stat().st_gid) for each in stored()} == {
            (FIRST, engines.STORAGE_GID)
        }
        assert (FIRST, 0) in users("kvtier.tierd")
        statuses = pod["status"]["containerStatuses"] + pod["status"]["initContainerStatuses"]
        assert {each["restartCount"] for each in statuses} == {0}
        kubectl("delete", "pv", "kv-volume", "--wait=false")


def test_engines_with_host_network_share_the_node_and_are_updated(operator_on_node: Any) -> None:
    with operator_on_node.namespace("host-network") as place:
        place.apply_policy(engines.policy())
        body = engines.deployment(
            container={"env": [{"name": "PORT", "value": "0"}], "readinessProbe": None},
            pod={"hostNetwork": True},
        )
        body["spec"]["replicas"] = 2
        place.apply(body)

        def attached() -> bool:
            counts = place.policy().get("status", {}).get("pods") or {}
            # What is tuned has been polled at its own port.
            return [counts.get(key) for key in ("selected", "attached", "tuned")] == [2, 2, 2]

        _wait(place, "both report that they are attached", attached)
        before = {pod["metadata"]["uid"] for pod in place.pods()}
        kubectl = operator_on_node.cluster.kubectl
        options = ("-n", place.namespace, "rollout")
        kubectl(*options, "restart", f"deployment/{engines.APP}")
        kubectl(*options, "status", f"deployment/{engines.APP}", "--timeout=90s", seconds=100)
        wait_for(
            "the new pods alone are there",
            lambda: (
                len(place.pods()) == 2
                and before.isdisjoint(pod["metadata"]["uid"] for pod in place.pods())
            ),
            60,
        )
        _wait(place, "the new pods report that they are attached", attached)
        for pod in place.pods():
            every = pod["spec"]["containers"] + pod["spec"]["initContainers"]
            assert all(not each.get("ports") for each in every)


def _wait(place: Any, what: str, check: Any) -> None:
    try:
        wait_for(what, check, 60)
    except AssertionError as error:
        raise AssertionError(
            f"{error}\n{place.policy().get('status')}\n{place.explain()}"
        ) from None
