"""Pods that are left alone, each with its reason and one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support import pod_objects
from tests.support.pod_objects import container, engine, variables

from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.injection.decision import Injected, Skipped
from kvtier_operator.injection.inject import inject
from kvtier_operator.settings import Settings

GPU = {"limits": {"nvidia.com/gpu": "8"}}
CONFIG = '{"kv_connector":"NixlConnector"}'
GROUP = {"leaderworkerset.sigs.k8s.io/group-key": "g1"}
SIZE = {"leaderworkerset.sigs.k8s.io/size": "2"}


def decide(
    pod: dict[str, Any], policy: KVTierPolicy | None = None, **around: Any
) -> Injected | Skipped:
    return inject(policy or pod_objects.policy(), pod, pod_objects.context(**around), Settings())


def skipped(pod: dict[str, Any], policy: KVTierPolicy | None = None, **around: Any) -> Skipped:
    decision = decide(pod, policy, **around)
    assert isinstance(decision, Skipped)
    return decision


@pytest.mark.parametrize(
    "container",
    [
        engine(args=["--kv-transfer-config", CONFIG]),
        engine(args=[f"--kv-transfer-config={CONFIG}"]),
        engine(args=["--kv_transfer_config", CONFIG]),
        engine(args=["--kv-transfer-config.kv_connector", "NixlConnector"]),
        engine(args=["--kv-offloading-size", "64"]),
        engine(command=["sh", "-c", f"vllm serve m --kv-transfer-config '{CONFIG}'"]),
        engine(
            command=[
                "/bin/bash",
                "-lc",
                f"cd /x && exec sh -c \"vllm serve m --kv-transfer-config '{CONFIG}'\"",
            ]
        ),
        engine(
            command=["sh", "-c", "vllm serve m $EXTRA"],
            env=[{"name": "EXTRA", "value": "--kv-transfer-config {}"}],
        ),
        engine(
            args=["$(EXTRA)"], env=[{"name": "EXTRA", "value": f"--kv-transfer-config={CONFIG}"}]
        ),
        engine(
            command=["/launch"],
            env=[{"name": "VLLM_ARGS", "value": f"--kv-transfer-config={CONFIG}"}],
        ),
        engine(
            env=[
                {
                    "name": "VLLM_KV_TRANSFER_CONFIG",
                    "valueFrom": {"secretKeyRef": {"name": "x", "key": "y"}},
                }
            ]
        ),
        engine(env=[{"name": "LAUNCHER", "value": '{"kv_connector": "LMCacheConnectorV1"}'}]),
        engine(env=[{"name": "KVTIER_TOPOLOGY", "value": "/mine"}]),
    ],
)
def test_an_engine_with_its_own_kv_configuration_is_skipped(
    container: dict[str, Any],
) -> None:
    decision = skipped(pod_objects.pod(container))
    assert decision.reason is SkipReason.ALREADY_CONFIGURED


@pytest.mark.parametrize(
    "container",
    [
        engine(args=["--kv-offloading-size", "0"]),
        engine(args=["--kv-cache-dtype", "fp8"]),
        engine(args=["$$(EXTRA)"], env=[{"name": "OTHER", "value": "text -- more"}]),
    ],
)
def test_other_kv_options_do_not_configure_a_connector(
    container: dict[str, Any],
) -> None:
    assert isinstance(decide(pod_objects.pod(container)), Injected)


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (
            pod_objects.pod(
                metadata={"ownerReferences": [{"kind": "DaemonSet", "name": "d", "uid": "u"}]}
            ),
            SkipReason.UNSUPPORTED_OWNER,
        ),
        (
            pod_objects.pod(metadata={"ownerReferences": [{"kind": "Node", "name": "n"}]}),
            SkipReason.UNSUPPORTED_OWNER,
        ),
        (
            pod_objects.pod(metadata={"annotations": {"kubernetes.io/config.mirror": "x"}}),
            SkipReason.UNSUPPORTED_OWNER,
        ),
        (
            pod_objects.pod(metadata={"labels": {"kvtier.io/inject": "disabled"}}),
            SkipReason.DISABLED,
        ),
        (pod_objects.pod(os={"name": "windows"}), SkipReason.UNSUPPORTED_ENGINE),
        (
            pod_objects.pod(engine(), {"name": "kvtier-tierd", "image": "x"}),
            SkipReason.ALREADY_CONFIGURED,
        ),
        (
            pod_objects.pod(volumes=[{"name": "kvtier-run", "emptyDir": {}}]),
            SkipReason.ALREADY_CONFIGURED,
        ),
        (
            pod_objects.pod(
                engine(volumeMounts=[{"name": "t", "mountPath": "/etc/kvtier/topology/"}])
            ),
            SkipReason.ALREADY_CONFIGURED,
        ),
        (
            pod_objects.pod(
                engine(volumeMounts=[{"name": "t", "mountPath": "/opt"}]),
                volumes=[{"name": "t", "configMap": {"name": "t"}}],
            ),
            SkipReason.WOULD_NOT_START,
        ),
        (
            pod_objects.pod(
                engine(volumeMounts=[{"name": "t", "mountPath": "/run", "readOnly": True}]),
                volumes=[{"name": "t", "hostPath": {"path": "/run"}}],
            ),
            SkipReason.WOULD_NOT_START,
        ),
    ],
)
def test_unsupported_pods_are_skipped(pod: dict[str, Any], reason: SkipReason) -> None:
    assert skipped(pod).reason is reason


def test_policy_errors_and_suspension_are_in_the_message() -> None:
    refused = skipped(pod_objects.pod(), policy_errors=["spec.tiers[1]: /mnt is not allowed"])
    assert (refused.reason, "/mnt is not allowed" in refused.message) == (
        SkipReason.NOT_ACCEPTED,
        True,
    )
    suspended = skipped(pod_objects.pod(), suspended="ImagePullBackOff")
    assert (suspended.reason, "ImagePullBackOff" in suspended.message) == (
        SkipReason.SUSPENDED,
        True,
    )
    assert "600 s" in suspended.message


def test_pods_of_policies_without_injection_or_for_another_engine_are_skipped() -> None:
    by_hand = pod_objects.policy(attach={"mode": "ConfigMapOnly"})
    assert skipped(pod_objects.pod(), by_hand).reason is SkipReason.DISABLED
    atom = pod_objects.policy(engine={"type": "ATOM"})
    unnamed = skipped(pod_objects.pod(), atom)
    assert unnamed.reason is SkipReason.NO_ENGINE_CONTAINER
    assert "spec.engine.containerName" in unnamed.message
    lmcache = pod_objects.policy(engine={"type": "ATOM", "connector": "LMCache"})
    assert skipped(pod_objects.pod(), lmcache).reason is SkipReason.NOT_ACCEPTED


@pytest.mark.parametrize("extra", [{}, {"containerName": "vllm"}], ids=["found", "named"])
def test_an_atom_container_gets_the_registering_module_first(extra: dict[str, str]) -> None:
    pod = pod_objects.pod()
    name = pod["spec"]["containers"][0]["name"]
    pod["spec"]["containers"][0]["command"] = ["python", "-m", "atom.entrypoints.openai_server"]
    pod["spec"]["containers"][0]["args"] = ["--model", "/model"]
    vllm = pod_objects.pod()
    other = pod_objects.policy(engine={"type": "ATOM", "containerName": name})
    vllm["spec"]["containers"][0]["command"] = ["vllm", "serve", "/model"]
    assert skipped(vllm, other).reason is SkipReason.UNSUPPORTED_ENGINE
    decision = decide(pod, pod_objects.policy(engine={"type": "ATOM", **extra}))
    assert not isinstance(decision, Skipped)
    engine = next(each for each in decision.pod["spec"]["containers"] if each["name"] == name)
    paths = {each["name"]: each.get("value", "") for each in engine["env"]}
    first, second = paths["PYTHONPATH"].split(":")[:2]
    assert first == f"{second}/kvtier-atom"
    assert paths["KVTIER_TOPOLOGY"]


def test_a_structure_that_is_too_long_for_an_annotation_is_skipped() -> None:
    tiers = [pod_objects.memory_tier()] + [
        {"name": f"remote-{index}", "lmcache": {"url": "redis://" + "x" * 2000}}
        for index in range(7)
    ]
    policy = pod_objects.policy(*tiers, isolation={"salt": "s" * 256})
    decision = decide(pod_objects.pod(), policy)
    assert isinstance(decision, Skipped)
    assert decision.reason is SkipReason.NOT_ACCEPTED
    assert "16384" in decision.message


class TestKubelets:
    def test_the_oldest_kubelet_decides_about_sidecars(self) -> None:
        decision = skipped(pod_objects.pod(), kubelet_versions=("v1.31.1", "v1.28.9-gke.1"))
        assert decision.reason is SkipReason.NO_NATIVE_SIDECARS
        assert "1.28" in decision.message
        assert isinstance(decide(pod_objects.pod(), kubelet_versions=("v1.29.0", "")), Injected)

    def test_tierd_in_the_engine_container_needs_no_native_sidecars(self) -> None:
        inside = pod_objects.policy(engine={"daemon": "Engine"})
        assert isinstance(
            decide(pod_objects.pod(), inside, kubelet_versions=("v1.27.0",)), Injected
        )

    def test_image_volumes_need_a_newer_kubelet(self) -> None:
        policy = pod_objects.policy(engine={"delivery": "ImageVolume"})
        assert (
            skipped(pod_objects.pod(), policy, kubelet_versions=("v1.32.0",)).reason
            is SkipReason.WOULD_NOT_START
        )


class TestSeveralHosts:
    @pytest.mark.parametrize(
        "pod",
        [
            pod_objects.pod(
                engine(
                    command=["sh", "-c", "ray start --head; vllm serve m -tp 16"], resources=GPU
                ),
                metadata={"labels": GROUP, "annotations": SIZE},
            ),
            pod_objects.pod(
                engine(
                    command=["sh", "-c", "ray start --address=$LWS_LEADER_ADDRESS:6379 --block"],
                    resources=GPU,
                ),
                metadata={"labels": GROUP, "annotations": SIZE},
            ),
            pod_objects.pod(
                engine(
                    command=[
                        "bash",
                        "-c",
                        "/vllm/multi-node-serving.sh leader --ray_cluster_size=2; vllm serve m",
                    ]
                ),
                metadata={"labels": GROUP},
            ),
            pod_objects.pod(engine(resources=GPU), metadata={"labels": {"ray.io/cluster": "c"}}),
            pod_objects.pod(engine(args=["-tp", "8", "-pp", "2"], resources=GPU)),
            pod_objects.pod(engine(args=["-tp", "8", "--nnodes", "2"])),
        ],
    )
    def test_an_engine_on_several_hosts_is_skipped(self, pod: dict[str, Any]) -> None:
        decision = skipped(pod)
        assert decision.reason is SkipReason.MULTI_HOST
        assert "several hosts" in decision.message

    @pytest.mark.parametrize(
        "pod",
        [
            pod_objects.pod(
                engine(args=["-tp", "8", "--distributed-executor-backend", "ray"], resources=GPU)
            ),
            pod_objects.pod(
                engine(args=["-tp", "8"], resources=GPU),
                metadata={"labels": GROUP, "annotations": SIZE},
            ),
            pod_objects.pod(
                engine(command=["sh", "-c", "[ -n 2 ] && head -n 5 /etc/hosts && vllm serve m"])
            ),
            pod_objects.pod(
                engine(args=["-tp", "8", "--distributed-executor-backend=ray"], resources=GPU),
                metadata={
                    "labels": GROUP,
                    "annotations": {"leaderworkerset.sigs.k8s.io/size": "1"},
                },
            ),
        ],
    )
    def test_ray_without_a_group_and_a_group_without_ray_are_injected(
        self, pod: dict[str, Any]
    ) -> None:
        assert isinstance(decide(pod), Injected)


class TestEngineContainer:
    @pytest.mark.parametrize(
        ("containers", "found"),
        [
            ([engine("a"), engine("b", resources={"limits": {"nvidia.com/gpu": 1}})], "b"),
            ([engine("a"), engine("b", resources={"limits": {"amd.com/gpu": "1"}})], "b"),
            ([engine("a"), engine("b", resources={"limits": {"gpu.intel.com/i915": "1"}})], "b"),
            ([engine("a"), engine("b", resources={"limits": {"nvidia.com/mig-1g.5gb": "1"}})], "b"),
            ([engine("a"), engine("b", resources={"limits": {"aliyun.com/gpu-mem": "8"}})], "b"),
            ([engine("a"), engine("b", resources={"claims": [{"name": "gpu"}]})], "b"),
            (
                [
                    engine("a"),
                    engine(
                        "b", resources={"limits": {"nvidia.com/gpu": 0}}, command=["x"], image="x"
                    ),
                ],
                "a",
            ),
            (
                [
                    engine(
                        "a", command=["x"], image="x", resources={"limits": {"nvidia.com/gpu": 1}}
                    ),
                    engine("b", resources={"limits": {"nvidia.com/gpu": 1}}),
                ],
                "b",
            ),
            (
                [
                    engine("a", command=["python3", "-m", "vllm.entrypoints.openai.api_server"]),
                    engine("b", command=["x"]),
                ],
                "a",
            ),
            (
                [
                    engine("a", command=["x"], image="x"),
                    engine("b", command=["bash", "-c", "exec vllm serve m"]),
                ],
                "b",
            ),
            ([engine("a", command=["/usr/local/bin/vllm"]), engine("b", command=["x"])], "a"),
            (
                [
                    engine(
                        "a",
                        command=["x"],
                        image="x",
                        env=[{"name": "VLLM_X", "value": "1"}],
                        resources=GPU,
                    ),
                    engine("b", command=["y"]),
                ],
                "a",
            ),
            ([engine("a", command=["x"], image="x"), engine("b", command=None)], "b"),
            (
                [
                    engine("a", command=["x"], image="quay.io/org/vllm@sha256:0"),
                    engine("b", command=["x"], image="x"),
                ],
                "a",
            ),
        ],
    )
    def test_the_engine_is_found_by_what_identifies_vllm(
        self, containers: list[dict[str, Any]], found: str
    ) -> None:
        decision = decide(pod_objects.pod(*containers))
        assert isinstance(decision, Injected)
        assert "KVTIER_TOPOLOGY" in variables(container(decision.pod, found))
        others = [each["name"] for each in containers if each["name"] != found]
        assert all(
            "KVTIER_TOPOLOGY" not in variables(container(decision.pod, name)) for name in others
        )

    @pytest.mark.parametrize(
        "containers",
        [
            [engine("a"), engine("b")],
            [engine("a", command=["x"], image="x")],
            [
                engine("a", command=["x"], image="x/vllmish", resources=GPU),
                engine("b", command=["x"], image="x", resources=GPU),
            ],
        ],
    )
    def test_a_pod_with_an_ambiguous_engine_is_skipped(
        self, containers: list[dict[str, Any]]
    ) -> None:
        decision = skipped(pod_objects.pod(*containers))
        assert decision.reason is SkipReason.NO_ENGINE_CONTAINER
        assert "spec.engine.containerName" in decision.message

    def test_a_named_container_is_the_engine(self) -> None:
        named = pod_objects.policy(engine={"containerName": "b"})
        assert isinstance(decide(pod_objects.pod(engine("a"), engine("b")), named), Injected)
        decision = skipped(pod_objects.pod(engine("a")), named)
        assert decision.reason is SkipReason.NO_ENGINE_CONTAINER


def test_a_pod_that_is_too_large_is_skipped_before_it_is_inspected() -> None:
    """Ten thousand containers in a namespace with limits took half a minute."""
    others = [{"name": f"c{index}", "image": "x"} for index in range(128)]
    found = skipped(pod_objects.pod(engine(), *others))
    assert (found.reason, found.message) == (
        SkipReason.NO_ENGINE_CONTAINER,
        "the pod has 129 containers; at most 128 are inspected",
    )
    assert skipped(pod_objects.pod(engine(), initContainers=others)).message == found.message
    assert isinstance(decide(pod_objects.pod(engine(), *others[:127])), Injected)
    many = {f"example.com/r{index}": "1" for index in range(513)}
    found = skipped(pod_objects.pod(engine(resources={"limits": many, "requests": many})))
    assert (
        found.message
        == "the pod's containers have 1026 requests and limits; at most 1024 are inspected"
    )


KSERVE = """# --kv-transfer-config needs a newer version; it is not used here
KV_ARGS=""
eval "exec vllm serve /mnt/models \\
  --port 8000 \\
  ${KV_ARGS} \\
  ${MORE_ARGS} \\
  $@"
