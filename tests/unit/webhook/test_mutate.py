"""Mutation: the decision about a pod, rendered as a patch of the pod in the request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.webhook.fixtures import (
    SERVING,
    Fixture,
    admission_review,
    body,
    pod,
    policy_document,
)
from tests.unit.webhook.test_jsonpatch import applied

from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.names import SKIPPED_ANNOTATION, STRUCTURAL_ANNOTATION
from kvtier_operator.injection.decision import Decision, Injected, Skipped
from kvtier_operator.injection.inject import inject
from kvtier_operator.webhook import mutate, review
from kvtier_operator.webhook.mutate import MutationResult


def decided(
    fixture: Fixture, document: dict[str, Any], decision: Decision | None = None, **request: Any
) -> MutationResult | None:
    """The patched; None if the pod needs no decision."""
    mutation = mutate.mutation_request(
        review.parse(body(admission_review(document, **request))), fixture.lister, fixture.settings
    )
    if mutation is None:
        return None
    return mutate.mutate(
        mutation, fixture.settings, lambda *_: decision or Injected(dict(document))
    )


@pytest.fixture
def fixture() -> Fixture:
    fixture = Fixture()
    fixture.policy()
    return fixture


def test_an_injected_pod_is_patched_as_decided(fixture: Fixture) -> None:
    original = pod(annotations={"own": "1"})
    desired = {
        **original,
        "metadata": {
            **original["metadata"],
            "annotations": {"own": "1", "kvtier.io/policy": "chat"},
        },
    }
    result = decided(fixture, original, Injected(desired, ("a note",)))
    assert result is not None
    assert (result.result, result.policy, result.notes) == ("Attached", "chat", ("a note",))
    assert applied(original, list(result.patch)) == desired
    assert len(result.patch) == 1


@pytest.mark.parametrize("metadata", [{}, {"annotations": None}, {"annotations": {"own": "1"}}])
def test_a_skipped_pod_gets_only_an_annotation_with_the_reason(
    fixture: Fixture, metadata: dict[str, Any]
) -> None:
    original = pod(**metadata)
    skipped = Skipped(SkipReason.ALREADY_CONFIGURED, "the engine is configured — skip it")
    result = decided(fixture, original, skipped)
    assert result is not None
    assert (result.result, result.reason) == ("Skipped", "AlreadyConfigured")
    patched = applied(original, list(result.patch))
    annotations = patched["metadata"].pop("annotations")
    assert json.loads(annotations.pop(SKIPPED_ANNOTATION)) == {
        "policy": "chat",
        "reason": "AlreadyConfigured",
        "message": "the engine is configured — skip it",
    }
    assert annotations == (original["metadata"].pop("annotations", None) or {})
    assert patched == original


def test_a_second_mutation_changes_nothing(fixture: Fixture) -> None:
    skipped = Skipped(SkipReason.DISABLED, "request for")
    first = decided(fixture, pod(), skipped)
    assert first is not None
    second = decided(fixture, applied(pod(), list(first.patch)), skipped)
    assert second is not None
    assert second.patch == ()


def test_an_outdated_reason_is_removed(fixture: Fixture) -> None:
    original = pod(annotations={SKIPPED_ANNOTATION: "{}", "own": "1"})
    seen: list[Any] = []

    def decide(policy: Any, found: Any, context: Any, settings: Any) -> Decision:
        seen.append(found)
        return Injected(dict(found))

    request = mutate.mutation_request(
        review.parse(body(admission_review(original))), fixture.lister, fixture.settings
    )
    assert request is not None
    result = mutate.mutate(request, fixture.settings, decide)
    assert SKIPPED_ANNOTATION not in seen[0]["metadata"]["annotations"]
    assert applied(original, list(result.patch))["metadata"]["annotations"] == {"own": "1"}


@pytest.mark.parametrize(
    "document",
    [
        pod(labels={"app": "other"}),
        pod(labels=None),
        pod(annotations={STRUCTURAL_ANNOTATION: "{}"}),
        pod(annotations={"kubernetes.io/config.mirror": "x"}),
        pod(ownerReferences=[{"kind": "DaemonSet", "name": "d", "uid": "u", "controller": True}]),
        {**pod(), "kind": "Node"},
    ],
    ids=["not selected", "no labels", "injected", "static", "daemon set", "no pod"],
)
def test_pods_that_cannot_be_injected_are_not_decided(
    fixture: Fixture, document: dict[str, Any]
) -> None:
    assert decided(fixture, document) is None


@pytest.mark.parametrize(
    "request_", [{"operation": "UPDATE"}, {"subResource": "ephemeralcontainers"}]
)
def test_only_create_requests_are_decided(fixture: Fixture, request_: dict[str, Any]) -> None:
    assert decided(fixture, pod(), **request_) is None


def test_a_config_map_only_policy_changes_no_pod() -> None:
    fixture = Fixture()
    fixture.policy(attach={"mode": "ConfigMapOnly"})
    assert decided(fixture, pod()) is None


def test_pods_in_namespaces_that_are_not_watched_are_unchanged() -> None:
    fixture = Fixture(watchNamespaces=["elsewhere"])
    fixture.policy()
    assert decided(fixture, pod()) is None
    fixture = Fixture(watchNamespaces=[SERVING])
    fixture.policy()
    assert decided(fixture, pod()) is not None
    assert policy_document()["metadata"]["namespace"] == SERVING


def test_a_real_decision_patches_only_what_is_injected(fixture: Fixture) -> None:
    original = pod(annotations={"own": "1"})
    request = mutate.mutation_request(
        review.parse(body(admission_review(original))), fixture.lister, fixture.settings
    )
    assert request is not None
    result = mutate.mutate(request, fixture.settings, inject)
    assert result.result == "Attached"
    patched = applied(original, list(result.patch))
    assert STRUCTURAL_ANNOTATION in patched["metadata"]["annotations"]
    assert (
        patched["spec"]["containers"][0]["command"] == original["spec"]["containers"][0]["command"]
    )
    touched = {
        operation["path"].split("/")[1] + "/" + operation["path"].split("/")[2]
        for operation in result.patch
    }
    assert touched == {
        "metadata/annotations",
        "metadata/labels",
        "spec/containers",
        "spec/initContainers",
        "spec/volumes",
    }
    again = mutate.mutation_request(
        review.parse(body(admission_review(patched))), fixture.lister, fixture.settings
    )
    assert again is None
