"""A real API server takes the generated CRD, and refuses by it what the models refuse."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_operator.api import crd
from kvtier_operator.testing.policies import REFUSED, RefusedCase, changed, complete_policy

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
READY_SECONDS = 60


@pytest.fixture(scope="session")
def policies(api: Any, kubernetes_cluster: Any) -> Any:
    """The path of the policies of this session's namespace, with the CRD in place."""
    definition = crd.definition()
    name = definition["metadata"]["name"]
    status, body = api.request(
        "PATCH",
        f"{DEFINITIONS}/{name}?fieldManager=kvtier-tests&force=true&fieldValidation=Strict",
        definition,
        content_type="application/apply-patch+yaml",
    )
    assert status in (200, 201), body
    path = f"/apis/{crd.GROUP}/{crd.VERSION}/namespaces/{api.namespace}/{crd.PLURAL}"
    deadline = time.monotonic() + READY_SECONDS
    while api.request("GET", path)[0] != 200:
        assert time.monotonic() < deadline, "the CRD was not served in time"
        time.sleep(0.1)
    yield path
    if status == 201 or kubernetes_cluster.own:
        api.request("DELETE", f"{DEFINITIONS}/{name}")


def _create(api: Any, path: str, policy: dict[str, Any]) -> tuple[int, Any]:
    policy["metadata"]["namespace"] = api.namespace
    return api.request("POST", f"{path}?dryRun=All&fieldValidation=Strict", policy)


def test_the_complete_policy_is_accepted(api: Any, policies: str):
    status, body = _create(api, policies, complete_policy())
    assert status == 201, body


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_accepted(api: Any, policies: str, path: Path):
    for document in yaml.safe_load_all(path.read_text()):
        status, body = _create(api, policies, document)
        assert status == 201, body


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_is_refused_by_the_api_server_with_the_message(api: Any, policies: str, case: RefusedCase):
    status, body = _create(api, policies, changed(complete_policy(), case.changes))
    assert status == 422, body
    message = body["message"]
    assert case.server, "the case says nothing about the API server"
    for part in case.server:
        assert part in message