"""
COMMENT = """# for two nodes add --nnodes 2 and --tensor-parallel-size 16
exec vllm serve org/m --tensor-parallel-size 8
"""


@pytest.mark.parametrize(
    "found",
    [
        engine("main", image="ghcr.io/llm-d/llm-d-cuda:v0.6.0", resources=GPU)
        | {"command": ["/bin/bash", "-c", KSERVE, "--"]},
        engine(command=["/bin/bash", "-c"], args=[COMMENT], resources=GPU),
    ],
)
def test_a_comment_in_a_shell_text_configures_nothing(found: dict[str, Any]) -> None:
    assert isinstance(decide(pod_objects.pod(found)), Injected)


@pytest.mark.parametrize(
    ("found", "reason", "text"),
    [
        (
            {
                "image": "lmsysorg/sglang:latest",
                "command": ["python", "-m", "sglang.launch_server", "--model-path", "/mnt/models"],
            },
            SkipReason.UNSUPPORTED_ENGINE,
            "SGLang",
        ),
        (
            {
                "image": "ghcr.io/huggingface/text-generation-inference:3",
                "args": ["--model-id=$(MODEL_ID)"],
            },
            SkipReason.UNSUPPORTED_ENGINE,
            "Text Generation Inference",
        ),
        (
            {
                "image": "vllm/vllm-openai-cpu:v0.23.0",
                "command": ["/bin/bash", "-c", "exec vllm launch render /mnt/models/base --port=8"],
            },
            SkipReason.UNSUPPORTED_ENGINE,
            "serves no model",
        ),
        (
            {
                "image": "vllm/vllm-tpu:v0.24.0",
                "command": ["vllm", "serve", "m"],
                "resources": {"limits": {"google.com/tpu": "8"}},
            },
            SkipReason.UNSUPPORTED_ENGINE,
            "google.com/tpu",
        ),
        (
            {
                "image": "quay.io/ascend/vllm-ascend:v0.24.0",
                "command": ["vllm", "serve", "m"],
                "resources": {"limits": {"huawei.com/Ascend910": "8"}},
            },
            SkipReason.UNSUPPORTED_ENGINE,
            "huawei.com/Ascend910",
        ),
        (
            {
                "image": "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1",
                "command": ["python3", "-m", "dynamo.vllm", "--connector", "kvbm"],
            },
            SkipReason.NO_ENGINE_CONTAINER,
            "dynamo.vllm",
        ),
        ({"image": "org/model-server:1"}, SkipReason.NO_ENGINE_CONTAINER, "containerName"),
    ],
)
def test_a_device_is_no_proof_of_vllm(found: dict[str, Any], reason: SkipReason, text: str) -> None:
    decision = skipped(pod_objects.pod({"name": "main", "resources": GPU, **found}))
    assert (decision.reason, text in decision.message) == (reason, True), decision


def test_a_named_container_with_an_unknown_command_is_the_engine() -> None:
    named = pod_objects.policy(engine={"containerName": "main"})
    unknown = {"name": "main", "image": "org/model-server:1", "resources": GPU}
    assert isinstance(decide(pod_objects.pod(unknown), named), Injected)
    dynamo = unknown | {"command": ["python3", "-m", "dynamo.vllm"]}
    assert isinstance(decide(pod_objects.pod(dynamo), named), Injected)
    with_connector = dynamo | {"args": ["--connector", "kvbm"]}
    assert skipped(pod_objects.pod(with_connector), named).reason is SkipReason.ALREADY_CONFIGURED
    other = unknown | {"command": ["python3", "-m", "sglang.launch_server"]}
    assert skipped(pod_objects.pod(other), named).reason is SkipReason.UNSUPPORTED_ENGINE
