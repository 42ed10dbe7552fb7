"""Fixtures for tests against a real API server. Every test here is marked ``cluster``."""

from __future__ import annotations

import contextlib
import importlib
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


sys.path.append(str(HERE))
# Modules of this directory import one another by their bare names, as they do when `make
# demo-cluster` runs one of them.


def _beside(name: str) -> ModuleType:
    """A module of this directory."""
    return importlib.import_module(name)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: needs a real Kubernetes API server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in Path(item.path).parents]
    for item in ours:
        item.add_marker(pytest.mark.cluster)
        # The first of them may build the API server from source, which takes about eight minutes on
        # two cores.
        item.add_marker(pytest.mark.timeout(1_800))
    # Tests with a node run one after the other, because a machine has one node at a time.
    placed = iter(sorted(ours, key=_needs_node))
    items[:] = [next(placed) if HERE in Path(item.path).parents else item for item in items]


def _needs_node(item: pytest.Item) -> bool:
    return "node_cluster" in getattr(item, "fixturenames", ())


_node = contextlib.ExitStack()
"""What keeps the node running; closed after the last test that needs it."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if _needs_node(item) and (nextitem is None or not _needs_node(nextitem)):
        _node.close()


def _cluster(home: Path, parts: str, stack: contextlib.ExitStack) -> Any:
    clusters = _beside("clusters")
    try:
        return stack.enter_context(clusters.cluster(home, clusters.Parts[parts]))
    except clusters.NoClusterError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kubernetes_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster (``clusters.Cluster``) that tests may write to. Skips if there is none."""
    with contextlib.ExitStack() as stack:
        clusters = _beside("clusters")
        try:
            yield stack.enter_context(clusters.cluster(tmp_path_factory.mktemp("kubernetes")))
        except clusters.NoClusterError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="session")
def full_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster with controllers and scheduler, and no node: pods are created and bound but do not
    run. ``nodes.FakeNode`` replaces a node.
    """
    with contextlib.ExitStack() as stack:
        yield _cluster(tmp_path_factory.mktemp("full"), "CONTROLLERS", stack)


@pytest.fixture(scope="session")
def full_api(full_cluster: Any) -> Any:
    """``rest.Api`` of ``full_cluster``; its namespace is ``default``."""
    return _beside("rest").Api(full_cluster.kubeconfig, full_cluster.context, "default")


@pytest.fixture(scope="session")
def node_cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A cluster whose node is this machine and runs pods. Needs root and containerd, runc, CNI
    plugins and iptables. It is removed
    after the last test that uses it. Each test creates and deletes a namespace of its own.
    """
    return _cluster(tmp_path_factory.mktemp("node"), "NODE", _node)


@pytest.fixture(scope="session")
def node_api(node_cluster: Any) -> Any:
    """``rest.Api`` of ``node_cluster``; its namespace is ``default``."""
    return _beside("rest").Api(node_cluster.kubeconfig, node_cluster.context, "default")


@pytest.fixture(scope="session")
def node_images(node_cluster: Any) -> None:
    """The images that ship are on the node, under the names that the chart's values have. Skips if
    they cannot be built here.
    """
    try:
        _beside("operators").load_images(node_cluster)
    except _beside("images").NoImagesError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def operator_on_node(
    node_cluster: Any, node_api: Any, node_images: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The operator, installed by the chart for the tests of one file (``operators.Installed``)."""
    with _beside("operators").installed(
        node_cluster, node_api, tmp_path_factory.mktemp("storage")
    ) as found:
        yield found


@pytest.fixture(scope="session")
def nodes() -> ModuleType:
    """The module ``nodes``: namespaces, fake nodes, and the statuses that a kubelet writes."""
    return _beside("nodes")


@pytest.fixture(scope="session")
def rest() -> ModuleType:
    """The module ``rest``."""
    return _beside("rest")


@pytest.fixture(scope="session")
def images() -> ModuleType:
    """The module ``images``: archives for the node."""
    return _beside("images")


@pytest.fixture(scope="session")
def charts() -> ModuleType:
    """The module ``charts``: the Helm chart on a cluster."""
    return _beside("charts")


@pytest.fixture(scope="session")
def api(kubernetes_cluster: Any) -> Iterator[Any]:
    """The API server (``rest.Api``), with a namespace of this session's own in it."""
    namespace = f"kvtier-test-{secrets.token_hex(4)}"
    answer = _beside("rest").Api(
        kubernetes_cluster.kubeconfig, kubernetes_cluster.context, namespace
    )
    status, body = answer.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    assert status == 201, body
    yield answer
    answer.request("DELETE", f"/api/v1/namespaces/{namespace}")
