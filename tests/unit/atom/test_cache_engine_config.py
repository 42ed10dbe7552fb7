"""The configuration of the CacheEngine path: what is not honored is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tests.support.cache_engine import BLOCKS, CHUNK, TOKENS, kv_tensors, wait
from tests.support.run_directories import short_directory

from kvtier.engines.atom import cache_engine_config
from kvtier.engines.atom.cache_engine_config import CacheEngineOptions, check_chunk, options_of
from kvtier.engines.atom.cache_engine_worker import CacheEngineWorker
from kvtier.engines.atom.connector import KVTierCacheEngineConnector, KVTierCacheEngineScheduler
from kvtier.engines.atom.metadata import AtomSave, AtomStepMetadata
from kvtier.engines.atom.rank import RankIdentity
from kvtier.engines.atom.types import SaveOperationId
from kvtier.engines.common.jobs import BlockRun, StoreJob
from kvtier.engines.common.model_identity import EngineIdentity
from kvtier.engines.lmcache.config import read_file, require_lmcache
from kvtier.errors import ConfigurationError, KVTierError
from kvtier.lookup.endpoint import SocketLock, socket_path
from kvtier.planner import GroupKind, KVCacheGroup, Planner


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests need no LMCache."""
    monkeypatch.setattr(cache_engine_config, "require_lmcache", lambda: None)


@pytest.fixture
def run() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


def file(directory: Path, **options: Any) -> str:
    path = directory / "lmcache.yaml"
    path.write_text(yaml.safe_dump(options))
    return str(path)


def read(given: dict[str, Any]) -> CacheEngineOptions:
    return options_of(SimpleNamespace(kv_transfer_config=given))


def test_the_defaults(tmp_path: Path) -> None:
    options = read({"lmcache_config": file(tmp_path)})
    assert options.file.chunk_tokens == 256
    assert not options.file.persistent
    assert (options.lookup_seconds, options.load_seconds) == (0.02, 5.0)
    assert options.run_directory.is_absolute()
    topology = options.topology()
    assert topology.structural.chunk_tokens == 256
    assert topology.live.min_load_tokens == 512


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"use_layerwise": True}, "use_layerwise"),
        ({"enable_blending": True}, "enable_blending"),
        ({"enable_pd": True}, "enable_pd"),
        ({"enable_controller": True}, "enable_controller"),
        ({"extra_config": {"save_chunk_meta": False}}, "extra_config"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunk_size": "big"}, "chunk_size"),
        ({"remote_serde": "cachegen"}, "remote_serde"),
        ({"remote_url": "s3://bucket"}, "remote_url"),
        ({"remote_url": "redis://user:secret@host:1"}, "remote_url"),
    ],
)
def test_an_option_of_lmcache_that_is_not_honored_is_refused(
    tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read({"lmcache_config": file(tmp_path, **content), "model_revision": "one"})


@pytest.mark.parametrize(
    "content",
    [
        {"remote_url": "redis://user:s3cret@host:1"},
        {"remote_url": "redis://host:1?password=s3cret"},
        {"extra_config": {"redis_password": "s3cret"}},
        {"audit_actual_remote_url": "redis://user:s3cret@host:1"},
    ],
)
def test_a_password_in_a_file_that_is_refused_is_in_no_message(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    config = SimpleNamespace(
        kv_transfer_config={
            "lmcache_config": file(tmp_path, **content),
            "model_revision": "one",
        }
    )
    scheduler = KVTierCacheEngineScheduler(config)
    assert next(iter(content)) in scheduler.off_reason
    assert "s3cret" not in scheduler.off_reason


@pytest.mark.parametrize("text", ["[1, 2]", "{", "\x00"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="lmcache_config"):
        read_file(path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lmcache_config": ""}, "lmcache_config"),
        ({"lmcache_config": "/absent.yaml"}, "cannot be read"),
        ({"topology": "/t"}, "topology"),
        ({"lookup_seconds": 0}, "lookup_seconds"),
        ({"lookup_seconds": float("nan")}, "lookup_seconds"),
        ({"lookup_seconds": True}, "lookup_seconds"),
        ({"load_seconds": 1e9}, "load_seconds"),
        ({"load_seconds": "5"}, "load_seconds"),
        ({"run_directory": "relative"}, "run_directory"),
    ],
)
def test_an_option_of_the_connector_that_is_not_valid_is_named(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read({"lmcache_config": file(tmp_path), **given})


def test_objects_that_outlive_the_engine_need_a_revision(tmp_path: Path) -> None:
    path = file(tmp_path, remote_url="lm://localhost:1234")
    with pytest.raises(ConfigurationError, match="model_revision"):
        read({"lmcache_config": path})
    assert read({"lmcache_config": path, "model_revision": "one"}).file.persistent


def test_lmcaches_chunks_must_be_whole_blocks(tmp_path: Path) -> None:
    options = read({"lmcache_config": file(tmp_path, chunk_size=100)})
    group = KVCacheGroup(GroupKind.FULL, 16, "test")
    planner = Planner.build([group], 100, 16, 1)
    with pytest.raises(ConfigurationError, match="chunk_size"):
        check_chunk(planner, options)


@pytest.mark.parametrize("found", ["0.5.5", None])
def test_another_version_or_none_is_refused(found: str | None) -> None:
    import importlib.metadata

    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    with pytest.raises(KVTierError, match=found or "not installed"):
        require_lmcache(version)


def test_what_is_refused_leaves_an_engine_that_serves(tmp_path: Path) -> None:
    config = SimpleNamespace(kv_transfer_config={"lmcache_config": str(tmp_path / "absent")})
    scheduler = KVTierCacheEngineScheduler(config)
    worker = KVTierCacheEngineConnector(config)
    assert "cannot be read" in scheduler.off_reason
    assert "cannot be read" in worker.off_reason
    assert scheduler.build_connector_meta().requests == []
    job = StoreJob(1, 0, 1, BlockRun(0, 0, (1, 2)))
    worker.start_load_kv(AtomStepMetadata([AtomSave(SaveOperationId("kvtier", 1), job)]))
    assert worker.get_finished().finished_saving == {SaveOperationId("kvtier", 1)}
    scheduler.shutdown()
    worker.shutdown()


@pytest.mark.parametrize("reason", ["ephemeral", "taken"])
def test_a_rank_that_must_not_or_cannot_serve_is_off_and_closes_lmcache(
    tmp_path: Path, run: Path, reason: str
) -> None:
    url = {"remote_url": "lm://localhost:1"} if reason == "ephemeral" else {}
    path = file(tmp_path, chunk_size=CHUNK, **url)
    options = read({"lmcache_config": path, "model_revision": "one", "run_directory": str(run)})
    identity = EngineIdentity("{}", "a reason" if reason == "ephemeral" else "")
    opened: list[str] = []
    cache = SimpleNamespace(close=lambda: opened.append("closed"))

    def open_cache(*_arguments: Any) -> Any:
        opened.append("opened")
        return cache

    worker = CacheEngineWorker(
        options,
        RankIdentity("e", 0, TOKENS, CHUNK),
        1,
        lambda: identity,
        open_cache,
    )
    if reason == "taken":
        other = SocketLock(socket_path(run, "e"))
    worker.register_kv_caches(kv_tensors(), BLOCKS)
    wait(lambda: worker.off_reason)
    if reason == "taken":
        assert "another process answers" in worker.off_reason
        assert opened == ["opened", "closed"]
        other.release()
    else:
        assert "a reason" in worker.off_reason
        assert opened == []
