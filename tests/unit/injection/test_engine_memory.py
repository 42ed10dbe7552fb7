"""Engines with the memory tier in their own process: ``daemon: Engine``, other connectors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support import pod_objects
from tests.support.pod_objects import container, engine, file_tier, memory_tier, variables, volume

from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.names import PAYLOAD_CONTAINER, RUN_VOLUME, STRUCTURAL_ANNOTATION
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.injection.decision import Injected, Skipped
from kvtier_operator.injection.inject import inject
from kvtier_operator.settings import Settings

GIB = 1 << 30
NEEDED = GIB + (768 << 20)
HOST = {"hostPath": {"path": "/mnt/nvme/kv"}}
SHM = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
MOUNTED = [{"name": "shm", "mountPath": "/dev/shm"}]


def inside(memory_policy: str = "Validate", *tiers: dict[str, Any]) -> KVTierPolicy:
    return pod_objects.policy(
        *tiers, engine={"daemon": "Engine"}, resources={"memoryPolicy": memory_policy}
    )


def attached(policy: KVTierPolicy, pod: dict[str, Any]) -> Injected:
    decision = inject(policy, pod, pod_objects.context(), Settings())
    assert isinstance(decision, Injected), decision
    return decision


class TestDaemonInTheEngine:
    def test_the_engines_container_mounts_the_storage_and_there_is_no_sidecar(self) -> None:
        pod = attached(
            inside("Validate", memory_tier(), file_tier("nvme", HOST)), pod_objects.pod()
        ).pod
        assert [each["name"] for each in pod["spec"]["initContainers"]] == [PAYLOAD_CONTAINER]
        mounts = {mount["name"] for mount in container(pod, "vllm")["volumeMounts"]}
        assert {RUN_VOLUME, "kvtier-tier-nvme", "kvtier-token"} <= mounts
        assert (
            json.loads(pod["metadata"]["annotations"][STRUCTURAL_ANNOTATION])["daemon"] == "Engine"
        )
        assert variables(container(pod, "vllm"))["KVTIER_TOKEN_FILE"] == "/etc/kvtier/token/token"
        assert int(volume(pod, RUN_VOLUME)["emptyDir"]["sizeLimit"]) > GIB

    @pytest.mark.parametrize(("limit", "fits"), [(NEEDED - 1, False), (NEEDED, True), (None, True)])
    def test_a_memory_limit_below_the_tiers_need_is_skipped(
        self, limit: int | None, fits: bool
    ) -> None:
        pod = pod_objects.pod(
            engine(resources={"limits": {"memory": str(limit)}} if limit else None)
        )
        decision = inject(inside(), pod, pod_objects.context(), Settings())
        assert isinstance(decision, Injected) == fits
        if isinstance(decision, Skipped):
            assert decision.reason is SkipReason.MEMORY_TOO_SMALL
            assert "1.75Gi" in decision.message

    def test_grow_raises_the_limit_and_keeps_guaranteed(
        self,
    ) -> None:
        pod = pod_objects.pod(engine(resources=pod_objects.GUARANTEED))
        decision = attached(inside("Grow"), pod)
        resources = container(decision.pod, "vllm")["resources"]
        assert (
            resources["limits"]["memory"]
            == resources["requests"]["memory"]
            == str(8 * GIB + NEEDED)
        )
        assert any("Grow" in note for note in decision.notes)
        assert pod_objects.qos_class(decision.pod["spec"]) == "Guaranteed"

    def test_ignore_keeps_the_limit(self) -> None:
        pod = pod_objects.pod(engine(resources={"limits": {"memory": "1Gi"}}))
        resources = container(attached(inside("Ignore"), pod).pod, "vllm")["resources"]
        assert resources == {"limits": {"memory": "1Gi"}}


class TestOtherConnectors:
    def offloading(self, *tiers: dict[str, Any]) -> KVTierPolicy:
        return pod_objects.policy(*(tiers or (memory_tier(),)), engine={"connector": "Offloading"})

    def test_the_plugin_gets_the_configuration_and_the_engine_mounts_the_storage(self) -> None:
        pod = attached(
            self.offloading(memory_tier(), file_tier("nvme", HOST)), pod_objects.pod()
        ).pod
        found = variables(container(pod, "vllm"))
        assert json.loads(found["KVTIER_TRANSFER_CONFIG"])["kv_connector"] == "OffloadingConnector"
        assert "KVTIER_TOPOLOGY" not in found
        assert found["KVTIER_POD_UID"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
        assert "kvtier-tier-nvme" in {
            mount["name"] for mount in container(pod, "vllm")["volumeMounts"]
        }
        assert [each["name"] for each in pod["spec"]["initContainers"]] == [PAYLOAD_CONTAINER]
        assert pod["spec"]["securityContext"]["supplementalGroups"] == [3000]

    def test_the_pods_shared_memory_volume_is_enlarged(self) -> None:
        pod = pod_objects.pod(engine(volumeMounts=MOUNTED), volumes=[SHM])
        size = int(volume(attached(self.offloading(), pod).pod, "shm")["emptyDir"]["sizeLimit"])
        assert size >= 3 * GIB

    def test_a_shared_memory_volume_is_added_if_there_is_none(self) -> None:
        pod = attached(self.offloading(), pod_objects.pod()).pod
        assert int(volume(pod, "kvtier-shm")["emptyDir"]["sizeLimit"]) >= 2 * GIB
        assert {"name": "kvtier-shm", "mountPath": "/dev/shm"} in container(pod, "vllm")[
            "volumeMounts"
        ]

    @pytest.mark.parametrize(
        "fields",
        [{"hostIPC": True}, {"volumes": [{"name": "shm", "hostPath": {"path": "/dev/shm"}}]}],
    )
    def test_shared_memory_of_the_node_is_noted_and_unchanged(self, fields: dict[str, Any]) -> None:
        pod = pod_objects.pod(engine(volumeMounts=MOUNTED if "volumes" in fields else []), **fields)
        decision = attached(self.offloading(), pod)
        assert any("/dev/shm" in note for note in decision.notes)
        assert not any(each["name"] == "kvtier-shm" for each in decision.pod["spec"]["volumes"])

    def test_a_policy_with_an_unsupported_tier_is_skipped(self) -> None:
        tiers = (memory_tier(), {"name": "remote", "lmcache": {"url": "redis://x:1"}})
        decision = inject(
            self.offloading(*tiers), pod_objects.pod(), pod_objects.context(), Settings()
        )
        assert isinstance(decision, Skipped)
        assert decision.reason is SkipReason.NOT_ACCEPTED

    def test_an_unknown_number_of_ranks_is_noted(self) -> None:
        policy = pod_objects.policy(engine={"connector": "LMCache"})
        assert any("localRanks" in note for note in attached(policy, pod_objects.pod()).notes)
        known = attached(policy, pod_objects.pod(engine(args=["-tp", "2"])))
        assert variables(container(known.pod, "vllm"))["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "0.5"
        assert known.notes == ()


def test_the_sidecar_does_not_change_the_engines_memory() -> None:
    pod = pod_objects.pod(
        engine(volumeMounts=MOUNTED, resources={"limits": {"memory": "1Gi"}}), volumes=[SHM]
    )
    found = attached(pod_objects.policy(), pod).pod
    assert volume(found, "shm") == SHM
    assert container(found, "vllm")["resources"] == {"limits": {"memory": "1Gi"}}
