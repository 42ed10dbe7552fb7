"""What holds for every pod, however it is written."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support import pod_objects
from tests.support.pod_objects import file_tier, memory_tier

from kvtier_operator.api.names import STRUCTURAL_ANNOTATION
from kvtier_operator.injection.decision import Injected
from kvtier_operator.injection.inject import inject
from kvtier_operator.settings import Settings

WORDS = st.sampled_from(
    [
        "vllm",
        "serve",
        "-tp",
        "2",
        "--tensor-parallel-size=$(TP)",
        "sh",
        "-c",
        "exec vllm serve m --tensor-parallel-size ${TP:-1} 'a b",
        "$$(X)",
        "--kv-cache-dtype",
        "",
        "a\\\nb",
    ]
)
AMOUNTS = st.sampled_from(
    [
        {},
        pod_objects.GUARANTEED,
        {"limits": {"memory": "2Gi"}},
        {"requests": {"cpu": "1"}},
        {"limits": {"nvidia.com/gpu": "1"}},
    ]
)
VARIABLES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {
                "name": st.sampled_from(
                    ["PYTHONPATH", "PYTHONHASHSEED", "VLLM_PLUGINS", "TP", "OTHER"]
                ),
                "value": st.sampled_from(
                    ["", "0", "a:b", "x,kvtier", "$(OTHER)", "--tensor-parallel-size 2"]
                ),
            }
        ),
        st.fixed_dictionaries(
            {
                "name": st.sampled_from(["PYTHONPATH", "PYTHONHASHSEED", "VLLM_PLUGINS"]),
                "valueFrom": st.just({"configMapKeyRef": {"name": "m", "key": "k"}}),
            }
        ),
    ),
    max_size=5,
)


@st.composite
def containers(draw: st.DrawFn, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": name,
        "image": draw(st.sampled_from(["vllm/vllm-openai:v1", "x"])),
    }
    for key, strategy in (
        ("command", st.lists(WORDS, max_size=5)),
        ("args", st.lists(WORDS, max_size=4)),
        ("env", VARIABLES),
        ("resources", AMOUNTS),
        ("envFrom", st.just([{"configMapRef": {"name": "m"}}])),
        ("securityContext", st.sampled_from([{"runAsUser": 0}, {"runAsUser": 5}, {}])),
        ("volumeMounts", st.just([{"name": "shm", "mountPath": "/dev/shm"}])),
        ("ports", st.just([{"containerPort": 9400}])),
        ("readinessProbe", st.just({"httpGet": {"path": "/health", "port": 8000}})),
    ):
        if draw(st.booleans()):
            found[key] = draw(strategy)
    return found


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    extra: dict[str, Any] = {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}
    if draw(st.booleans()):
        extra["initContainers"] = [
            draw(containers("init")),
            {**draw(containers("mesh")), "restartPolicy": "Always"},
        ]
    if draw(st.booleans()):
        extra["hostNetwork"] = True
    if draw(st.integers(0, 3)) == 0:
        extra["resources"] = pod_objects.GUARANTEED
    others = [draw(containers(f"other-{index}")) for index in range(draw(st.integers(0, 2)))]
    found = [*others, draw(containers("vllm"))]
    return pod_objects.pod(*draw(st.permutations(found)), **extra)


POLICIES = [
    pod_objects.policy(
        memory_tier("256Mi"),
        file_tier("nvme", {"hostPath": {"path": "/mnt/kv"}}),
        file_tier("shared", {"nfs": {"server": "nas", "path": "/kv"}}, "Cluster"),
        engine={
            "containerName": "vllm",
            "daemon": daemon,
            "delivery": delivery,
            "connector": connector,
        },
        resources={"memoryPolicy": memory},
    )
    for daemon, delivery, connector, memory in (
        ("Sidecar", "InitContainer", "KVTier", "Validate"),
        ("Sidecar", "Image", "KVTier", "Validate"),
        ("Engine", "InitContainer", "KVTier", "Grow"),
        ("Engine", "ImageVolume", "KVTier", "Ignore"),
        ("Sidecar", "InitContainer", "Offloading", "Grow"),
    )
]
UNTOUCHED = (
    "name", "image", "command", "args", "readinessProbe", "ports", "securityContext",
    "envFrom", "imagePullPolicy",
)  # fmt: skip


def _spec(pod: Mapping[str, Any]) -> dict[str, Any]:
    return dict(pod["spec"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pods(), st.sampled_from(POLICIES), st.booleans())
def test_injection_is_deterministic_idempotent_and_changes_only_what_it_must(
    pod: dict[str, Any], policy: Any, ready: bool
) -> None:
    before = copy.deepcopy(pod)
    around = pod_objects.context(storage_ready=ready)
    decision = inject(policy, pod, around, Settings())
    assert pod == before, "the pod that was given changed"
    if not isinstance(decision, Injected):
        assert decision.message
        assert "\n" not in decision.message
        return
    found = decision.pod
    json.dumps(found)
    assert inject(policy, found, around, Settings()) == Injected(found), "not idempotent"
    assert inject(policy, pod, around, Settings()) == decision, "not the same twice"
    assert len(found["metadata"]["annotations"][STRUCTURAL_ANNOTATION].encode()) <= 16 << 10
    spec, old = _spec(found), _spec(before)
    everything = [*spec.get("initContainers", ()), *spec["containers"]]
    for names in (
        [each["name"] for each in everything],
        [each["name"] for each in spec["volumes"]],
    ):
        assert len(names) == len(set(names)), "a name twice"
    assert [each["name"] for each in spec["containers"]] == [
        each["name"] for each in old["containers"]
    ]
    for new, given_container in zip(spec["containers"], old["containers"], strict=True):
        if given_container["name"] != "vllm":
            assert new == given_container
        for key in UNTOUCHED:
            assert new.get(key) == given_container.get(key), key
    assert spec.get("initContainers", [])[: len(old.get("initContainers", []))] == old.get(
        "initContainers", []
    )
    volumes = {each["name"] for each in spec["volumes"]}
    for each in everything:
        mounts = [mount["mountPath"] for mount in each.get("volumeMounts", ())]
        assert len(mounts) == len(set(mounts)), "two mounts in one place"
        assert {mount["name"] for mount in each.get("volumeMounts", ())} <= volumes
        if each["name"].startswith("kvtier-"):
            for kind in ("requests", "limits"):
                assert {"cpu", "memory"} <= each["resources"][kind].keys()
    if pod_objects.qos_class(old) == "Guaranteed":
        assert pod_objects.qos_class(spec) == "Guaranteed"
