"""What a pod is given."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from tests.support import pod_objects
from tests.support.pod_objects import (
    GUARANTEED,
    POLICY_UID,
    container,
    file_tier,
    memory_tier,
    variables,
    volume,
)

from kvtier.config.models import Structural
from kvtier_operator.api.allowlist import AllowedVolume
from kvtier_operator.api.names import (
    ATTACHED_LABEL,
    HASH_ANNOTATION,
    KEY_VOLUME,
    NO_ACCOUNT_VOLUME,
    NOTES_ANNOTATION,
    PAYLOAD_CONTAINER,
    PAYLOAD_DIRECTORY,
    PAYLOAD_VOLUME,
    POLICY_UID_ANNOTATION,
    RUN_VOLUME,
    SAFE_TO_EVICT_ANNOTATION,
    SERVICE_ACCOUNT_DIRECTORY,
    SKIPPED_ANNOTATION,
    STRUCTURAL_ANNOTATION,
    TIERD_CONTAINER,
    TOPOLOGY_VOLUME,
)
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.injection.decision import AdmissionContext, Injected
from kvtier_operator.injection.inject import inject
from kvtier_operator.injection.resources import parse_amount
from kvtier_operator.render.documents import content_hash
from kvtier_operator.settings import Images, Settings

MIB = 1 << 20
HOST = {"hostPath": {"path": "/mnt/nvme/kv"}}
NFS = {"nfs": {"server": "nas.example", "path": "/kv/chat"}}


def attached(
    policy: KVTierPolicy,
    pod: dict[str, Any],
    around: AdmissionContext | None = None,
    settings: Settings | None = None,
) -> Injected:
    decision = inject(policy, pod, around or pod_objects.context(), settings or Settings())
    assert isinstance(decision, Injected), decision
    return decision


def structural(pod: dict[str, Any]) -> Structural:
    return Structural.model_validate_json(pod["metadata"]["annotations"][STRUCTURAL_ANNOTATION])


class TestOrder:
    def test_payload_and_tierd_are_added_after_the_pods_init_containers(self) -> None:
        own = [
            {"name": "istio-proxy", "image": "proxy", "restartPolicy": "Always"},
            {"name": "download", "image": "x"},
        ]
        pod = attached(pod_objects.policy(), pod_objects.pod(initContainers=own)).pod
        names = [each["name"] for each in pod["spec"]["initContainers"]]
        assert names == ["istio-proxy", "download", PAYLOAD_CONTAINER, TIERD_CONTAINER]

    def test_a_mesh_proxy_before_the_engine_is_not_the_engine(self) -> None:
        mesh = {"name": "istio-proxy", "image": "istio/proxyv2"}
        pod = attached(pod_objects.policy(), pod_objects.pod(mesh, pod_objects.engine())).pod
        assert pod["spec"]["containers"][0] == mesh
        assert "KVTIER_TOPOLOGY" in variables(container(pod, "vllm"))

    def test_an_injected_pod_is_returned_unchanged(self) -> None:
        policy = pod_objects.policy(memory_tier(), file_tier("nvme", HOST))
        once = attached(policy, pod_objects.pod()).pod
        assert attached(policy, once).pod == once

    def test_later_changes_of_another_webhook_are_kept(self) -> None:
        once = attached(pod_objects.policy(), pod_objects.pod()).pod
        once["spec"]["containers"].append({"name": "late", "image": "x"})
        assert attached(pod_objects.policy(), once).pod == once


class TestTierd:
    def test_memory_request_and_limit_are_the_pool_and_a_fixed_overhead(self) -> None:
        pod = attached(pod_objects.policy(memory_tier("10Gi")), pod_objects.pod()).pod
        resources = container(pod, TIERD_CONTAINER)["resources"]
        assert (
            resources["requests"]["memory"]
            == resources["limits"]["memory"]
            == str((10 * 1024 + 512 + 256) * MIB)
        )
        assert (resources["requests"]["cpu"], resources["limits"]["cpu"]) == ("1", "8")

    @pytest.mark.parametrize("capacity", ["1Gi", "1000000001", "64Gi"])
    def test_the_shared_volume_has_room_for_pool_slot_table_and_reserve(
        self, capacity: str
    ) -> None:
        policy = pod_objects.policy(memory_tier(capacity))
        size = int(
            volume(attached(policy, pod_objects.pod()).pod, RUN_VOLUME)["emptyDir"]["sizeLimit"]
        )
        memory = policy.spec.tiers[0].memory
        assert memory is not None
        assert size >= memory.capacity.size_bytes + 72 * MIB

    def test_a_file_tier_in_memory_counts_for_the_container_that_writes_it(self) -> None:
        tier = file_tier("ramdisk", {"emptyDir": {"medium": "Memory", "sizeLimit": "3Gi"}}, "Pod")
        pod = attached(pod_objects.policy(memory_tier(), tier), pod_objects.pod()).pod
        assert container(pod, TIERD_CONTAINER)["resources"]["limits"]["memory"] == str(
            (4 * 1024 + 768) * MIB
        )

    @pytest.mark.parametrize(
        ("tiers", "limited", "expected"),
        [
            ([], False, None),
            ([], True, 512),
            ([{"emptyDir": {}}], False, 1536),
            ([HOST], False, None),
        ],
    )
    def test_ephemeral_storage_is_requested_in_addition_to_the_engines(
        self, tiers: list[dict[str, Any]], limited: bool, expected: int | None
    ) -> None:
        files = [
            file_tier("files", source, "Pod" if "emptyDir" in source else "Node")
            for source in tiers
        ]
        resources = {"limits": {"ephemeral-storage": "10Gi"}} if limited else None
        pod = attached(
            pod_objects.policy(memory_tier(), *files),
            pod_objects.pod(pod_objects.engine(resources=resources)),
        ).pod
        found = container(pod, TIERD_CONTAINER)["resources"]
        expected_limit = None if expected is None else str(expected * MIB)
        assert (
            found["requests"].get("ephemeral-storage")
            == found["limits"].get("ephemeral-storage")
            == expected_limit
        )

    def test_tierd_has_no_probe_that_delays_or_restarts_the_pod(self) -> None:
        tierd = container(attached(pod_objects.policy(), pod_objects.pod()).pod, TIERD_CONTAINER)
        assert not {"startupProbe", "livenessProbe", "readinessProbe"} & tierd.keys()
        assert tierd["restartPolicy"] == "Always"
        assert tierd["lifecycle"]["preStop"]["exec"]["command"][:2] == ["kvtier-sidecar", "drain"]

    def test_only_tierd_mounts_the_storage(self) -> None:
        pod = attached(
            pod_objects.policy(memory_tier(), file_tier("nvme", HOST)), pod_objects.pod()
        ).pod
        mounted = {
            each["name"]: [mount["name"] for mount in each.get("volumeMounts", ())]
            for each in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
        }
        assert [name for name, mounts in mounted.items() if "kvtier-tier-nvme" in mounts] == [
            TIERD_CONTAINER
        ]
        assert set(mounted["vllm"]) == {RUN_VOLUME, TOPOLOGY_VOLUME, PAYLOAD_VOLUME}

    def test_injected_containers_have_no_service_account_token(self) -> None:
        pod = attached(pod_objects.policy(), pod_objects.pod()).pod
        for name in (TIERD_CONTAINER, PAYLOAD_CONTAINER):
            mounts = {
                mount["mountPath"]: mount["name"] for mount in container(pod, name)["volumeMounts"]
            }
            assert mounts[SERVICE_ACCOUNT_DIRECTORY] == NO_ACCOUNT_VOLUME

    def test_volumes_of_config_maps_and_secrets_are_optional(self) -> None:
        tiers = [
            memory_tier(),
            {
                "name": "remote",
                "lmcache": {"url": "redis://cache:6379", "credentialsSecretRef": {"name": "auth"}},
            },
        ]
        policy = pod_objects.policy(*tiers, isolation={"keySecretRef": {"name": "tenant"}})
        pod = attached(policy, pod_objects.pod()).pod
        sources = [each.get("secret") for each in pod["spec"]["volumes"] if "secret" in each]
        sources += [
            each["configMap"] for each in volume(pod, TOPOLOGY_VOLUME)["projected"]["sources"][1:]
        ]
        assert len(sources) == 4
        assert all(source["optional"] for source in sources)
        mounts = {mount["mountPath"] for mount in container(pod, TIERD_CONTAINER)["volumeMounts"]}
        document = structural(pod)
        assert document.isolation.key_directory == "/etc/kvtier/isolation"
        keys = volume(pod, KEY_VOLUME)["secret"]
        # Every entry, because the names are the ids of keys; optional, so that a pod starts.
        assert keys == {"secretName": "tenant", "optional": True}
        engine = {mount["mountPath"] for mount in container(pod, "vllm")["volumeMounts"]}
        assert "/etc/kvtier/isolation" not in engine
        assert {"/etc/kvtier/isolation", "/etc/kvtier/secrets/remote"} <= mounts

    def test_credentials_of_a_store_are_mounted_files_and_nothing_else(self) -> None:
        remote = {
            "name": "remote",
            "lmcache": {"url": "rediss://cache:6380", "credentialsSecretRef": {"name": "auth"}},
        }
        policy = pod_objects.policy(memory_tier(), remote)
        pod = attached(policy, pod_objects.pod()).pod
        plain = attached(pod_objects.policy(memory_tier()), pod_objects.pod()).pod
        (tier,) = structural(pod).tiers[1:]
        assert tier.credentials_directory == "/etc/kvtier/secrets/remote"
        (name,) = [
            each["name"]
            for each in pod["spec"]["volumes"]
            if each.get("secret", {}).get("secretName") == "auth"
        ]
        holders = [
            each["name"]
            for kind in ("containers", "initContainers")
            for each in pod["spec"].get(kind, ())
            if name in {mount["name"] for mount in each.get("volumeMounts", ())}
        ]
        assert holders == [TIERD_CONTAINER], "the engine has no credentials"
        (mount,) = [
            each for each in container(pod, TIERD_CONTAINER)["volumeMounts"] if each["name"] == name
        ]
        assert mount["readOnly"]
        # Memory for the process that runs LMCache.
        limits = [
            parse_amount(container(each, TIERD_CONTAINER)["resources"]["limits"]["memory"])
            for each in (pod, plain)
        ]
        assert limits[0] - limits[1] == 1 << 30


class TestSecurity:
    @pytest.mark.parametrize(
        ("own", "pod_wide", "copied"),
        [
            ({}, {}, {"runAsNonRoot": True}),
            (
                {"runAsUser": 1000, "runAsGroup": 2000},
                {},
                {"runAsUser": 1000, "runAsGroup": 2000, "runAsNonRoot": True},
            ),
            ({"runAsUser": 0}, {}, {"runAsUser": 0}),
            ({}, {"runAsUser": 0}, {}),
            ({}, {"runAsUser": 1000}, {"runAsNonRoot": True}),
            (
                {"runAsUser": 7, "privileged": True},
                {"runAsUser": 0},
                {"runAsUser": 7, "runAsNonRoot": True},
            ),
            (
                {"seLinuxOptions": {"level": "s0:c1"}},
                {},
                {"seLinuxOptions": {"level": "s0:c1"}, "runAsNonRoot": True},
            ),
        ],
    )
    def test_injected_containers_run_as_the_engines_user_and_meet_the_restricted_level(
        self, own: dict[str, Any], pod_wide: dict[str, Any], copied: dict[str, Any]
    ) -> None:
        pod = pod_objects.pod(pod_objects.engine(securityContext=own), securityContext=pod_wide)
        found = attached(pod_objects.policy(), pod).pod
        for name in (TIERD_CONTAINER, PAYLOAD_CONTAINER):
            assert container(found, name)["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
                "seccompProfile": {"type": "RuntimeDefault"},
                **copied,
            }

    def test_the_storage_group_is_added_once_and_only_for_file_tiers(self) -> None:
        given = {"fsGroup": 5, "supplementalGroups": [7, 3000]}
        files = pod_objects.policy(memory_tier(), file_tier("nvme", HOST))
        assert (
            attached(files, pod_objects.pod(securityContext=given)).pod["spec"]["securityContext"]
            == given
        )
        assert attached(files, pod_objects.pod()).pod["spec"]["securityContext"] == {
            "supplementalGroups": [3000]
        }
        assert (
            "securityContext" not in attached(pod_objects.policy(), pod_objects.pod()).pod["spec"]
        )


class TestStorage:
    @pytest.mark.parametrize("volume_source", [HOST, NFS])
    def test_a_directory_is_mounted_with_a_sub_path_per_policy(
        self, volume_source: dict[str, Any]
    ) -> None:
        mount = self._mount(volume_source, Settings())
        assert mount["subPath"] == f"serving/{POLICY_UID}"

    @pytest.mark.parametrize(
        "volume_source", [{"emptyDir": {}}, {"persistentVolumeClaim": {"claimName": "kv"}}]
    )
    def test_a_claim_is_mounted_without_a_sub_path(self, volume_source: dict[str, Any]) -> None:
        assert "subPath" not in self._mount(volume_source, Settings())

    def test_the_longest_allow_list_entry_decides_about_sharing(self) -> None:
        wide = AllowedVolume.model_validate(
            {"namespaces": ["*"], "hostPath": "/mnt", "shared": True}
        )
        narrow = AllowedVolume.model_validate({"namespaces": ["serving"], "hostPath": "/mnt/nvme"})
        other = AllowedVolume.model_validate(
            {"namespaces": ["other"], "hostPath": "/mnt/nvme/kv", "shared": True}
        )
        assert "subPath" not in self._mount(HOST, Settings(allowed_volumes=(wide,)))
        assert "subPath" in self._mount(HOST, Settings(allowed_volumes=(wide, narrow)))
        assert "subPath" in self._mount(HOST, Settings(allowed_volumes=(narrow, other)))

    def test_network_volumes_are_omitted_while_storage_is_not_ready(self) -> None:
        claim = {"persistentVolumeClaim": {"claimName": "kv"}}
        policy = pod_objects.policy(
            memory_tier(),
            file_tier("nvme", HOST),
            file_tier("shared", NFS, "Cluster"),
            file_tier("claim", claim),
        )
        decision = attached(policy, pod_objects.pod(), pod_objects.context(storage_ready=False))
        document = structural(decision.pod)
        assert [tier.name for tier in document.tiers] == ["ram", "nvme"]
        assert set(document.live.tiers) == {"ram", "nvme"}
        assert document.content_hash == content_hash(policy.spec)
        assert not any("persistentVolumeClaim" in each for each in decision.pod["spec"]["volumes"])
        assert "shared, claim" in decision.notes[0]
        assert json.loads(decision.pod["metadata"]["annotations"][NOTES_ANNOTATION]) == list(
            decision.notes
        )

    def test_nfs_is_omitted_from_a_pod_with_a_user_namespace(self) -> None:
        policy = pod_objects.policy(
            memory_tier(), file_tier("nvme", HOST), file_tier("shared", NFS, "Cluster")
        )
        decision = attached(policy, pod_objects.pod(hostUsers=False))
        assert [tier.name for tier in structural(decision.pod).tiers] == ["ram", "nvme"]
        assert any("hostUsers" in note for note in decision.notes)

    def _mount(self, source: dict[str, Any], settings: Settings) -> dict[str, Any]:
        policy = pod_objects.policy(memory_tier(), file_tier("files", source))
        tierd = container(
            attached(policy, pod_objects.pod(), settings=settings).pod, TIERD_CONTAINER
        )
        return next(
            mount for mount in tierd["volumeMounts"] if mount["name"] == "kvtier-tier-files"
        )


class TestDelivery:
    def test_an_image_with_the_connector_gets_no_payload_and_keeps_its_python_path(self) -> None:
        pod = attached(pod_objects.policy(engine={"delivery": "Image"}), pod_objects.pod()).pod
        assert [each["name"] for each in pod["spec"]["initContainers"]] == [TIERD_CONTAINER]
        assert "PYTHONPATH" not in variables(container(pod, "vllm"))

    def test_an_image_volume_replaces_the_init_container(self) -> None:
        settings = Settings(images=Images(payload="kvtier/payload@sha256:0"))
        policy = pod_objects.policy(engine={"delivery": "ImageVolume"})
        pod = attached(
            policy, pod_objects.pod(), pod_objects.context(kubelet_versions=("v1.37.2",)), settings
        ).pod
        assert [each["name"] for each in pod["spec"]["initContainers"]] == [TIERD_CONTAINER]
        assert volume(pod, PAYLOAD_VOLUME)["image"]["reference"] == "kvtier/payload@sha256:0"
        mount = container(pod, "vllm")["volumeMounts"][-1]
        assert (mount["mountPath"], mount["subPath"]) == (PAYLOAD_DIRECTORY, "opt/kvtier/engine")

    def test_a_kubelet_without_image_volumes_by_default_is_noted(self) -> None:
        policy = pod_objects.policy(engine={"delivery": "ImageVolume"})
        decision = attached(
            policy, pod_objects.pod(), pod_objects.context(kubelet_versions=("v1.33.0",))
        )
        assert any("ImageVolume" in note for note in decision.notes)


class TestPod:
    def test_annotations_have_the_policy_and_the_structure(self) -> None:
        policy = pod_objects.policy()
        pod = pod_objects.pod(metadata={"annotations": {SKIPPED_ANNOTATION: "{}", "own": "kept"}})
        found = attached(policy, pod).pod["metadata"]
        assert found["labels"][ATTACHED_LABEL] == "true"
        assert found["annotations"][POLICY_UID_ANNOTATION] == POLICY_UID
        assert found["annotations"][HASH_ANNOTATION] == content_hash(policy.spec)
        assert found["annotations"]["own"] == "kept"
        assert SKIPPED_ANNOTATION not in found["annotations"]
        assert NOTES_ANNOTATION not in found["annotations"]

    def test_node_local_volumes_are_declared_safe_to_evict(self) -> None:
        pod = pod_objects.pod(metadata={"annotations": {SAFE_TO_EVICT_ANNOTATION: "cache"}})
        found = attached(pod_objects.policy(memory_tier(), file_tier("nvme", HOST)), pod).pod
        named = found["metadata"]["annotations"][SAFE_TO_EVICT_ANNOTATION].split(",")
        assert named == [
            "cache",
            "kvtier-run",
            "kvtier-payload",
            "kvtier-no-account",
            "kvtier-tier-nvme",
        ]

    def test_the_pull_secret_is_added_once(self) -> None:
        settings = Settings(images=Images(pull_secret="kvtier-pull"))
        for given in ([], [{"name": "own"}], [{"name": "kvtier-pull"}]):
            found = attached(
                pod_objects.policy(), pod_objects.pod(imagePullSecrets=given), settings=settings
            ).pod
            names = [each["name"] for each in found["spec"]["imagePullSecrets"]]
            assert names == [
                *(each["name"] for each in given if each["name"] != "kvtier-pull"),
                "kvtier-pull",
            ]

    @pytest.mark.parametrize("taken", [[], [9400], [9400, 9401]])
    def test_a_port_of_the_pod_is_not_used_again(self, taken: list[int]) -> None:
        pod = pod_objects.pod(pod_objects.engine(ports=[{"containerPort": port} for port in taken]))
        found = attached(pod_objects.policy(), pod).pod
        port = container(found, TIERD_CONTAINER)["ports"][0]["containerPort"]
        assert port == 9400 + len(taken) == structural(found).http.port

    @pytest.mark.parametrize(("daemon", "name"), [("Sidecar", TIERD_CONTAINER), ("Engine", "vllm")])
    def test_with_host_network_no_port_is_declared_and_tierd_derives_it_from_the_pods_uid(
        self, daemon: str, name: str
    ) -> None:
        policy = pod_objects.policy(engine={"daemon": daemon})
        pod = pod_objects.pod(pod_objects.engine(resources=GUARANTEED), hostNetwork=True)
        found = attached(policy, pod).pod
        assert structural(found).http.port == 0
        spec = found["spec"]
        assert all("ports" not in each for each in spec["containers"] + spec["initContainers"])
        assert {
            "name": "KVTIER_HOST_NETWORK_POD",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}},
        } in container(found, name)["env"]
        # Elsewhere the variable is absent: the port is then the document's.
        other = attached(policy, pod_objects.pod(*pod["spec"]["containers"])).pod
        assert "KVTIER_HOST_NETWORK_POD" not in json.dumps(other)

    def test_a_pod_that_openshift_admitted_is_given_no_seccomp_profile(self) -> None:
        pod = pod_objects.pod(metadata={"annotations": {"openshift.io/scc": "anyuid"}})
        found = attached(pod_objects.policy(), pod).pod
        for name in (TIERD_CONTAINER, PAYLOAD_CONTAINER):
            context = container(found, name)["securityContext"]
            assert "seccompProfile" not in context
            assert context["capabilities"] == {"drop": ["ALL"]}

    def test_the_input_and_the_grace_period_do_not_change(self) -> None:
        pod = pod_objects.pod(
            pod_objects.engine(env=[{"name": "PYTHONPATH", "value": "/a"}]),
            terminationGracePeriodSeconds=1,
        )
        before = copy.deepcopy(pod)
        found = attached(pod_objects.policy(memory_tier(), file_tier("nvme", HOST)), pod).pod
        assert pod == before
        assert found["spec"]["terminationGracePeriodSeconds"] == 1
