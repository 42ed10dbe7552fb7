"""Policies for vLLM's offloading and for LMCache: what is rendered, and which fields are reported
as unsupported.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.errors import ConfigurationError
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.validation import validated
from kvtier_operator.render import connectors

RAM = {"name": "ram", "memory": {"capacity": "64Gi"}}
NVME = {
    "name": "nvme",
    "fileSystem": {
        "capacity": "500Gi",
        "sharing": "Node",
        "volume": {"hostPath": {"path": "/mnt/kv"}},
    },
}
SHARED = {
    "name": "shared",
    "fileSystem": {
        "capacity": "10Ti",
        "sharing": "Cluster",
        "volume": {"nfs": {"server": "nas", "path": "/kv"}},
    },
}
REDIS = {"name": "remote", "lmcache": {"url": "redis://cache:6379"}}
PATHS = {"nvme": "/var/lib/kvtier/tiers/nvme", "shared": "/var/lib/kvtier/tiers/shared"}


def policy(connector: str, *tiers: dict[str, Any], **spec: Any) -> KVTierPolicy:
    document = {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "metadata": {"name": "chat", "namespace": "serving"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "chat"}},
            "engine": {"connector": connector},
            "tiers": [RAM, *tiers],
            **spec,
        },
    }
    return validated(KVTierPolicy, document)


def messages(refusals: list[Any]) -> dict[str, str]:
    return {refusal.field: refusal.message for refusal in refusals}


def test_offloading_gets_the_pods_total_in_bytes_and_file_tiers_in_order() -> None:
    rendered = connectors.render(
        policy("Offloading", NVME, SHARED, chunkTokens=512), PATHS, local_ranks=8
    )
    extra = rendered.transfer_config["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 64 << 30
    assert extra["block_size"] == 512
    assert [tier["root_dir"] for tier in extra["secondary_tiers"]] == [
        PATHS["nvme"],
        PATHS["shared"],
    ]
    assert rendered.transfer_config["kv_load_failure_policy"] == "recompute"
    assert rendered.shared_memory_bytes == 64 << 30


def test_lmcache_gets_a_ranks_share_in_gib_and_never_more_than_the_budget() -> None:
    rendered = connectors.render(policy("LMCache", NVME), PATHS, local_ranks=3)
    for variable, total in (
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", 64),
        ("LMCACHE_MAX_LOCAL_DISK_SIZE", 500),
    ):
        share = float(rendered.environment[variable])
        assert total / 3 - 1e-5 < share
        assert share * 3 <= total
    assert rendered.shared_memory_bytes == 0
    assert rendered.engine_memory_bytes == 64 << 30


def test_a_directory_of_the_whole_cluster_is_lmcaches_remote_store() -> None:
    rendered = connectors.render(policy("LMCache", SHARED), PATHS, local_ranks=1)
    assert rendered.environment["LMCACHE_REMOTE_URL"] == f"fs://localhost:0{PATHS['shared']}"
    assert "LMCACHE_LOCAL_DISK" not in rendered.environment


@pytest.mark.parametrize("connector", ["Offloading", "LMCache"])
def test_salts_keep_directories_apart(connector: str) -> None:
    texts = {
        str(connectors.render(policy(connector, NVME, isolation={"salt": salt}), PATHS, 1))
        for salt in ("", "a", "b")
    }
    assert len(texts) == 3


def test_fields_that_offloading_does_not_support_are_listed() -> None:
    nvme = {**NVME, "loadWeight": 50, "loadTimeoutSeconds": 7, "storePolicy": "Reused"}
    found = messages(
        connectors.unsupported_fields(
            policy("Offloading", nvme, minLoadTokens=640, breaker={"failureThreshold": 3})
        )
    )
    assert set(found) == {
        "spec.minLoadTokens",
        "spec.breaker.failureThreshold",
        "spec.tiers[1].loadWeight",
        "spec.tiers[1].loadTimeoutSeconds",
        "spec.tiers[1].storePolicy",
        "spec.tiers[1].fileSystem.capacity",
    }
    assert found["spec.tiers[1].storePolicy"] == (
        'spec.tiers[1].storePolicy: Invalid value: "Reused": must be "All", the only behavior of '
        "vLLM's offloading"
    )
    assert found["spec.tiers[1].fileSystem.capacity"] == (
        "spec.tiers[1].fileSystem.capacity: Forbidden: vLLM's offloading has no such setting"
    )


@pytest.mark.parametrize("connector", ["Offloading", "LMCache"])
def test_defaults_from_the_api_server_are_not_listed(connector: str) -> None:
    written = policy(connector, NVME)
    filled = {
        "loadWeight": 100,
        "lookupTimeoutMilliseconds": 50,
        "loadTimeoutSeconds": 5,
        "storePolicy": "All",
    }
    more = {
        "highWatermarkPercent": 90,
        "lowWatermarkPercent": 75,
        "retentionSeconds": 604800,
        "sync": "None",
    }
    nvme = {**NVME, **filled, "fileSystem": {**NVME["fileSystem"], **more}}  # type: ignore[dict-item]
    stored = policy(
        connector,
        nvme,
        minLoadTokens=512,
        selection="Cost",
        breaker={"failureThreshold": 5, "periodSeconds": 60},
    )
    assert messages(connectors.unsupported_fields(stored)) == messages(
        connectors.unsupported_fields(written)
    )


def test_fields_that_lmcache_does_not_support_are_listed() -> None:
    ram = {"name": "ram", "memory": {"capacity": "1Gi", "evictionPolicy": "ARC"}}
    tested = policy("LMCache", {**NVME, "loadWeight": 50}, minLoadTokens=512)
    assert set(messages(connectors.unsupported_fields(tested))) == {"spec.tiers[1].loadWeight"}
    tested = policy("LMCache", selection="Weighted")
    tested = tested.model_copy(
        update={"spec": tested.spec.model_copy(update={"tiers": [*tested.spec.tiers]})}
    )
    assert set(messages(connectors.unsupported_fields(tested))) == {"spec.selection"}
    document = policy("LMCache").model_dump(by_alias=True, exclude_unset=True, mode="json")
    document["spec"]["tiers"] = [ram]
    assert set(messages(connectors.unsupported_fields(validated(KVTierPolicy, document)))) == {
        "spec.tiers[0].memory.evictionPolicy"
    }


def test_kvtiers_connector_supports_all_fields_and_is_not_rendered() -> None:
    assert connectors.unsupported_fields(policy("KVTier", NVME, REDIS)) == []
    assert connectors.policy_errors(policy("KVTier", NVME, REDIS)) == []
    with pytest.raises(ConfigurationError, match="Offloading or LMCache"):
        connectors.render(policy("KVTier", NVME), PATHS, 1)


def test_tiers_that_a_connector_does_not_support_are_errors() -> None:
    assert list(messages(connectors.policy_errors(policy("Offloading", NVME, REDIS)))) == [
        "spec.tiers[2].lmcache"
    ]
    assert list(messages(connectors.policy_errors(policy("LMCache", SHARED, REDIS)))) == [
        "spec.tiers[2]"
    ]
    second = {**NVME, "name": "other"}
    assert list(messages(connectors.policy_errors(policy("LMCache", NVME, second)))) == [
        "spec.tiers[2]"
    ]
    with pytest.raises(ConfigurationError, match=r"spec.tiers\[2\]"):
        connectors.render(policy("LMCache", NVME, second), {**PATHS, "other": "/x"}, 1)
