"""What is rendered for other connectors, read by those connectors' own parsers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.scorecard.peer_vllm import offloading_config
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.validation import validated
from kvtier_operator.render import connectors

pytestmark = pytest.mark.engine


def policy(
    connector: str, directory: Path, eviction: str = "LRU", sharing: str = "Node"
) -> KVTierPolicy:
    volume = {"hostPath": {"path": str(directory)}}
    return validated(
        KVTierPolicy,
        {
            "apiVersion": "kvtier.io/v1alpha1",
            "kind": "KVTierPolicy",
            "metadata": {"name": "chat", "namespace": "serving"},
            "spec": {
                "podSelector": {"matchLabels": {"app": "chat"}},
                "engine": {"connector": connector},
                "chunkTokens": 64,
                "tiers": [
                    {"name": "ram", "memory": {"capacity": "96Mi", "evictionPolicy": eviction}},
                    {
                        "name": "files",
                        "lookupTimeoutMilliseconds": 70,
                        "loadTimeoutSeconds": 7,
                        "fileSystem": {
                            "capacity": "3Gi",
                            "sharing": sharing,
                            "readThreads": 3,
                            "writeThreads": 2,
                            "volume": volume,
                        },
                    },
                ],
            },
        },
    )


@pytest.mark.parametrize("eviction", ["LRU", "ARC"])
def test_vllm_creates_its_tiers_from_the_rendered_configuration(
    tmp_path: Path, eviction: str
) -> None:
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    rendered = connectors.render(
        policy("Offloading", tmp_path, eviction), {"files": str(tmp_path)}, 1
    )
    transfer = KVTransferConfig(**json.loads(rendered.transfer_config_text))
    assert transfer.kv_connector == "OffloadingConnector"
    assert transfer.kv_load_failure_policy == "recompute"
    spec = OffloadingSpecFactory.create_spec(
        offloading_config(transfer.kv_connector_extra_config, "kvtier-test-offloading", 8192)
    )
    manager = spec.get_manager()
    try:
        assert spec.num_chunks == (96 << 20) // (8192 * 4)
        assert spec.eviction_policy == eviction.lower()
        assert [type(tier).__name__ for tier in manager.secondary_tiers] == [
            "FileSystemTierManager"
        ]
        assert str(manager.secondary_tiers[0].file_mapper.base_path).startswith(str(tmp_path))
    finally:
        manager.shutdown()
    assert not list(Path("/dev/shm").glob("*kvtier-test-offloading*"))


@pytest.mark.parametrize("sharing", ["Node", "Cluster"])
def test_lmcache_reads_the_rendered_configuration_as_intended(
    tmp_path: Path, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.storage_backend.connector import parse_remote_url
    from vllm.config import KVTransferConfig

    rendered = connectors.render(
        policy("LMCache", tmp_path, sharing=sharing), {"files": str(tmp_path)}, local_ranks=2
    )
    for name, value in rendered.environment.items():
        monkeypatch.setenv(name, value)
    read = LMCacheEngineConfig.from_env()
    read.validate()
    assert read.chunk_size == 64
    assert read.local_cpu is True
    assert read.cache_policy == "LRU"
    assert read.min_retrieve_tokens == 512
    assert int(read.max_local_cpu_size * (1 << 30)) * 2 <= 96 << 20
    assert int(read.max_local_cpu_size * (1 << 30)) * 2 > 95 << 20
    assert read.blocking_timeout_secs == 7
    assert read.lookup_timeout_ms == 70
    if sharing == "Node":
        assert read.local_disk.rstrip("/") == str(tmp_path)
        assert read.max_local_disk_size == 1.5
        assert read.remote_url is None
    else:
        assert read.local_disk is None
        assert parse_remote_url(read.remote_url).path == str(tmp_path)
    transfer = KVTransferConfig(**rendered.transfer_config)
    assert transfer.kv_connector == "LMCacheConnectorV1"
    unknown = {name.removeprefix("LMCACHE_").lower() for name in rendered.environment} - set(
        vars(read)
    )
    assert not unknown, "LMCache ignores variables that it does not know"
