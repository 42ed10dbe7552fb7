"""What is rendered for other connectors, read by those connectors' own parsers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
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


KILLED = """
import json, os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from kvtier.engines.vllm import plugin
from kvtier.scorecard.peer_vllm import offloading_config
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

def start(write):
    arguments = SimpleNamespace(kv_transfer_config=None, kv_offloading_size=None)
    made = SimpleNamespace(model_config=None)
    plugin.attach(arguments, "", lambda: made)
    transfer = arguments.kv_transfer_config
    engine = offloading_config(transfer.kv_connector_extra_config, transfer.engine_id, 8192)
    manager = OffloadingSpecFactory.create_spec(engine).get_manager()
    os.write(write, b"1")
    signal.pause()

left = []
for _ in range(10):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            start(write)
        finally:
            os._exit(1)
    os.close(write)
    started = os.read(read, 1)
    os.close(read)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert started, "the engine did not start"
    pattern = f"*{os.environ['KVTIER_POD_UID']}*"
    left.append(sum(path.stat().st_blocks * 512 for path in Path("/dev/shm").glob(pattern)))
print(json.dumps(left))
"""


def test_ten_kills_of_the_engine_leave_one_region_of_vllms_offloading(tmp_path: Path) -> None:
    rendered = connectors.render(policy("Offloading", tmp_path), {"files": str(tmp_path)}, 1)
    pod = str(uuid.uuid4())
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KVTIER_POD_UID": pod,
        "KVTIER_TRANSFER_CONFIG": rendered.transfer_config_text,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", KILLED],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        left = json.loads(done.stdout.splitlines()[-1])
        assert len(left) == 10
        assert 0 < max(left) <= 96 << 20, "more than one region was left"
    finally:
        for path in Path("/dev/shm").glob(f"*{pod}*"):
            path.unlink()
