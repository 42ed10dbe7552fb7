"""What a pod says about groups and documents, and what tierd and engines make of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.config.loader import load_for_engine
from kvtier.config.models import Daemon, FileSystemTierDocument
from kvtier.config.writer import document_text
from kvtier.harness.tierd_testbed import TierdOptions, TierdTestbed
from kvtier.testing.objects import make_object
from kvtier.tierd import tier_factory
from kvtier.tierd.sidecar_supervisor import first_document
from kvtier.tierd.tier_factory import build_tiers, storage_group
from kvtier.tiers.filesystem import index


@pytest.fixture
def case(tmp_path: Path) -> TierdTestbed:
    return TierdTestbed(tmp_path, TierdOptions(file_bytes=1 << 20, run_directory=tmp_path / "run"))


def test_files_are_given_a_group_that_this_process_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getgroups", lambda: [3_000])
    monkeypatch.setattr(tier_factory, "_may_change_owners", lambda: False)
    assert storage_group(None) == (None, ())
    assert storage_group(3_000) == (3_000, ())
    gid, (condition,) = storage_group(4_000)
    assert gid is None
    assert condition.type == "StorageGroupMissing"
    assert "4000" in condition.message


def test_the_first_good_document_is_kept_and_a_bad_one_is_not(case: TierdTestbed) -> None:
    source, run = case.topology_directory / "structural.json", case.run_directory
    good = source.read_text()
    source.write_text('{"schemaVersion": 9}')
    assert "schemaVersion" in first_document(case.topology_directory, run).problem
    assert not (run / "structural.json").exists()
    source.write_text(good)
    first = first_document(case.topology_directory, run)
    assert first.structural == case.topology.structural
    source.write_text("")
    assert first_document(case.topology_directory, run) == first


def test_a_corrupt_saved_document_is_replaced_by_the_pods_document(
    case: TierdTestbed,
) -> None:
    first_document(case.topology_directory, case.run_directory)
    (case.run_directory / "structural.json").write_text("{")
    assert (
        first_document(case.topology_directory, case.run_directory).structural
        == case.topology.structural
    )


@pytest.mark.parametrize(("daemon", "chunk_tokens"), [(Daemon.SIDECAR, 256), (Daemon.ENGINE, 512)])
def test_an_engine_reads_the_sidecars_document(
    case: TierdTestbed, daemon: Daemon, chunk_tokens: int
) -> None:
    first_document(case.topology_directory, case.run_directory)
    changed = case.topology.structural.model_copy(update={"chunk_tokens": 512, "daemon": daemon})
    (case.topology_directory / "structural.json").write_text(document_text(changed))
    assert load_for_engine(case.topology_directory).structural.chunk_tokens == chunk_tokens


def test_an_engine_that_starts_before_the_sidecar_reads_the_pods_document(
    case: TierdTestbed,
) -> None:
    assert load_for_engine(case.topology_directory).structural == case.topology.structural


def test_the_limit_of_allocations_grows_with_the_threads_of_the_tiers(case: TierdTestbed) -> None:
    without = TierdTestbed(
        case.directory / "other", TierdOptions(run_directory=case.run_directory)
    ).topology.structural
    with_files = case.topology.structural
    assert (
        tier_factory.data_limit(with_files, 1 << 20) - tier_factory.data_limit(without, 1 << 20)
        == 4 * tier_factory.STACK_BYTES
    )


def test_file_tiers_share_the_index_limit_of_tierd(
    case: TierdTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "MAX_INDEXED_OBJECTS", 6)
    ram, *_ = case.topology.structural.tiers
    files = [
        FileSystemTierDocument(
            name=name, path=str(case.directory / name), sharing="Pod", direct_io="Never"
        )
        for name in ("near", "far")
    ]
    structural = case.topology.structural.model_copy(update={"tiers": [ram, *files]})
    for tier in build_tiers(case.topology.model_copy(update={"structural": structural})).tiers:
        tier.open(lambda *_: None)
        for seed in range(5):
            tier.write(*make_object(seed))
        assert tier.usage().objects == 3
        tier.close()
