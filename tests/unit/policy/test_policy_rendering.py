"""What a policy means: topology documents, Kubernetes objects, and what attaches an engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.policies import REMOVED, changed, complete_policy

from kvtier.cli import render as local
from kvtier.config.loader import load
from kvtier.config.models import Daemon, FileSystemTierDocument, HttpEndpoint, LiveTier
from kvtier.errors import ConfigurationError
from kvtier_operator.api.documents import load_policy
from kvtier_operator.api.engine import EngineType
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.render import connectors, documents, engine, volumes
from kvtier_operator.render.documents import (
    content_hash,
    live,
    local_run_directory,
    pod_placement,
    structural,
)


def _policy(changes: dict[str, Any] | None = None) -> KVTierPolicy:
    return load_policy(json.dumps(changed(complete_policy(), changes or {})))


def _local(changes: dict[str, Any] | None = None) -> KVTierPolicy:
    return _policy({"spec.tiers": complete_policy()["spec"]["tiers"][:2], **(changes or {})})


class TestContentHash:
    @pytest.mark.parametrize(
        "changes",
        [
            {"spec.minLoadTokens": 1024},
            {"spec.minStoreTokens": 1024},
            {"spec.selection": "Weighted"},
            {"spec.tiers.1.loadWeight": 7},
            {"spec.tiers.1.lookupTimeoutMilliseconds": 7},
            {"spec.tiers.1.loadTimeoutSeconds": 7},
            {"spec.tiers.1.storePolicy": "None"},
            {"spec.tiers.1.maxPendingStoreBytes": "7Gi"},
            {"spec.tiers.1.maxWriteBytesPerSecond": "7M"},
            {"spec.tiers.1.maxWriteBytesPerSecond": REMOVED},
            {"spec.tiers.1.fileSystem.capacity": "7Gi"},
            {"spec.tiers.1.fileSystem.highWatermarkPercent": 99},
            {"spec.tiers.1.fileSystem.lowWatermarkPercent": 7},
            {"spec.tiers.1.fileSystem.retentionSeconds": 7},
            {"spec.tiers.1.fileSystem.sync": "Data"},
            {"spec.tiers.3.lmcache.capacity": "7Ti"},
            {"spec.breaker.failureThreshold": 7},
            {"spec.breaker": REMOVED},
            {"spec.attach.startTimeoutSeconds": 77},
            {"spec.attach.retrySeconds": 77},
            {"spec.rollout.strategy": "RestartWorkloads"},
            {"spec.monitoring.podMonitor": "Disabled"},
            {"metadata.labels": {"a": "b"}},
            {"metadata.name": "other"},
        ],
        ids=str,
    )
    def test_does_not_change_with_live_fields_and_metadata(self, changes: dict[str, Any]) -> None:
        assert content_hash(_policy(changes).spec) == content_hash(_policy().spec)

    @pytest.mark.parametrize(
        "changes",
        [
            {"spec.podSelector.matchLabels.app": "other"},
            {"spec.engine.type": "ATOM"},
            {"spec.engine.containerName": "other"},
            {"spec.engine.daemon": "Engine"},
            {"spec.engine.localRanks": 4},
            {"spec.engine.hashSeed": "1"},
            {"spec.chunkTokens": 512},
            {"spec.tiers.1.name": "disk"},
            {"spec.tiers.0.memory.capacity": "65Gi"},
            {"spec.tiers.0.memory.persistence": "Process"},
            {"spec.tiers.1.fileSystem.sharing": "Pod"},
            {"spec.tiers.1.fileSystem.directIO": "Never"},
            {"spec.tiers.1.fileSystem.readThreads": 9},
            {"spec.tiers.1.fileSystem.volume.hostPath.path": "/other"},
            {"spec.tiers.2.fileSystem.volume.nfs.mountOptions": ["nconnect=8"]},
            {"spec.tiers.3.lmcache.url": "redis://other:1"},
            {"spec.tiers.3": REMOVED},
            {"spec.isolation.salt": "s"},
            {"spec.isolation": {"keySecretRef": {"name": "k"}, "encryption": "AES256GCM"}},
            {"spec.security.storageGid": 3001},
            {"spec.resources.daemon.limits.cpu": "9"},
            {"spec.attach.mode": "ConfigMapOnly"},
        ],
        ids=str,
    )
    def test_changes_with_every_structural_field(self, changes: dict[str, Any]) -> None:
        assert content_hash(_policy(changes).spec) != content_hash(_policy().spec)

    def test_changes_with_the_order_of_tiers(self) -> None:
        tiers = complete_policy()["spec"]["tiers"]
        swapped = [tiers[0], tiers[2], tiers[1], tiers[3]]
        assert content_hash(_policy({"spec.tiers": swapped}).spec) != content_hash(_policy().spec)

    def test_takes_sizes_by_value(self) -> None:
        assert content_hash(
            _policy({"spec.tiers.0.memory.capacity": "65536Mi"}).spec
        ) == content_hash(_policy().spec)

    def test_does_not_hold_defaults(self) -> None:
        # A field left out and the same field with its default are different texts: defaults change,
        # texts do not.
        bare = _policy({"spec.chunkTokens": REMOVED})
        given = _policy({"spec.chunkTokens": bare.spec.tokens_per_chunk})
        assert bare.spec.tokens_per_chunk == given.spec.tokens_per_chunk
        assert content_hash(bare.spec) != content_hash(given.spec)

    def test_is_the_same_whether_an_object_of_live_fields_was_filled_in(self) -> None:
        bare = _policy({"spec.attach": REMOVED})
        filled = _policy({"spec.attach": {"startTimeoutSeconds": 120, "retrySeconds": 600}})
        assert content_hash(bare.spec) == content_hash(filled.spec)

    def test_has_eight_hex_digits_and_never_changes_by_itself(self) -> None:
        # A new value here means that every pod of every user is reported as outdated after an
        # upgrade.
        before = _policy({"spec.isolation.encryption": REMOVED})
        assert content_hash(before.spec) == "b35c35b8"


class TestTopology:
    def test_documents_have_the_values_of_the_policy(self) -> None:
        policy = _policy()
        document = structural(policy, pod_placement(policy), generation=4)
        assert [tier.name for tier in document.tiers] == ["ram", "nvme", "shared", "remote"]
        assert document.tiers[0].model_dump() == {
            "kind": "memory",
            "name": "ram",
            "capacity_bytes": 64 << 30,
            "eviction_policy": "LRU",
            "persistence": "Pod",
        }
        assert document.tiers[1].model_dump() == {
            "kind": "fileSystem",
            "name": "nvme",
            "path": "/var/lib/kvtier/tiers/nvme",
            "volumes": (),
            "sharing": "Node",
            "direct_io": "Auto",
            "read_threads": 8,
            "write_threads": 4,
        }
        assert (
            document.tiers[3].model_dump()["credentials_directory"] == "/etc/kvtier/secrets/remote"
        )
        assert (document.storage_gid, document.local_ranks, document.http.host) == (
            3000,
            8,
            "0.0.0.0",
        )
        assert document.live.generation == 4
        assert document.live.tiers["nvme"] == LiveTier(
            store_policy="Reused",
            max_pending_store_bytes=4 << 30,
            max_write_bytes_per_second=200_000_000,
            capacity_bytes=500 << 30,
            min_free_percent=10,
        )
        assert document.live.tiers["shared"].min_free_percent == 0
        assert document.live.tiers["remote"].capacity_bytes == 1 << 40
        assert document.live.tiers["ram"].capacity_bytes is None

    def test_live_values_are_those_of_the_policy(self) -> None:
        values = live(
            _policy(
                {
                    "spec.selection": "Weighted",
                    "spec.minLoadTokens": 0,
                    "spec.minStoreTokens": 4096,
                    "spec.breaker": {"failureThreshold": 2, "periodSeconds": 3},
                    "spec.tiers.1.fileSystem.sync": "Data",
                }
            )
        )
        assert (values.selection, values.min_load_tokens) == ("Weighted", 0)
        assert values.min_store_tokens == 4096
        assert (values.breaker.failure_threshold, values.breaker.period_seconds) == (2, 3)
        assert values.tiers["nvme"].sync_data

    def test_volumes_have_a_path_and_a_capacity_each(self) -> None:
        tier = {
            "name": "nvme",
            "fileSystem": {
                "sharing": "Node",
                "volumes": [
                    {"name": "d0", "capacity": "2Gi", "hostPath": {"path": "/mnt/0"}},
                    {"name": "d1", "capacity": "3Gi", "persistentVolumeClaim": {"claimName": "c"}},
                ],
            },
        }
        policy = _policy({"spec.tiers.1": tier})
        document = documents.structural(policy, pod_placement(policy))
        disk = document.tiers[1]
        assert isinstance(disk, FileSystemTierDocument)
        assert disk.path == ""
        assert [(each.name, each.path) for each in disk.volumes] == [
            ("d0", "/var/lib/kvtier/tiers/nvme/d0"),
            ("d1", "/var/lib/kvtier/tiers/nvme/d1"),
        ]
        values = live(policy).tiers["nvme"]
        assert values.capacity_bytes == 5 << 30
        assert values.volume_capacity_bytes == {"d0": 2 << 30, "d1": 3 << 30}
        assert values.min_free_percent == 15
        assert volumes.pod_volume(policy, policy.spec.volume("nvme/d0")) == {
            "hostPath": {"path": "/mnt/0", "type": "Directory"}
        }
        assert volumes.claim_name(policy, policy.spec.volume("nvme/d1")) == "c"

    @pytest.mark.parametrize(("volume", "given", "kept"), [
        ({"hostPath": {"path": "/mnt/nvme/kv"}}, None, (0, 15)),
        ({"emptyDir": {}}, None, (0, 15)),
        ({"emptyDir": {"medium": "Memory"}}, None, (0, 0)),
        ({"persistentVolumeClaim": {"claimName": "mine"}}, None, (0, 0)),
        ({"nfs": {"server": "nas.example", "path": "/kv"}}, None, (0, 0)),
        ({"hostPath": {"path": "/mnt/nvme/kv"}}, 0, (0, 0)),
        ({"hostPath": {"path": "/mnt/nvme/kv"}}, "50Gi", (50 << 30, 0)),
        ({"nfs": {"server": "nas.example", "path": "/kv"}}, "5%", (0, 5)),
    ])  # fmt: skip
    def test_min_free_has_a_default_on_disks_of_a_node(
        self, volume: dict[str, Any], given: object, kept: tuple[int, int]
    ) -> None:
        changes = {
            "spec.tiers.1.fileSystem.volume": volume,
            "spec.tiers.1.fileSystem.minFree": REMOVED if given is None else given,
        }
        values = live(_policy(changes)).tiers["nvme"]
        assert (values.min_free_bytes, values.min_free_percent) == kept

    def test_a_fraction_of_a_byte_is_rounded_up(self) -> None:
        assert (
            live(_policy({"spec.tiers.1.fileSystem.capacity": "1.5"})).tiers["nvme"].capacity_bytes
            == 2
        )

    def test_a_written_directory_reads_back_as_the_same(self, tmp_path: Path) -> None:
        written = local.write_topology(_local(), tmp_path, local.LocalOptions(generation=3))
        assert load(tmp_path) == written.topology

    def test_writing_twice_gives_the_same_bytes(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            local.write_topology(_local(), tmp_path / name)
        for file in ("structural.json", "live.json"):
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
            "live.json",
            "structural.json",
        ]

    def test_file_tiers_without_kubernetes_get_a_directory(self, tmp_path: Path) -> None:
        written = local.write_topology(
            _local({"spec.tiers.1.fileSystem.volume": {"emptyDir": {}}}), tmp_path
        )
        disk = written.topology.structural.tiers[1]
        assert isinstance(disk, FileSystemTierDocument)
        assert Path(disk.path).parent == tmp_path / local.TIERS_DIRECTORY
        assert Path(disk.path).parent.is_dir()

    def test_an_explicit_directory_of_a_tier_is_kept(self, tmp_path: Path) -> None:
        policy = _local()
        names = [tier.name for tier in policy.spec.tiers if tier.file_system is not None]
        local.write_topology(
            policy,
            tmp_path,
            local.LocalOptions(tier_paths={name: str(tmp_path / "x" / name) for name in names}),
        )
        assert not (tmp_path / local.TIERS_DIRECTORY).exists()

    def test_the_files_can_be_read_by_other_users(self, tmp_path: Path) -> None:
        local.write_topology(_local(), tmp_path)
        assert (tmp_path / "live.json").stat().st_mode & 0o777 == 0o644

    def test_on_this_machine_the_engine_starts_tierd_and_files_keep_their_group(
        self, tmp_path: Path
    ) -> None:
        document = local.place_topology(
            _local({"spec.security": REMOVED}), tmp_path
        ).topology.structural
        assert (document.daemon, document.storage_gid, document.http.host) == (
            Daemon.ENGINE,
            None,
            "127.0.0.1",
        )
        named = local.place_topology(
            _local(), tmp_path, local.LocalOptions(daemon=Daemon.SIDECAR)
        ).topology.structural
        assert (named.daemon, named.storage_gid) == (Daemon.SIDECAR, 3000)

    def test_a_directory_given_for_a_tier_wins(self, tmp_path: Path) -> None:
        placed = local.place_topology(
            _local(),
            tmp_path,
            local.LocalOptions(
                tier_paths={"nvme": str(tmp_path / "x")},
                run_directory=str(tmp_path / "run"),
            ),
        )
        assert placed.topology.structural.tiers[1].model_dump()["path"] == str(tmp_path / "x")
        assert placed.topology.structural.run_directory == str(tmp_path / "run")
        assert placed.notes == ()

    def test_a_host_path_is_itself_and_other_volumes_get_a_directory_with_a_note(
        self, tmp_path: Path
    ) -> None:
        assert (
            local.place_topology(_local(), tmp_path)
            .topology.structural.tiers[1]
            .model_dump()["path"]
            == "/mnt/nvme/kv"
        )
        for volume in (
            {"emptyDir": {}},
            {"persistentVolumeClaim": {"claimName": "c"}},
            {"claimTemplate": {}},
        ):
            placed = local.place_topology(
                _local({"spec.tiers.1.fileSystem.volume": volume}), tmp_path
            )
            assert placed.topology.structural.tiers[1].model_dump()["path"] == str(
                tmp_path / "tiers" / "nvme"
            )
            assert next(iter(volume)) in placed.notes[0]

    def test_an_export_needs_a_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"nas.example:/kv.*--tier-path shared=DIR"):
            local.place_topology(_policy(), tmp_path)
        assert (
            local.place_topology(
                _policy(), tmp_path, local.LocalOptions(tier_paths={"shared": "/mnt"})
            )
            .topology.structural.tiers[2]
            .name
            == "shared"
        )

    def test_a_directory_for_an_unknown_tier_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"disk.*nvme"):
            local.place_topology(
                _local(), tmp_path, local.LocalOptions(tier_paths={"disk": "/mnt"})
            )

    def test_users_and_policies_have_separate_run_directories(self) -> None:
        policy = _policy()
        directories = {
            local_run_directory(policy, 1),
            local_run_directory(policy, 2),
            local_run_directory(_policy({"metadata.namespace": "other"}), 1),
        }
        assert len(directories) == 3
        assert local_run_directory(policy, 1).startswith("/dev/shm/kvtier-chat-70b-")
        assert local_run_directory(policy, 1) == local_run_directory(policy, 1)

    def test_the_longest_name_leaves_room_for_a_socket(self) -> None:
        directory = local_run_directory(_policy({"metadata.name": "p" * 63}), os.getuid())
        assert len(f"{directory}/tierd.sock") < 108


class TestEngine:
    def test_arguments_are_vllms(self) -> None:
        flag, value = engine.arguments("/topology")
        assert flag == "--kv-transfer-config"
        assert json.loads(value) == {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.engines.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"topology": "/topology"},
        }

    @pytest.mark.parametrize(
        ("payload", "inherited", "expected"),
        [
            (None, {}, {"PYTHONHASHSEED": "0"}),
            ("/p", {}, {"PYTHONPATH": "/p", "PYTHONHASHSEED": "0"}),
            ("/p", {"PYTHONPATH": "/a:/p:/b:"}, {"PYTHONPATH": "/p:/a:/b", "PYTHONHASHSEED": "0"}),
            (None, {"PYTHONPATH": "/a"}, {"PYTHONHASHSEED": "0"}),
            (None, {"PYTHONHASHSEED": "7"}, {"PYTHONHASHSEED": "7"}),
            (None, {"PYTHONHASHSEED": ""}, {"PYTHONHASHSEED": "0"}),
            (None, {"VLLM_PLUGINS": "a,b"}, {"PYTHONHASHSEED": "0", "VLLM_PLUGINS": "a,b,kvtier"}),
            (
                None,
                {"VLLM_PLUGINS": "kvtier,a"},
                {"PYTHONHASHSEED": "0", "VLLM_PLUGINS": "kvtier,a"},
            ),
            (None, {"VLLM_PLUGINS": ""}, {"PYTHONHASHSEED": "0", "VLLM_PLUGINS": "kvtier"}),
        ],
        ids=str,
    )
    def test_the_environment_extends_what_is_there(
        self, payload: str | None, inherited: dict[str, str], expected: dict[str, str]
    ) -> None:
        document = structural(_policy(), pod_placement(_policy()))
        variables = engine.environment(document, "/topology", payload, inherited)
        assert variables == {"KVTIER_TOPOLOGY": "/topology", **expected}

    def test_a_hash_seed_that_is_set_otherwise_is_reported(self) -> None:
        document = structural(_policy(), pod_placement(_policy()))
        assert engine.conflicts(document, {"PYTHONHASHSEED": "0"}) == []
        assert "7" in engine.conflicts(document, {"PYTHONHASHSEED": "7"})[0]

    def test_a_policy_that_cannot_be_rendered_is_rejected(self) -> None:
        with pytest.raises(ConfigurationError, match=r"spec\.engine"):
            engine.check(_policy({"spec.engine.connector": "LMCache"}))

    def test_atom_gets_the_module_that_registers_the_connector(self) -> None:
        policy = _policy({"spec.engine.type": "ATOM"})
        engine.check(policy)
        document = structural(policy, pod_placement(policy))
        assert document.engine_type == "ATOM"
        variables = engine.environment(document, "/topology", "/payload", {"PYTHONPATH": "/own"})
        assert variables["KVTIER_TOPOLOGY"] == "/topology"
        assert variables["PYTHONPATH"] == "/payload/kvtier-atom:/payload:/own"
        again = engine.environment(document, "/topology", "/payload", variables)
        assert again["PYTHONPATH"] == variables["PYTHONPATH"]
        option, value = engine.arguments("/topology", EngineType.ATOM)
        assert option == "--kv-transfer-config"
        assert json.loads(value) == {
            "kv_connector": "kvtier",
            "kv_role": "offload",
            "topology": "/topology",
        }

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"spec.engine.connector": "LMCache"}, "spec.engine.connector"),
            ({"spec.engine.connector": "Offloading"}, "spec.engine.connector"),
            ({"spec.engine.delivery": "Image"}, "spec.engine.delivery"),
        ],
    )
    def test_what_atom_does_not_have_is_invalid(self, changes: dict[str, Any], field: str) -> None:
        errors = connectors.policy_errors(_policy({"spec.engine.type": "ATOM", **changes}))
        assert [error.message.split(":")[0] for error in errors] == [field]


class TestKubernetes:
    def test_objects_have_stable_names_and_say_whose_they_are(self) -> None:
        rendered = documents.kubernetes(_policy())
        assert [
            (document["kind"], document["metadata"]["name"].split("-shared-")[0])
            for document in rendered
        ] == [
            ("PersistentVolume", "kvtier-default-chat-70b"),
            ("PersistentVolumeClaim", "chat-70b"),
            ("ConfigMap", "chat-70b-live"),
            ("ConfigMap", "chat-70b-structural"),
        ]
        for document in rendered:
            assert document["metadata"]["labels"]["kvtier.io/policy"] == "chat-70b"
            assert len(document["metadata"]["name"]) <= 253

    def test_the_config_maps_hold_the_documents(self) -> None:
        live_map, structural_map = documents.kubernetes(_policy(), generation=9)[-2:]
        assert json.loads(live_map["data"]["live.json"])["generation"] == 9
        assert json.loads(structural_map["data"]["structural.json"])["contentHash"] == content_hash(
            _policy().spec
        )

    def test_a_structural_document_too_long_for_an_annotation_is_rejected(self) -> None:
        tiers = complete_policy()["spec"]["tiers"][:1] + [
            {"name": f"r{index}", "lmcache": {"url": "redis://" + "h" * 2040}} for index in range(7)
        ]
        with pytest.raises(ConfigurationError, match="at most 16384"):
            documents.kubernetes(
                _policy(
                    {
                        "spec.tiers": tiers,
                        "spec.isolation.salt": "é" * 256,
                        "spec.isolation.modelRevision": "é" * 256,
                    }
                )
            )

    def test_an_export_becomes_a_volume_that_ends_in_an_error_when_its_server_is_gone(self) -> None:
        volume, claim = volumes.objects(_policy())
        assert volume["spec"]["mountOptions"] == [
            "nconnect=8",
            "noatime",
            "soft",
            "timeo=50",
            "retrans=2",
        ]
        assert volume["spec"]["nfs"] == {"server": "nas.example", "path": "/kv"}
        assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
        assert volume["spec"]["claimRef"]["name"] == claim["metadata"]["name"]
        assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
        assert volume["spec"]["storageClassName"] == claim["spec"]["storageClassName"] == ""

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (["hard"], ["hard", "timeo=50", "retrans=2"]),
            (["timeo=600", "softerr"], ["timeo=600", "softerr", "retrans=2"]),
            (["retrans=9"], ["retrans=9", "soft", "timeo=50"]),
        ],
        ids=str,
    )
    def test_mount_options_that_the_policy_sets_stay(
        self, given: list[str], expected: list[str]
    ) -> None:
        policy = _policy({"spec.tiers.2.fileSystem.volume.nfs.mountOptions": given})
        assert volumes.objects(policy)[0]["spec"]["mountOptions"] == expected

    def test_the_size_of_an_export_does_not_follow_the_live_capacity(self) -> None:
        assert volumes.objects(_policy()) == volumes.objects(
            _policy({"spec.tiers.2.fileSystem.capacity": "1Gi"})
        )

    def test_a_recreated_policy_or_a_different_export_does_not_reuse_claims_and_volumes(
        self,
    ) -> None:
        names = {
            volumes.objects(_policy(changes))[0]["metadata"]["name"]
            for changes in (
                {},
                {"metadata.uid": "a"},
                {"metadata.uid": "b"},
                {"spec.tiers.2.fileSystem.volume.nfs.path": "/other"},
                {"metadata.namespace": "other"},
            )
        }
        assert len(names) == 5

    def test_a_claim_template_becomes_one_claim_with_the_tiers_capacity(self) -> None:
        policy = _local(
            {"spec.tiers.1.fileSystem.volume": {"claimTemplate": {"storageClassName": "fast"}}}
        )
        (claim,) = volumes.objects(policy)
        assert claim["spec"] == {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "500Gi"}},
            "storageClassName": "fast",
        }
        assert volumes.pod_volume(policy, policy.spec.volume("nvme")) == {
            "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}
        }

    @pytest.mark.parametrize(
        ("volume", "expected"),
        [
            ({"hostPath": {"path": "/kv"}}, {"hostPath": {"path": "/kv", "type": "Directory"}}),
            ({"emptyDir": {}}, {"emptyDir": {}}),
            (
                {"emptyDir": {"medium": "Memory", "sizeLimit": "600Gi"}},
                {"emptyDir": {"medium": "Memory", "sizeLimit": "600Gi"}},
            ),
            (
                {"persistentVolumeClaim": {"claimName": "c"}},
                {"persistentVolumeClaim": {"claimName": "c"}},
            ),
            (
                {"ephemeral": {"volumeClaimTemplate": {"spec": {}}}},
                {
                    "ephemeral": {
                        "volumeClaimTemplate": {
                            "spec": {
                                "accessModes": ["ReadWriteOnce"],
                                "resources": {"requests": {"storage": "500Gi"}},
                            }
                        }
                    }
                },
            ),
        ],
        ids=str,
    )
    def test_a_pods_volume_is_what_the_tier_names(
        self, volume: dict[str, Any], expected: dict[str, Any]
    ) -> None:
        policy = _local({"spec.tiers.1.fileSystem.volume": volume})
        assert volumes.pod_volume(policy, policy.spec.volume("nvme")) == expected

    def test_http_endpoints_are_loopback_unless_rendered_for_pods(self, tmp_path: Path) -> None:
        assert local.place_topology(_local(), tmp_path).topology.structural.http == HttpEndpoint()
        assert structural(_policy(), pod_placement(_policy())).http.port == HttpEndpoint().port
