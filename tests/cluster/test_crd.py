"""A real API server accepts the generated CRD, and rejects with it what the models reject."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.invalid_policies import INVALID, InvalidCase
from tests.support.policies import changed, complete_policy

from kvtier_operator.api import crd
from kvtier_operator.api.documents import load_policy, parse
from kvtier_operator.render import documents, volumes
from kvtier_operator.render.documents import content_hash, live, pod_placement, structural

EXAMPLES = sorted(
    path
    for path in (Path(__file__).resolve().parents[2] / "examples").glob("*.yaml")
    if "kind: KVTierPolicy" in path.read_text()
)
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


def test_the_complete_policy_is_accepted(api: Any, policies: str) -> None:
    status, body = _create(api, policies, complete_policy())
    assert status == 201, body


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_accepted(api: Any, policies: str, path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        status, body = _create(api, policies, document)
        assert status == 201, body


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_an_invalid_policy_is_rejected_by_the_api_server_with_the_message(
    api: Any, policies: str, case: InvalidCase
) -> None:
    status, body = _create(api, policies, changed(complete_policy(), case.changes))
    assert status == 422, body
    message = body["message"]
    assert case.server, "the case says nothing about the API server"
    for part in case.server:
        assert part in message


@pytest.fixture
def stored(api: Any, policies: str) -> Any:
    """Creates policies for real and removes them afterwards."""
    names: list[str] = []

    def store(policy: dict[str, Any]) -> dict[str, Any]:
        policy = changed(
            policy,
            {
                "metadata.namespace": api.namespace,
                "metadata.name": f"p{len(names)}-{policy['metadata']['name']}",
            },
        )
        names.append(policy["metadata"]["name"])
        status, body = api.request("POST", policies, policy)
        assert status == 201, body
        answer: dict[str, Any] = body
        return answer

    yield store
    for name in names:
        api.request("DELETE", f"{policies}/{name}")


SMALL: dict[str, Any] = {
    "apiVersion": "kvtier.io/v1alpha1",
    "kind": "KVTierPolicy",
    "metadata": {"name": "small"},
    "spec": {
        "podSelector": {},
        "tiers": [
            {"name": "ram", "memory": {"capacity": "1Gi"}},
            {
                "name": "disk",
                "fileSystem": {"capacity": 4096, "sharing": "Pod", "volume": {"emptyDir": {}}},
            },
        ],
    },
}


def test_defaults_of_the_api_server_do_not_change_the_meaning(stored: Any) -> None:
    for written in (SMALL, complete_policy()):
        back = load_policy(json.dumps(stored(written)))
        original = load_policy(
            json.dumps(
                changed(
                    written,
                    {"metadata.namespace": back.namespace, "metadata.name": back.metadata.name},
                )
            )
        )
        assert content_hash(back.spec) == content_hash(original.spec)
        assert live(back) == live(original)
        assert (
            structural(back, pod_placement(back)).tiers
            == structural(original, pod_placement(original)).tiers
        )


def test_the_api_server_defaults_live_fields_and_not_structural_ones(stored: Any) -> None:
    spec = stored(SMALL)["spec"]
    assert (spec["minLoadTokens"], spec["selection"], spec["rollout"]) == (
        512,
        "Cost",
        {"strategy": "OnPodRestart"},
    )
    assert spec["tiers"] == SMALL["spec"]["tiers"]
    assert "monitoring" not in spec
    assert "chunkTokens" not in spec
    assert "engine" not in spec
    assert "readThreads" not in spec["tiers"][1]["fileSystem"]


def test_null_is_the_same_as_absent(stored: Any) -> None:
    spec = stored(
        changed(
            SMALL, {"spec.engine": None, "spec.minLoadTokens": None, "spec.tiers.0.lmcache": None}
        )
    )["spec"]
    assert (spec["minLoadTokens"], "engine" in spec, "lmcache" in spec["tiers"][0]) == (
        512,
        False,
        False,
    )


def test_an_unknown_field_is_rejected_with_strict_validation(api: Any, policies: str) -> None:
    status, body = _create(api, policies, changed(SMALL, {"spec.minLoadToken": 1}))
    assert status == 400
    assert 'unknown field "spec.minLoadToken"' in body["message"]


def test_a_change_that_makes_a_policy_invalid_is_rejected(
    api: Any, policies: str, stored: Any
) -> None:
    name = stored(SMALL)["metadata"]["name"]
    patch = {"spec": {"breaker": {"failureThreshold": 0}}}
    status, body = api.request(
        "PATCH", f"{policies}/{name}", patch, content_type="application/merge-patch+json"
    )
    assert status == 422
    assert "spec.breaker.failureThreshold: Invalid value: 0" in body["message"]


def test_tiers_are_merged_by_name(api: Any, policies: str, stored: Any) -> None:
    name = stored(SMALL)["metadata"]["name"]
    weight = {
        "apiVersion": "kvtier.io/v1alpha1",
        "kind": "KVTierPolicy",
        "spec": {"tiers": [{"name": "disk", "loadWeight": 7}]},
    }
    status, body = api.request(
        "PATCH",
        f"{policies}/{name}?fieldManager=tuner&force=true",
        weight,
        content_type="application/apply-patch+yaml",
    )
    assert status == 200, body
    assert [(tier["name"], tier.get("loadWeight")) for tier in body["spec"]["tiers"]] == [
        ("ram", None),
        ("disk", 7),
    ]
    assert body["spec"]["tiers"][1]["fileSystem"]["capacity"] == 4096


STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "structuralHash": "3f9c1a2b",
    "liveGeneration": 12,
    "summary": {"pods": "7/8", "tiers": "ram, disk", "hitTokensPercent": 31},
    "pods": {"selected": 8, "attached": 7, "current": 5, "outdated": 2, "skipped": 1, "tuned": 7},
    "skippedPods": [{"name": "vllm-chat-xyz", "reason": "AlreadyConfigured", "message": "..."}],
    "suspendedOwners": [
        {
            "kind": "ReplicaSet",
            "name": "r",
            "uid": "u",
            "reason": "WouldBeRefused",
            "until": "2026-01-01T00:00:00Z",
        }
    ],
    "tiers": [
        {
            "name": "disk",
            "state": "Healthy",
            "reportingPods": 7,
            "usedBytes": 412316860416,
            "capacityBytes": 3758096384000,
            "hitTokensPercent": 31,
            "claimName": "",
        }
    ],
    "conditions": [
        {
            "type": "Ready",
            "status": "False",
            "reason": "PodsOutdated",
            "message": "",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ],
}


def test_status_is_a_subresource_and_appears_in_the_columns(
    api: Any, policies: str, stored: Any
) -> None:
    policy = stored({**SMALL, "status": STATUS})
    assert "status" not in policy
    name = policy["metadata"]["name"]
    status, body = api.request("PUT", f"{policies}/{name}/status", {**policy, "status": STATUS})
    assert status == 200, body
    assert body["status"] == STATUS
    assert load_policy(json.dumps(body)).status is not None

    table_type = "application/json;as=Table;v=v1;g=meta.k8s.io"
    status, table = api.request("GET", f"{policies}/{name}", accept=table_type)
    columns = [(column["name"], column["priority"]) for column in table["columnDefinitions"]]
    assert columns == [
        ("Name", 0),
        ("Ready", 0),
        ("Reason", 0),
        ("Pods", 0),
        ("Hit%", 0),
        ("Age", 0),
        ("Tiers", 1),
        ("Structural", 1),
        ("Live", 1),
    ]
    cells = table["rows"][0]["cells"]
    assert cells[1:5] == ["False", "PodsOutdated", "7/8", 31]
    assert cells[6:] == ["ram, disk", "3f9c1a2b", 12]


def test_short_name_and_category_are_served(api: Any, policies: str) -> None:
    _, resources = api.request("GET", f"/apis/{crd.GROUP}/{crd.VERSION}")
    resource = next(entry for entry in resources["resources"] if entry["name"] == crd.PLURAL)
    assert (resource["shortNames"], resource["categories"], resource["namespaced"]) == (
        ["kvtp"],
        ["kvtier"],
        True,
    )


def test_rendered_objects_are_accepted(api: Any, policies: str) -> None:
    policy = load_policy(
        json.dumps(changed(complete_policy(), {"metadata.namespace": api.namespace}))
    )
    for document in documents.kubernetes(policy):
        resource = {
            "ConfigMap": "configmaps",
            "PersistentVolumeClaim": "persistentvolumeclaims",
        }.get(document["kind"])
        path = (
            f"/api/v1/namespaces/{api.namespace}/{resource}"
            if resource
            else "/api/v1/persistentvolumes"
        )
        status, body = api.request("POST", f"{path}?dryRun=All&fieldValidation=Strict", document)
        assert status == 201, body


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_rendered_pod_volumes_are_accepted(api: Any, policies: str, path: Path) -> None:
    for checked in parse(path.read_bytes()):
        policy = checked.policy
        assert policy is not None
        mounted = [each for tier in policy.spec.tiers for each in tier.volumes]
        pod = {
            "metadata": {"name": "engine"},
            "spec": {
                "containers": [{"name": "c", "image": "i"}],
                "volumes": [
                    {"name": each.key.replace("/", "-"), **volumes.pod_volume(policy, each)}
                    for each in mounted
                ],
            },
        }
        template = {"metadata": {"name": "t"}, "template": pod}
        url = f"/api/v1/namespaces/{api.namespace}/podtemplates?dryRun=All&fieldValidation=Strict"
        status, body = api.request("POST", url, template)
        assert status == 201, body


@pytest.mark.parametrize(
    "capacity", ["64GB", "-1", "0", "1234e56", "x", "", "1..2", -5, "12:30:45"]
)
def test_a_bad_quantity_is_one_error(api: Any, policies: str, capacity: Any) -> None:
    policy = changed(SMALL, {"spec.tiers": [{"name": "ram", "memory": {"capacity": capacity}}]})
    status, body = _create(api, policies, policy)
    assert status == 422
    (cause,) = body["details"]["causes"]
    assert cause["field"] == "spec.tiers[0].memory.capacity"
    assert "must be a quantity above zero, such as 64Gi" in cause["message"]
