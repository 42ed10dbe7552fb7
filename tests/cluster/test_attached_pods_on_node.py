"""Attached pods on a real node: variables, users, modes and directories."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from types import ModuleType
from typing import Any

import operators
import pytest
from tests.cluster import admission
from tests.support import pod_objects
from tests.support.pod_objects import engine, file_tier, memory_tier

import kvtier
from kvtier.cli.main import main
from kvtier_operator.api.names import TIERD_CONTAINER
from kvtier_operator.injection.decision import AdmissionContext, Injected
from kvtier_operator.injection.inject import inject
from kvtier_operator.settings import Images, PullPolicy, Settings

IMAGE = f"kvtier/payload:{kvtier.__version__}"
SETTINGS = Settings(images=Images(payload=IMAGE, tierd=IMAGE, pull_policy=PullPolicy.NEVER))
STORAGE_GID = 3000
LOOK = """
import importlib.metadata, json, os, pathlib, sys, time
deadline = time.monotonic() + 60
run = pathlib.Path("/run/kvtier")
while not (run / "http.json").exists() and time.monotonic() < deadline:
    time.sleep(0.2)
payload = pathlib.Path(sys.argv[2])
points = importlib.metadata.entry_points(group="vllm.general_plugins")
points = [point.value for point in points if point.dist.locate_file("") == payload]
names = ("PYTHONPATH", "VLLM_PLUGINS", "PYTHONHASHSEED", "KVTIER_LOCAL_RANKS")
mounts = [line.split()[4] for line in open("/proc/self/mountinfo")]
print(json.dumps({
    "variables": {name: os.environ.get(name) for name in names},
    "plugins": points,
    "files": sorted(path.name for path in run.iterdir()),
    "structural": json.load(open("/etc/kvtier/topology/structural.json"))["policy"]["name"],
    "tiers": [mount for mount in mounts if mount.startswith("/var/lib/kvtier")],
    "writable": os.access(run / "pool", os.W_OK),
    "user": os.getuid(),
}))
"""


@pytest.fixture(scope="module")
def space(node_api: Any, node_images: dict[str, Any], nodes: ModuleType) -> Any:
    name = nodes.make_namespace(node_api, f"attached-{secrets.token_hex(3)}")
    values = {"PYTHONPATH": "/from/a/map", "plugins": "lora_resolver"}
    body = {"metadata": {"name": "settings"}, "data": values}
    nodes.ok(node_api.request("POST", f"/api/v1/namespaces/{name}/configmaps", body))
    yield name
    node_api.request("DELETE", f"/api/v1/namespaces/{name}")


def looking(**fields: Any) -> dict[str, Any]:
    """An engine's container that prints what it finds and ends."""
    return engine(
        image=IMAGE,
        imagePullPolicy="Never",
        command=["/usr/local/bin/python3", "-c", LOOK, "vllm", "/opt/kvtier/payload", "-tp", "2"],
        **fields,
    )


def run(
    cluster: Any, api: Any, nodes: ModuleType, space: str, pod: dict[str, Any], directory: Path
) -> dict[str, Any]:
    """Attaches and runs a pod to its end; returns what its engine printed."""
    tier = file_tier("files", {"hostPath": {"path": str(directory)}})
    # The container runs a script: nothing but the policy says that it is the engine's.
    named = {"containerName": "vllm"}
    policy = pod_objects.policy(memory_tier("16Mi"), tier, namespace=space, engine=named)
    document = {
        **pod,
        "metadata": {
            "name": f"look-{secrets.token_hex(3)}",
            "namespace": space,
            "labels": {"app": "chat"},
        },
    }
    decision = inject(policy, document, AdmissionContext(kubelet_versions=("v1.37.2",)), SETTINGS)
    assert isinstance(decision, Injected), decision
    path = f"/api/v1/namespaces/{space}/pods"
    nodes.ok(api.request("POST", path, decision.pod))
    name = document["metadata"]["name"]

    def ended() -> Any:
        found = nodes.ok(api.request("GET", f"{path}/{name}"))
        return found if found["status"]["phase"] in ("Succeeded", "Failed") else None

    try:
        found = nodes.wait_for(f"pod {name} ends", ended, 120)
    except AssertionError:
        raise AssertionError(cluster.kubectl("-n", space, "describe", "pod", name)) from None
    output = cluster.kubectl("-n", space, "logs", name, "-c", "vllm")
    assert found["status"]["phase"] == "Succeeded", output + cluster.kubectl(
        "-n", space, "logs", name, "-c", TIERD_CONTAINER
    )
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report | {"class": found["status"]["qosClass"]}


