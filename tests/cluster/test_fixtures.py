"""The clusters of the other tests: pods run only with a node."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import serving
import stub_engine_pods


def _deployment(image: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "web"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {
                    "terminationGracePeriodSeconds": 0,
                    "containers": [{"name": "main", "image": image, "imagePullPolicy": "Never"}],
                },
            },
        },
    }


def test_a_pod_of_a_deployment_is_bound_to_a_fake_node_and_can_be_set_running(
    full_api: Any, nodes: ModuleType
) -> None:
    namespace = nodes.make_namespace(full_api, "fixtures")
    with nodes.FakeNode(full_api, "fixtures-node"):
        nodes.ok(
            full_api.request(
                "POST", f"/apis/apps/v1/namespaces/{namespace}/deployments", _deployment("test")
            )
        )
        pods = f"/api/v1/namespaces/{namespace}/pods"

        def bound() -> Any:
            items = full_api.request("GET", pods)[1]["items"]
            return next((each for each in items if each["spec"].get("nodeName")), None)

        pod = nodes.wait_for("a bound pod", bound)
        nodes.run_pod(full_api, namespace, pod["metadata"]["name"])
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/web"
        nodes.wait_for(
            "an available replica",
            lambda: full_api.request("GET", path)[1]["status"].get("availableReplicas") == 1,
        )
        nodes.ok(full_api.request("DELETE", path))
        nodes.finish_deletion(full_api, namespace, pod["metadata"]["name"])
    full_api.request("DELETE", f"/api/v1/namespaces/{namespace}")


def test_a_pod_runs_on_the_node(node_api: Any, nodes: ModuleType) -> None:
    namespace = nodes.make_namespace(node_api, "fixtures")
    image = "registry.local/pause:1"
    nodes.ok(
        node_api.request(
            "POST", f"/apis/apps/v1/namespaces/{namespace}/deployments", _deployment(image)
        )
    )
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/web"
    nodes.wait_for(
        "an available replica",
        lambda: node_api.request("GET", path)[1]["status"].get("availableReplicas") == 1,
    )
    nodes.ok(node_api.request("DELETE", f"/api/v1/namespaces/{namespace}"))
    nodes.wait_for(
        "the namespace is gone",
        lambda: node_api.request("GET", f"/api/v1/namespaces/{namespace}")[0] == 404,
    )


@pytest.mark.parametrize("home", ["/usr", "/usr/local", "/opt/python"])
def test_the_engine_of_the_demo_mounts_each_directory_once(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the machine's Python is installed."""
    monkeypatch.setattr(sys, "base_prefix", home)
    template = serving.engine_deployment(Path("/model"))["spec"]["template"]["spec"]
    (container,) = template["containers"]
    paths = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert len(paths) == len(set(paths))
    assert {"/usr", "/etc/ssl", home, sys.prefix, "/model", "/dev/shm"} == set(paths)
    volumes = {volume["name"]: volume for volume in template["volumes"]}
    for mount in container["volumeMounts"]:
        source = volumes[mount["name"]].get("hostPath", {}).get("path", "/dev/shm")
        assert source == mount["mountPath"]


def test_file_tiers_on_this_machines_disk_store_however_full_it_is() -> None:
    """By default a directory of a node keeps 15 % of the file system free."""
    pytest.importorskip("helm_python", reason="the demo installs the chart by Helm's own code")
    import e2e
    import local_cluster

    directory = Path("/tier")
    tiers = [
        *e2e.policy(directory)["spec"]["tiers"],
        *local_cluster.policy()["spec"]["tiers"],
        stub_engine_pods.files({"hostPath": {"path": str(directory)}}),
    ]
    found = [tier["fileSystem"]["minFree"] for tier in tiers if "fileSystem" in tier]
    assert found == ["0"] * 3
