"""Cluster tests find their cluster in a fixed order and use only one that was named for them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, with nothing on the machine that it could find."""
    name = "kvtier_test_cluster_search"
    spec = importlib.util.spec_from_file_location(
        name, REPOSITORY / "tests" / "cluster" / "clusters.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    for variable in (module.KUBECONFIG_VARIABLE, module.CONTEXT_VARIABLE, "KUBEBUILDER_ASSETS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(module, "REPOSITORY", tmp_path / "checkout")
    monkeypatch.setattr(module, "GO_PLACES", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    return module


def _program(directory: Path, name: str, body: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_the_skip_reason_names_all_that_is_missing(clusters: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(clusters.NoClusterError) as caught, clusters.cluster(tmp_path):
        pass
    for part in (
        "KVTIER_TEST_KUBECONFIG is not set",
        "kind or docker",
        "KUBEBUILDER_ASSETS is not set",
        "Go",
    ):
        assert part in str(caught.value)


def test_the_default_kubeconfig_is_not_used(
    clusters: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/production")
    with pytest.raises(clusters.NoClusterError), clusters.cluster(tmp_path):
        pass


def test_a_named_cluster_is_used_with_its_allowed_context(
    clusters: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_TEST_KUBECONFIG", "/some/config")
    with (
        pytest.raises(clusters.NoClusterError, match="KVTIER_TEST_CONTEXT"),
        clusters.cluster(tmp_path),
    ):
        pass
    monkeypatch.setenv("KVTIER_TEST_CONTEXT", "scratch")
    with clusters.cluster(tmp_path) as found:
        assert (found.kubeconfig, found.context, found.own) == (
            Path("/some/config"),
            "scratch",
            False,
        )


def test_a_kind_cluster_has_a_name_of_its_own_and_is_removed(
    clusters: ModuleType, tmp_path: Path
) -> None:
    _program(tmp_path, "docker", "exit 0")
    _program(tmp_path, "kind", f'echo "$@" >> {tmp_path}/calls')
    with clusters.cluster(tmp_path) as found:
        assert found.own
        assert found.kubeconfig == tmp_path / "kubeconfig"
    created, deleted = (tmp_path / "calls").read_text().splitlines()
    assert created.startswith(f"create cluster --name {found.context.removeprefix('kind-')} ")
    assert deleted.startswith(f"delete cluster --name {found.context.removeprefix('kind-')} ")


def test_an_unresponsive_docker_is_ignored(clusters: ModuleType, tmp_path: Path) -> None:
    _program(tmp_path, "docker", "exit 1")
    _program(tmp_path, "kind", "exit 1")
    with (
        pytest.raises(clusters.NoClusterError, match="docker does not answer"),
        clusters.cluster(tmp_path),
    ):
        pass


def test_given_binaries_win_over_those_beside_the_checkout(
    clusters: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, given = tmp_path / "beside", tmp_path / "given"
    for directory in (beside, given):
        directory.mkdir()
        for name in clusters.CONTROL_PLANE:
            (directory / name).touch()
    unpack = tmp_path / "shared" / "k8s"
    unpack.mkdir(parents=True)
    _program(unpack, "assets", f"echo {beside}")
    assert clusters._assets([])[0] == beside
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(given))
    assert clusters._assets([])[0] == given
    (given / "etcd").unlink()
    assert clusters._assets([])[0] == beside


def test_a_build_is_done_once(
    clusters: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    builds: list[list[str]] = []

    def build(command: list[str], **options: object) -> None:
        builds.append(command)
        Path(command[-1]).mkdir()
        for name in clusters.CONTROL_PLANE:
            (Path(command[-1]) / name).touch()

    monkeypatch.setattr(subprocess, "run", build)
    first = clusters._build(Path("/go/bin/go"))
    assert clusters._build(Path("/go/bin/go")) == first
    assert len(builds) == 1
    assert first.parent == tmp_path / "cache" / "kvtier"


def test_a_control_plane_that_does_not_start_is_a_failure_and_no_skip(
    clusters: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = tmp_path / "start"
    starter.write_text("raise SystemExit('no port left')\n")
    monkeypatch.setattr(clusters, "STARTER", starter)
    with (
        pytest.raises(clusters.ClusterBrokenError, match="no port left"),
        clusters._started(tmp_path, tmp_path, "here", clusters.Parts.API),
    ):
        pass