def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As an administrator prepares a directory of a node."""
    return operators.storage(tmp_path_factory.mktemp("files"), "kv")[0]


@pytest.mark.parametrize("user", [None, 1000, 0])
def test_unnamed_users_share_memory_and_only_tierd_mounts_the_storage(
    node_cluster: Any,
    node_api: Any,
    nodes: ModuleType,
    space: str,
    tmp_path_factory: pytest.TempPathFactory,
    user: int | None,
) -> None:
    directory = prepared(tmp_path_factory)
    context = {} if user is None else {"securityContext": {"runAsUser": user, "runAsGroup": user}}
    pod = pod_objects.pod(looking(**context), restartPolicy="Never")
    report = run(node_cluster, node_api, nodes, space, pod, directory)
    assert report["user"] == (65532 if user is None else user)
    assert {"pool", "tierd.sock"} <= set(report["files"])
    assert report["writable"]
    assert report["tiers"] == []
    assert report["structural"] == "chat"
    assert report["plugins"] == ["kvtier.engines.vllm.plugin:register"]
    assert report["variables"]["PYTHONPATH"] == "/opt/kvtier/payload"
    assert report["variables"]["KVTIER_LOCAL_RANKS"] == "2"
    own = directory / space / pod_objects.POLICY_UID
    status = own.stat()
    assert (status.st_gid, status.st_mode & 0o2070) == (STORAGE_GID, 0o2070), (
        "tierd's group may write there"
    )
    assert any(own.iterdir()), "tierd wrote there"


def test_the_kubelet_expands_variables_with_value_from(
    node_cluster: Any,
    node_api: Any,
    nodes: ModuleType,
    space: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = prepared(tmp_path_factory)
    plugins = {
        "name": "VLLM_PLUGINS",
        "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "plugins"}},
    }
    source = [{"configMapRef": {"name": "settings"}}]
    pod = pod_objects.pod(looking(env=[plugins], envFrom=source), restartPolicy="Never")
    report = run(node_cluster, node_api, nodes, space, pod, directory)
    assert report["variables"] == {
        "PYTHONPATH": "/opt/kvtier/payload:/from/a/map",
        "VLLM_PLUGINS": "lora_resolver,kvtier",
        "PYTHONHASHSEED": "0",
        "KVTIER_LOCAL_RANKS": "2",
    }


def test_the_doctor_checks_a_pod_from_inside(
    node_cluster: Any,
    node_api: Any,
    nodes: ModuleType,
    space: str,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Through exec, with the command of the image, in the container that mounts the storage."""
    waiting = "import time; time.sleep(3600)"
    container = engine(
        image=IMAGE,
        imagePullPolicy="Never",
        command=["/usr/local/bin/python3", "-c", waiting, "vllm"],
    )
    tier = file_tier("files", {"hostPath": {"path": str(prepared(tmp_path_factory))}})
    policy = pod_objects.policy(
        memory_tier("16Mi"), tier, namespace=space, engine={"containerName": "vllm"}
    )
    name = f"doctor-{secrets.token_hex(3)}"
    metadata = {"name": name, "namespace": space, "labels": {"app": "chat"}}
    pod = pod_objects.pod(container, terminationGracePeriodSeconds=1)
    context = AdmissionContext(kubelet_versions=("v1.37.2",))
    decision = inject(policy, {**pod, "metadata": metadata}, context, SETTINGS)
    assert isinstance(decision, Injected), decision
    path = f"/api/v1/namespaces/{space}/pods"
    nodes.ok(node_api.request("POST", path, decision.pod))
    cluster = ["--kubeconfig", str(node_cluster.kubeconfig), "--context", node_cluster.context]
    arguments = ["doctor", name, "-n", space, "-o", "json", "--size", "1Mi", *cluster]
    found: dict[str, Any] = {}

    def checked() -> bool:
        capsys.readouterr()
        main(arguments)
        document = json.loads(capsys.readouterr().out)
        found.update({each["check"]: each for each in document["findings"]})
        return "speed" in found

    with admission.definition(node_cluster, node_api, nodes):
        nodes.wait_for("the doctor answers from inside", checked, 120, 2)
    assert found["speed"]["subject"].startswith(f"{name}/{TIERD_CONTAINER}: tier files")
    assert found["shared-memory"]["severity"] == "ok"
    assert found["rights"]["severity"] == "ok"
    assert found["mount"]["severity"] in ("ok", "warning")
    node_api.request("DELETE", f"{path}/{name}")
