"""Pods of one LeaderWorkerSet group have one structure."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support import pod_objects
from tests.support.pod_objects import container, file_tier, memory_tier

from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.names import STRUCTURAL_ANNOTATION, TIERD_CONTAINER
from kvtier_operator.injection.decision import Injected, Skipped
from kvtier_operator.injection.inject import inject
from kvtier_operator.settings import Settings

NFS = {"nfs": {"server": "nas.example", "path": "/kv/chat"}}
POLICY = pod_objects.policy(memory_tier(), file_tier("shared", NFS, "Cluster"))


def member(name: str) -> dict[str, Any]:
    labels = {"app": "chat", "leaderworkerset.sigs.k8s.io/group-key": "g1"}
    return pod_objects.pod(metadata={"name": name, "labels": labels}, hostNetwork=True)


def with_tiers(name: str, **around: Any) -> dict[str, Any]:
    decision = inject(POLICY, member(name), pod_objects.context(**around), Settings())
    assert isinstance(decision, Injected)
    return decision.pod


def structural(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["annotations"][STRUCTURAL_ANNOTATION])


class TestGroups:
    def test_members_that_do_not_see_each_other_yet_have_the_same_structure(self) -> None:
        assert structural(with_tiers("chat-0")) == structural(with_tiers("chat-0-1"))

    def test_a_later_member_has_the_structure_of_the_first(self) -> None:
        first = with_tiers("chat-0", storage_ready=False)
        later = with_tiers("chat-0-1", siblings=[first])
        assert structural(later) == structural(first) != structural(with_tiers("chat-0-1"))
        mounts = {mount["name"] for mount in container(later, TIERD_CONTAINER)["volumeMounts"]}
        assert "kvtier-tier-shared" not in mounts

    @pytest.mark.parametrize(
        "how", ["without tiers", "different", "of an older policy", "unreadable"]
    )
    def test_a_pod_of_a_mixed_group_is_skipped(self, how: str) -> None:
        first, second = with_tiers("chat-0"), with_tiers("chat-0-1")
        if how == "without tiers":
            second = member("chat-0-1")
        elif how == "different":
            second["metadata"]["annotations"][STRUCTURAL_ANNOTATION] += " "
        else:
            for pod in (first, second):
                changes = (
                    {"kvtier.io/structural-hash": "0"}
                    if "older" in how
                    else {STRUCTURAL_ANNOTATION: "{}"}
                )
                pod["metadata"]["annotations"].update(changes)
        decision = inject(
            POLICY, member("chat-0-2"), pod_objects.context(siblings=[first, second]), Settings()
        )
        assert isinstance(decision, Skipped)
        assert decision.reason is SkipReason.MIXED_GROUP
        assert "delete the leader pod" in decision.message

    def test_terminating_and_ended_members_are_ignored(self) -> None:
        gone = member("chat-0")
        gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        failed = {**member("chat-0-1"), "status": {"phase": "Failed"}}
        itself = member("chat-0-2")
        assert with_tiers("chat-0-2", siblings=[gone, failed, itself])

    def test_members_that_the_policy_does_not_select_are_ignored(self) -> None:
        router = member("chat-0")
        del router["metadata"]["labels"]["app"]
        assert with_tiers("chat-0-1", siblings=[router])

    def test_a_pod_without_a_group_has_no_siblings(self) -> None:
        decision = inject(
            POLICY, pod_objects.pod(), pod_objects.context(siblings=[member("x")]), Settings()
        )
        assert isinstance(decision, Injected)
