"""What becomes of a pod: the decision as a patch of the pod as it came."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.webhook.test_patch import applied
from tests.unit.webhook.world import SERVING, World, body, pod, policy_document, question

from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.names import SKIPPED_ANNOTATION, STRUCTURAL_ANNOTATION
from kvtier_operator.injection.decision import Decision, Injected, Skipped
from kvtier_operator.injection.inject import inject
from kvtier_operator.webhook import mutate, review
from kvtier_operator.webhook.mutate import MutationResult


def decided(
    world: World, document: dict[str, Any], decision: Decision | None = None, **request: Any
) -> MutationResult | None:
    """The verdict; None where nothing is to be decided."""
    asked = mutate.question(
        review.parse(body(question(document, **request))), world.knowledge, world.settings
    )
    if asked is None:
        return None
    return mutate.answer(asked, world.settings, lambda *_: decision or Injected(dict(document)))


@pytest.fixture
def world() -> World:
    world = World()
    world.policy()
    return world


def test_a_selected_pod_becomes_what_was_decided(world: World) -> None:
    original = pod(annotations={"own": "1"})
    desired = {
        **original,
        "metadata": {
            **original["metadata"],
            "annotations": {"own": "1", "kvtier.io/policy": "chat"},
        },
    }
    verdict = decided(world, original, Injected(desired, ("a note",)))
    assert verdict is not None
    assert (verdict.result, verdict.policy, verdict.notes) == ("Attached", "chat", ("a note",))
    assert applied(original, list(verdict.patch)) == desired
    assert len(verdict.patch) == 1


@pytest.mark.parametrize("metadata", [{}, {"annotations": None}, {"annotations": {"own": "1"}}])
def test_a_pod_that_is_left_alone_gets_the_reason_and_nothing_else(
    world: World, metadata: dict[str, Any]
) -> None:
    original = pod(**metadata)
    skipped = Skipped(SkipReason.ALREADY_CONFIGURED, "it has its own — leave it")
    verdict = decided(world, original, skipped)
    assert verdict is not None
    assert (verdict.result, verdict.reason) == ("Skipped", "AlreadyConfigured")
    result = applied(original, list(verdict.patch))
    annotations = result["metadata"].pop("annotations")
    assert json.loads(annotations.pop(SKIPPED_ANNOTATION)) == {
        "policy": "chat",
        "reason": "AlreadyConfigured",
        "message": "it has its own — leave it",
    }
    assert annotations == (original["metadata"].pop("annotations", None) or {})
    assert result == original


def test_being_asked_twice_changes_nothing_the_second_time(world: World) -> None:
    skipped = Skipped(SkipReason.DISABLED, "asked for")
    first = decided(world, pod(), skipped)
    assert first is not None
    second = decided(world, applied(pod(), list(first.patch)), skipped)
    assert second is not None
    assert second.patch == ()


def test_a_reason_that_no_longer_holds_is_taken_away(world: World) -> None:
    original = pod(annotations={SKIPPED_ANNOTATION: "{}", "own": "1"})
    seen: list[Any] = []

    def decide(policy: Any, found: Any, around: Any, settings: Any) -> Decision:
        seen.append(found)
        return Injected(dict(found))

    asked = mutate.question(review.parse(body(question(original))), world.knowledge, world.settings)
    assert asked is not None
    verdict = mutate.answer(asked, world.settings, decide)
    assert SKIPPED_ANNOTATION not in seen[0]["metadata"]["annotations"]
    assert applied(original, list(verdict.patch))["metadata"]["annotations"] == {"own": "1"}


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
def test_what_is_not_ours_is_not_decided(world: World, document: dict[str, Any]) -> None:
    assert decided(world, document) is None


@pytest.mark.parametrize(
    "request_", [{"operation": "UPDATE"}, {"subResource": "ephemeralcontainers"}]
)
def test_only_creation_is_decided(world: World, request_: dict[str, Any]) -> None:
    assert decided(world, pod(), **request_) is None


def test_a_policy_that_only_writes_config_maps_changes_no_pod() -> None:
    world = World()
    world.policy(attach={"mode": "ConfigMapOnly"})
    assert decided(world, pod()) is None


def test_namespaces_that_are_not_watched_are_left_alone() -> None:
    world = World(watchNamespaces=["elsewhere"])
    world.policy()
    assert decided(world, pod()) is None
    world = World(watchNamespaces=[SERVING])
    world.policy()
    assert decided(world, pod()) is not None
    assert policy_document()["metadata"]["namespace"] == SERVING


def test_a_real_decision_touches_only_what_is_injected(world: World) -> None:
    original = pod(annotations={"own": "1"})
    asked = mutate.question(review.parse(body(question(original))), world.knowledge, world.settings)
    assert asked is not None
    verdict = mutate.answer(asked, world.settings, inject)
    assert verdict.result == "Attached"
    result = applied(original, list(verdict.patch))
    assert STRUCTURAL_ANNOTATION in result["metadata"]["annotations"]
    assert (
        result["spec"]["containers"][0]["command"] == original["spec"]["containers"][0]["command"]
    )
    touched = {
        operation["path"].split("/")[1] + "/" + operation["path"].split("/")[2]
        for operation in verdict.patch
    }
    assert touched == {
        "metadata/annotations",
        "metadata/labels",
        "spec/containers",
        "spec/initContainers",
        "spec/volumes",
    }
    again = mutate.question(review.parse(body(question(result))), world.knowledge, world.settings)
    assert again is None
