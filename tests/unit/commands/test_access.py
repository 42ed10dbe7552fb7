"""Errors of the API server in words, and where a cluster is looked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml
from tests.unit.commands.test_why import Forbidding, installed

from kvtier.cli.cluster.access import ClusterOptions, ClusterReader, describe, open_reader, right
from kvtier.cli.inputs import CommandError
from kvtier.errors import ConfigurationError
from kvtier_operator.kube.resources import NODES, PODS, POLICIES, ApiError


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ApiError(401, "Unauthorized", "no"), "does not accept the credentials"),
        (ApiError(403, "Forbidden", 'User "ann" cannot'), "right to list kvtierpolicies.kvtier.io"),
        (ApiError(404, "NotFound", "page not found"), "KVTier is not installed"),
        (ApiError(0, "Timeout", "no response in 6 s"), "does not answer: no response in 6 s"),
        (ApiError(500, "InternalError", "etcd"), "could not list kvtierpolicies: 500"),
    ],
)
def test_what_a_failed_call_means(error: ApiError, says: str) -> None:
    assert says in describe(error, "list", POLICIES, "serving")


def test_rights_are_named_as_rbac_does() -> None:
    assert right("list", NODES, None) == "list nodes in the cluster"
    assert right("get", PODS, "serving", "proxy") == "get pods/proxy in namespace serving"


def test_a_server_error_is_no_missing_right() -> None:
    """An optional read that fails for another reason ends the command instead of a wrong answer."""

    class Broken(Forbidding):
        def _check(self, verb: str, kind: object, namespace: str | None) -> None:
            raise ApiError(500, "InternalError", "etcd")

    reader = ClusterReader(Broken(), "serving")
    with pytest.raises(CommandError, match="could not list nodes: 500"):
        asyncio.run(reader.try_list(NODES, None, "versions of kubelets"))
    assert reader.not_checked == []


def test_an_object_that_does_not_exist_is_no_missing_right() -> None:
    reader = ClusterReader(installed(policy=None), "serving")
    assert asyncio.run(reader.try_get(PODS, "serving", "none", "the pod")) is None
    assert reader.not_checked == []


def _kubeconfig(path: Path, namespace: str | None) -> Path:
    context = {"cluster": "c", "user": "u", **({"namespace": namespace} if namespace else {})}
    other = {"cluster": "c", "user": "u", "namespace": "other"}
    document = {
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "here", "context": context}, {"name": "there", "context": other}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(
    ("written", "context", "option", "expected"),
    [
        ("serving", None, None, "serving"),
        (None, None, None, "default"),
        ("serving", "there", None, "other"),
        ("serving", None, "mine", "mine"),
    ],
)
def test_the_namespace_is_found_as_kubectl_finds_it(
    tmp_path: Path, written: str | None, context: str | None, option: str | None, expected: str
) -> None:
    options = ClusterOptions(_kubeconfig(tmp_path / "config", written), context, option)

    async def namespace() -> str:
        async with open_reader(options) as reader:
            return reader.namespace

    assert asyncio.run(namespace()) == expected


def test_the_home_directorys_kubeconfig_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    async def server() -> str:
        async with open_reader(ClusterOptions()) as reader:
            return reader.namespace

    with pytest.raises(ConfigurationError, match="no pod"):
        asyncio.run(server())
    (tmp_path / ".kube").mkdir()
    _kubeconfig(tmp_path / ".kube/config", "serving")
    assert asyncio.run(server()) == "serving"
