"""Of several policies that select a pod, the oldest one that is not being deleted governs it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from tests.support import pod_objects

from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.selector import LabelSelector
from kvtier_operator.injection.governing import governing, precedence, selects

CHAT = {"app": "chat"}
SELECTOR = LabelSelector.model_validate({"matchLabels": CHAT})


@dataclass(frozen=True)
class Record:
    """The least that a caller has to know of a policy."""

    uid: str | None
    creation_timestamp: str | None = "2026-01-01T00:00:00Z"
    deletion_timestamp: str | None = None
    namespace: str = "serving"
    pod_selector: LabelSelector = SELECTOR


OLD = Record("b")
SAME_AGE = Record("c")
YOUNG = Record("a", "2026-02-01T00:00:00Z")
NOT_CREATED = Record(None, None)


def with_metadata(policy: KVTierPolicy, **changes: str | None) -> KVTierPolicy:
    return policy.model_copy(update={"metadata": policy.metadata.model_copy(update=changes)})


def test_the_oldest_policy_governs_and_the_uid_decides_between_equals() -> None:
    for order in itertools.permutations([OLD, SAME_AGE, YOUNG, NOT_CREATED]):
        assert governing(order, "serving", CHAT) is OLD
        assert sorted(order, key=precedence) == [OLD, SAME_AGE, YOUNG, NOT_CREATED]
    assert governing([NOT_CREATED], "serving", CHAT) is NOT_CREATED


@pytest.mark.parametrize(
    ("namespace", "labels"), [("other", CHAT), ("serving", {"app": "else"}), ("serving", {})]
)
def test_a_policy_governs_no_pod_that_it_does_not_select(
    namespace: str, labels: dict[str, str]
) -> None:
    assert not selects(OLD, namespace, labels)
    assert governing([OLD], namespace, labels) is None


def test_a_policy_that_is_being_deleted_governs_no_pod() -> None:
    going = Record("0", "2025-01-01T00:00:00Z", deletion_timestamp="2026-03-01T00:00:00Z")
    assert governing([going], "serving", CHAT) is None
    assert governing([going, YOUNG], "serving", CHAT) is YOUNG


def test_policies_can_be_compared_as_they_are() -> None:
    young, old = pod_objects.policy(name="young"), pod_objects.policy(name="old")
    old = with_metadata(old, creation_timestamp="2025-01-01T00:00:00Z")
    assert governing([young, old], "serving", CHAT) is old
    going = with_metadata(old, deletion_timestamp="2026-01-01T00:00:00Z")
    assert governing([young, going], "serving", CHAT) is young


def test_a_policy_for_pods_that_people_configure_governs_them() -> None:
    by_hand = pod_objects.policy(attach={"mode": "ConfigMapOnly"})
    assert governing([by_hand], "serving", CHAT) is by_hand
