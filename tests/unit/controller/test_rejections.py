"""Pods that the API server rejects: what the message says, and the trial without tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from tests.support.memory_cluster import MemoryCluster
from tests.support.pods import NOON, at, policy
from tests.unit.controller.builders import reconcile_input

from kvtier_operator.api.pods import PodSpec, decode
from kvtier_operator.api.status import SuspendedOwner
from kvtier_operator.controller.injection_breaker import rejections
from kvtier_operator.controller.injection_breaker.detectors import InjectionFailure
from kvtier_operator.controller.injection_breaker.rejections import (
    Cause,
    RejectionDetector,
    RejectionMemory,
    cause_of,
)
from kvtier_operator.controller.lookups import ClusterAccess, Lookups
from kvtier_operator.kube.resources import EVENTS, NAMESPACES, POLICIES, REPLICA_SETS
from kvtier_operator.settings import Settings

POD_SECURITY = (
    'pods "chat-5d-x" is forbidden: violates PodSecurity "baseline:latest": '
    'hostPath volumes (volume "{}")'
)
REGISTRY = (
    'pods "chat-5d-{}" is forbidden: ValidatingAdmissionPolicy "registries" with binding '
    '"registries" denied request: images must come from registry.corp'
)
QUOTA = (
    'pods "x" is forbidden: exceeded quota: gold, requested: {0}={1}, used: {0}=0, limited: {0}={2}'
)
SMALL = {"containers": [{"name": "vllm", "resources": {"limits": {"memory": "1Gi"}}}]}


@pytest.mark.parametrize(
    ("message", "template", "cause"),
    [
        (POD_SECURITY.format("kvtier-tier-nvme"), None, Cause.INJECTION),
        (POD_SECURITY.format("model"), None, Cause.UNKNOWN),
        (REGISTRY, SMALL, Cause.UNKNOWN),
        ('Pod "x" is invalid: spec.initContainers[1].image: Required value', None, Cause.UNKNOWN),
        ("the service mesh wants a probe in each container", None, Cause.UNKNOWN),
        ("", None, Cause.UNKNOWN),
        (QUOTA.format("limits.memory", "9Gi", "8Gi"), SMALL, Cause.INJECTION),
        (QUOTA.format("limits.memory", "9Gi", "512Mi"), SMALL, Cause.OTHER),
        (QUOTA.format("limits.memory", "9Gi", "8Gi"), None, Cause.UNKNOWN),
        (QUOTA.format("pods", "1", "0"), None, Cause.OTHER),
        (
            'pods "kvtier-payload-5d-x" is forbidden: error looking up service account serving/a: '
            'serviceaccount "a" not found',
            None,
            Cause.OTHER,
        ),
        (
            'pods "x" is forbidden: no PriorityClass with name gold was found',
            None,
            Cause.OTHER,
        ),
        (
            'pods "x" is forbidden: unable to create new content in namespace serving '
            "because it is being terminated",
            None,
            Cause.OTHER,
        ),
    ],
)
def test_what_a_message_says_about_injection(
    message: str, template: Mapping[str, Any] | None, cause: Cause
) -> None:
    found = None if template is None else decode(template, PodSpec)
    assert cause_of(message, found) is cause


class Story:
    """The rejections of one owner, and what is remembered of them. ``now`` advances."""

    def __init__(self, created: float = NOON - 3600, **selected: str) -> None:
        self.now = NOON
        self.memory = RejectionMemory()
        self.suspended: list[SuspendedOwner] = []
        plain = policy()
        metadata = plain.metadata.model_copy(update={"creation_timestamp": at(created)})
        self.policy = plain.model_copy(update={"metadata": metadata})
        self.api = MemoryCluster()
        self.api.put(
            NAMESPACES,
            {"metadata": {"name": "serving", "labels": {"kvtier.io/inject": "enabled"}}},
        )
        self.api.put(
            POLICIES,
            plain.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True),
        )
        template = {"metadata": {"labels": selected or {"app": "chat"}}, "spec": SMALL}
        metadata = {"name": "chat-5d", "namespace": "serving", "uid": "u"}
        self.api.put(REPLICA_SETS, {"metadata": metadata, "spec": {"template": template}})

    def reject(self, message: str, seconds: float = 0, kind: str = "ReplicaSet") -> None:
        """An Event that began ``seconds`` ago and occurred just now."""
        about = {"apiVersion": "apps/v1", "kind": kind, "name": "chat-5d", "uid": "u"}
        event = {
            "metadata": {"name": f"event-{self.now}", "namespace": "serving"},
            "reason": "FailedCreate",
            "message": message,
            "involvedObject": about,
            "firstTimestamp": at(self.now - seconds),
            "lastTimestamp": at(self.now),
        }
        self.api.put(EVENTS, event)

    def detect(self, seconds: float = 0) -> list[InjectionFailure]:
        """The failures after so many seconds. Their owners are suspended until a trial ends."""
        self.now += seconds
        lookups = Lookups(self.api, lambda: self.now, Settings().webhook.namespace_selector)
        detector = RejectionDetector(
            ClusterAccess(self.api.cached(), self.api, lookups),
            self.policy,
            reconcile_input(),
            self.memory,
            self.now,
        )
        found = asyncio.run(detector.detect(self.suspended))
        cleared = self.memory.cleared
        self.suspended = [each for each in self.suspended if each.uid not in cleared]
        for failure in found:
            assert failure.owner is not None
            owner = failure.owner
            self.suspended.append(
                SuspendedOwner(kind=owner.kind, name=owner.name, uid=owner.uid, reason="Refused")
            )
        return found


def test_a_rejection_that_names_an_injected_part_suspends_at_once() -> None:
    story = Story()
    story.reject(POD_SECURITY.format("kvtier-tier-nvme"))
    (failure,) = story.detect()
    assert failure.is_certain
    assert story.memory.trials == {}


def test_an_unexplained_rejection_that_lasts_is_tried_without_tiers() -> None:
    story = Story()
    story.reject(REGISTRY.format("aaaaa"))
    assert story.detect(1) == []
    story.now += 5
    story.reject(REGISTRY.format("bbbbb"))
    (failure,) = story.detect()
    assert not failure.is_certain
    assert "images must come from registry.corp" in failure.message
    assert "the next pod shows whether tiers are the cause" in failure.message
    # The next pod is admitted: nothing else is rejected, and the suspension stays.
    assert story.detect(60) == []
    assert [each.uid for each in story.suspended] == ["u"]


def test_a_rejection_without_tiers_too_ends_the_suspension_for_good() -> None:
    story = Story()
    story.reject(REGISTRY.format("aaaaa"), seconds=10)
    assert len(story.detect(1)) == 1
    # Another webhook may not have seen the suspension yet: this one says nothing.
    story.now += 3
    story.reject(REGISTRY.format("bbbbb"))
    assert story.detect() == []
    assert len(story.suspended) == 1
    story.now += 10
    story.reject(REGISTRY.format("ccccc"))
    assert story.detect() == []
    assert story.suspended == []
    assert "chat-5d without tiers too: " in story.memory.cleared["u"].text
    for _ in range(3):
        story.now += 100
        story.reject(REGISTRY.format("ddddd"))
        assert story.detect() == []
    # Another message is another cause.
    story.reject("containers need a readiness probe", seconds=20)
    assert len(story.detect(1)) == 1
    assert story.memory.cleared == {}


def test_a_certain_rejection_is_not_undone_by_another_without_tiers() -> None:
    story = Story()
    story.reject(POD_SECURITY.format("kvtier-tier-nvme"))
    assert len(story.detect()) == 1
    story.now += 60
    story.reject(REGISTRY.format("aaaaa"))
    assert story.detect() == []
    assert len(story.suspended) == 1


def test_an_unexplained_rejection_before_the_policy_existed_did_not_begin_with_it() -> None:
    story = Story(created=NOON - 100)
    story.reject(REGISTRY.format("aaaaa"), seconds=200)
    assert story.detect() == []
    story = Story(created=NOON - 300)
    story.reject(REGISTRY.format("aaaaa"), seconds=200)
    assert len(story.detect(1)) == 1


def test_a_trial_lasts_until_kubernetes_creates_the_next_pod() -> None:
    for lasted, expected in ((10, 70), (500, 560), (80_000, 1_060)):
        story = Story(created=NOON - 100_000)
        story.reject(REGISTRY.format("aaaaa"), seconds=lasted)
        (failure,) = story.detect(1)
        assert failure.retried_within_seconds == expected


@pytest.mark.parametrize(("kind", "counts"), [("Job", True), ("DaemonSet", False)])
def test_owners_whose_template_cannot_be_read_are_tried_if_their_pods_can_be_injected(
    kind: str, counts: bool
) -> None:
    story = Story()
    story.reject(REGISTRY.format("aaaaa"), seconds=10, kind=kind)
    assert len(story.detect(1)) == counts


def test_owners_of_other_pods_and_changed_policies_are_left_alone() -> None:
    story = Story(app="web")
    story.reject(REGISTRY.format("aaaaa"), seconds=10)
    assert story.detect(1) == []
    story = Story()
    story.reject(REGISTRY.format("aaaaa"), seconds=10)
    story.memory.record_change(story.now + 1)
    assert story.detect(2) == []


def test_memory_is_bounded_by_what_is_rejected_now() -> None:
    story = Story()
    story.reject(REGISTRY.format("aaaaa"), seconds=10)
    story.detect(1)
    story.now += rejections.TRIAL_SETTLE_SECONDS + 2
    story.reject(REGISTRY.format("bbbbb"))
    story.detect()
    assert list(story.memory.cleared) == ["u"]
    for event in story.api.list_now(EVENTS):
        story.api.remove(EVENTS, "serving", event["metadata"]["name"])
    story.detect(1)
    assert (story.memory.cleared, story.memory.trials) == ({}, {})
