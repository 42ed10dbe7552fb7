"""Fixtures for tests against a real API server. Every test here is marked ``cluster``."""

from __future__ import annotations

import importlib.util
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


def _beside(name: str) -> ModuleType:
    """A module of this directory, found by its path however pytest was told to import tests."""
    full_name = f"kvtier_test_cluster_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, HERE / f"{name}.py")
        if spec is None or spec.loader is None:
            raise ImportError(name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: needs a real Kubernetes API server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.cluster)
            # The first of them may build the API server from source, which takes about eight minutes on two cores.
            item.add_marker(pytest.mark.timeout(1_800))


@pytest.fixture(scope="session")
def kubernetes_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster (``clusters.Cluster``) that tests may write to; skips with the reason where there is none."""
    clusters = _beside("clusters")
    try:
        with clusters.cluster(tmp_path_factory.mktemp("kubernetes")) as found:
            yield found
    except clusters.NoClusterError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def api(kubernetes_cluster: Any) -> Iterator[Any]:
    """The API server (``rest.Api``), with a namespace of this session's own in it."""
    namespace = f"kvtier-test-{secrets.token_hex(4)}"
    answer = _beside("rest").Api(kubernetes_cluster.kubeconfig, kubernetes_cluster.context, namespace)
    status, body = answer.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    assert status == 201, body
    yield answer
    answer.request("DELETE", f"/api/v1/namespaces/{namespace}")
