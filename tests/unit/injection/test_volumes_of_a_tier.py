"""A tier with several volumes in pods, in status and in what administrators allow."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support import pod_objects
from tests.support.pod_objects import container, memory_tier
from tests.support.pods import injected_pod, running, status_document, tier_document
from tests.unit.controller.builders import status, view_of

from kvtier.cli import render as local
from kvtier.config.models import FileSystemTierDocument, Structural
from kvtier.errors import ConfigurationError
from kvtier_operator.api.allowlist import AllowedVolume, volume_errors
from kvtier_operator.api.documents import load_policy
from kvtier_operator.api.engine import Connector
from kvtier_operator.api.names import STRUCTURAL_ANNOTATION, TIERD_CONTAINER, tier_volume
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.validation import InvalidDocumentError
from kvtier_operator.controller.cached_policy import claims_of
from kvtier_operator.injection.decision import Injected
from kvtier_operator.injection.inject import inject
from kvtier_operator.render import connectors
from kvtier_operator.render.documents import content_hash
from kvtier_operator.settings import Settings


def disk(name: str, **source: Any) -> dict[str, Any]:
    return {
        "name": name,
        "capacity": "2Gi",
        **(source or {"hostPath": {"path": f"/mnt/{name}/kv"}}),
    }


def disks(*volumes: dict[str, Any], sharing: str = "Node") -> KVTierPolicy:
    files = {"sharing": sharing, "volumes": list(volumes)}
    return pod_objects.policy(memory_tier(), {"name": "nvme", "fileSystem": files})


TWO = disks(disk("d0"), disk("d1"))


def injected(policy: KVTierPolicy) -> dict[str, Any]:
    decision = inject(policy, pod_objects.pod(), pod_objects.context(), Settings())
    assert isinstance(decision, Injected), decision
    return decision.pod


def test_each_volume_is_mounted_at_the_path_that_tierd_is_told() -> None:
    pod = injected(TWO)
    document = Structural.model_validate_json(pod["metadata"]["annotations"][STRUCTURAL_ANNOTATION])
    tier = document.tiers[1]
    assert isinstance(tier, FileSystemTierDocument)
    mounts = {each["mountPath"]: each for each in container(pod, TIERD_CONTAINER)["volumeMounts"]}
    sources = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert [each.path for each in tier.volumes] == [
        "/var/lib/kvtier/tiers/nvme/d0",
        "/var/lib/kvtier/tiers/nvme/d1",
    ]
    for each in tier.volumes:
        mount = mounts[each.path]
        assert mount["subPath"] == f"serving/{pod_objects.POLICY_UID}"
        assert sources[mount["name"]]["hostPath"]["path"] == f"/mnt/{each.name}/kv"


def test_names_of_volumes_differ_and_are_short() -> None:
    names = [tier_volume("a", "b"), tier_volume("a-b"), tier_volume("a", "b-c"),
             tier_volume("a-b", "c"), tier_volume("x" * 63, "y" * 63),
             tier_volume("x" * 63)]  # fmt: skip
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for name in names)


def test_memory_and_disk_of_empty_directories_are_summed() -> None:
    medium = {"emptyDir": {"medium": "Memory"}}
    one = container(injected(disks(disk("d0", **medium), sharing="Pod")), TIERD_CONTAINER)
    two = container(
        injected(disks(disk("d0", **medium), disk("d1", **medium), sharing="Pod")), TIERD_CONTAINER
    )

    def memory(found: dict[str, Any]) -> int:
        return int(found["resources"]["limits"]["memory"])

    assert memory(two) - memory(one) == 2 << 30


def test_every_volume_must_be_allowed() -> None:
    entry = AllowedVolume.model_validate({"namespaces": ["*"], "hostPath": "/mnt/d0"})
    (error,) = volume_errors(TWO, [entry])
    assert error.field == "spec.tiers[1].fileSystem.volumes[1].hostPath.path"
    assert '"/mnt/d1/kv" is not allowed' in error.message


def test_claims_are_those_of_every_volume() -> None:
    claims = [disk(f"d{i}", persistentVolumeClaim={"claimName": f"claim-{i}"}) for i in range(2)]
    assert claims_of(disks(*claims)) == {"nvme/d0": "claim-0", "nvme/d1": "claim-1"}


def test_a_tier_with_network_volumes_is_omitted_while_storage_is_not_ready() -> None:
    policy = disks(disk("d0"), disk("d1", persistentVolumeClaim={"claimName": "c"}))
    context = pod_objects.context(storage_ready=False)
    decision = inject(policy, pod_objects.pod(), context, Settings())
    assert isinstance(decision, Injected)
    text = decision.pod["metadata"]["annotations"][STRUCTURAL_ANNOTATION]
    assert [tier["name"] for tier in json.loads(text)["tiers"]] == ["ram"]


def test_a_capacity_is_live_and_a_disk_is_structural() -> None:
    larger = disks({**disk("d0"), "capacity": "9Gi"}, disk("d1"))
    assert content_hash(larger.spec) == content_hash(TWO.spec)
    assert content_hash(disks(disk("d0")).spec) != content_hash(TWO.spec)


def test_the_status_names_the_volume_that_failed() -> None:
    def pod(name: str, second: str) -> Any:
        volumes = [{"name": "d0", "state": "Healthy"}, {"name": "d1", "state": second}]
        tier = tier_document("nvme", "Degraded", volumes=volumes)
        return view_of(running(injected_pod(name)), status_document(tier))

    found = status(pod("a", "Healthy"), pod("b", "BreakerOpen"), of=TWO).tiers or ()
    assert [(each.name, each.state.value) for each in found[1].volumes or ()] == [
        ("d0", "Healthy"),
        ("d1", "BreakerOpen"),
    ]
    assert found[0].volumes is None


@pytest.mark.parametrize("connector", [Connector.OFFLOADING, Connector.LMCACHE])
def test_other_connectors_refuse_several_volumes(connector: Connector) -> None:
    spec = TWO.spec.model_copy(
        update={"engine": TWO.spec.engine.model_copy(update={"connector": connector})}
    )
    policy = load_policy(
        TWO.model_copy(update={"spec": spec}).model_dump_json(by_alias=True, exclude_unset=True)
    )
    (error,) = connectors.policy_errors(policy)
    assert error.field == "spec.tiers[1].fileSystem.volumes"


def test_an_export_among_volumes_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(InvalidDocumentError, match="nfs"):
        disks(disk("d0", nfs={"server": "nas", "path": "/kv"}))


def test_locally_each_volume_has_a_directory(tmp_path: Any) -> None:
    policy = disks(disk("d0", emptyDir={}), disk("d1"), sharing="Pod")
    options = local.LocalOptions(tier_paths={"nvme/d1": str(tmp_path / "other")})
    written = local.write_topology(policy, tmp_path, options)
    tier = written.topology.structural.tiers[1]
    assert isinstance(tier, FileSystemTierDocument)
    assert [each.path for each in tier.volumes] == [
        str(tmp_path / "tiers" / "nvme" / "d0"),
        str(tmp_path / "other"),
    ]
    with pytest.raises(ConfigurationError, match="nvme/d0, nvme/d1"):
        local.write_topology(policy, tmp_path, local.LocalOptions(tier_paths={"nvme": "/x"}))
