"""Policies are refused for what is wrong with them, and people are warned of what they may not have meant."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.support.invalid_policies import INVALID, InvalidCase
from tests.support.policies import changed, complete_policy
from tests.unit.webhook.world import SERVING, body, disk, policy_document, question

from kvtier_operator.api.allowlist import AllowedVolume
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.settings import Settings
from kvtier_operator.webhook import review
from kvtier_operator.webhook.validate import Findings, examine

ALLOWED = [
    AllowedVolume.model_validate({"namespaces": ["*"], "hostPath": "/mnt"}),
    AllowedVolume.model_validate(
        {"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/"}}
    ),
]


def examined(
    document: dict[str, Any],
    others: list[dict[str, Any]] | None = None,
    allowed: list[AllowedVolume] | None = None,
    labels: dict[str, str] | None = None,
    watched: tuple[str, ...] = (),
    **asked: Any,
) -> Findings:
    parsed = review.parse(body(question(document, **asked)))
    known = [KVTierPolicy.model_validate(other) for other in others or []]
    settings = Settings(
        allowed_volumes=tuple(ALLOWED if allowed is None else allowed), watch_namespaces=watched
    )
    return examine(parsed, known, settings, labels)


def ram_and(tier: dict[str, Any], name: str = "chat", **spec: Any) -> dict[str, Any]:
    return policy_document(
        name, tiers=[{"name": "ram", "memory": {"capacity": "1Gi"}}, tier], **spec
    )


def test_the_complete_policy_is_accepted() -> None:
    assert examined(complete_policy()) == Findings()


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_what_the_models_refuse_is_refused_with_field_value_and_what_is_accepted(
    case: InvalidCase,
) -> None:
    found = examined(changed(complete_policy(), case.changes))
    assert found.refusals
    for refusal in found.refusals:
        assert refusal.message.startswith(f"{refusal.field}: {refusal.type.value}")
        assert case.detail in refusal.message


def test_everything_that_is_wrong_is_said_at_once() -> None:
    document = ram_and({**disk("/etc"), "loadWeight": 0})
    fields = [refusal.field for refusal in examined(document).refusals]
    assert fields == ["spec.tiers[1].loadWeight"]
    fields = [
        refusal.field for refusal in examined(changed(document, {"spec.chunkTokens": 7})).refusals
    ]
    assert sorted(fields) == ["spec.chunkTokens", "spec.tiers[1].loadWeight"]


def test_a_directory_outside_of_the_namespaces_list_is_refused() -> None:
    lists = [AllowedVolume.model_validate({"namespaces": ["other"], "hostPath": "/mnt/kv"})]
    (refusal,) = examined(ram_and(disk("/mnt/kv")), allowed=lists).refusals
    assert refusal.field == "spec.tiers[1].fileSystem.volume.hostPath.path"
    assert SERVING in refusal.message


def test_the_namespace_is_that_of_the_request() -> None:
    document = ram_and(disk("/mnt/kv"))
    del document["metadata"]["namespace"]
    lists = [AllowedVolume.model_validate({"namespaces": [SERVING], "hostPath": "/mnt/kv"})]
    assert not examined(document, allowed=lists).refusals


def test_a_generated_name_is_accepted() -> None:
    document = policy_document()
    del document["metadata"]["name"]
    document["metadata"]["generateName"] = "chat-"
    assert not examined(document, name="").refusals


def test_a_list_that_became_stricter_keeps_nobody_from_changing_something_else() -> None:
    old = ram_and(disk("/mnt/kv"))
    labelled = changed(old, {"metadata.labels": {"a": "b"}})
    lighter = changed(old, {"spec.tiers.1.loadWeight": 5})
    for document in (labelled, lighter):
        found = examined(document, allowed=[], operation="UPDATE", old=old)
        assert not found.refusals
        assert any("/mnt/kv" in warning for warning in found.warnings)
    moved = changed(old, {"spec.tiers.1.fileSystem.volume.hostPath.path": "/mnt/other"})
    (refusal,) = examined(moved, allowed=[], operation="UPDATE", old=old).refusals
    assert "/mnt/other" in refusal.message


def test_what_was_broken_before_may_be_labelled_and_may_go() -> None:
    broken = changed(policy_document(), {"spec.fromTheFuture": 1})
    assert not examined(
        changed(broken, {"metadata.labels": {}}), operation="UPDATE", old=broken
    ).refusals
    going = changed(
        broken, {"metadata.deletionTimestamp": "2026-01-01T00:00:00Z", "spec.chunkTokens": 7}
    )
    assert not examined(going, operation="UPDATE", old=broken).refusals
    worse = changed(broken, {"spec.chunkTokens": 7})
    assert [
        refusal.field for refusal in examined(worse, operation="UPDATE", old=broken).refusals
    ] == ["spec.chunkTokens"]


def test_a_status_of_another_version_refuses_nothing() -> None:
    assert not examined({**policy_document(), "status": {"conditions": "new style"}}).refusals


@pytest.mark.parametrize(
    ("selector", "warned"),
    [
        ({"matchLabels": {"app": "engine"}}, True),
        ({}, True),
        ({"matchLabels": {"app": "engine", "size": "70b"}}, True),
        (
            {"matchExpressions": [{"key": "app", "operator": "In", "values": ["engine", "other"]}]},
            True,
        ),
        ({"matchLabels": {"app": "other"}}, False),
        ({"matchLabels": {"team": "a"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["engine"]}]}, False),
    ],
)
def test_an_overlap_is_warned_of_and_never_refused(selector: dict[str, Any], warned: bool) -> None:
    found = examined(
        policy_document(), [policy_document("other", podSelector=selector), policy_document()]
    )
    assert not found.refusals
    assert [
        warning for warning in found.warnings if "policy other selects" in warning
    ] != [] or not warned
    assert bool(found.warnings) == warned


def test_a_shared_claim_with_another_hash_seed_is_warned_of() -> None:
    claim = disk(persistentVolumeClaim={"claimName": "kv"})
    elsewhere = {"podSelector": {"matchLabels": {"app": "other"}}}
    other = ram_and(copy.deepcopy(claim), "other", engine={"hashSeed": "7"}, **elsewhere)
    found = examined(ram_and(claim), [other])
    assert any("claim kv" in warning and "own capacity" in warning for warning in found.warnings)
    assert any("hashSeed" in warning and "7" in warning for warning in found.warnings)
    same = ram_and(copy.deepcopy(claim), "other", **elsewhere)
    assert not any("hashSeed" in warning for warning in examined(ram_and(claim), [same]).warnings)


@pytest.mark.parametrize("shared", [False, True])
def test_a_directory_of_the_node_is_the_same_only_where_the_administrator_shares_it(
    shared: bool,
) -> None:
    entry = AllowedVolume.model_validate(
        {"namespaces": ["*"], "hostPath": "/mnt", "shared": shared}
    )
    other = ram_and(
        disk(), "other", engine={"hashSeed": "7"}, podSelector={"matchLabels": {"app": "other"}}
    )
    warnings = examined(ram_and(disk()), [other], allowed=[entry]).warnings
    assert any("hostPath /mnt/kv" in warning and "own capacity" in warning for warning in warnings)
    assert any("hashSeed" in warning for warning in warnings) == shared


def test_a_namespace_that_nobody_labelled_or_watches_is_warned_of() -> None:
    assert examined(policy_document(), labels={"kvtier.io/inject": "enabled"}) == Findings()
    (warning,) = examined(policy_document(), labels={}).warnings
    assert "kvtier.io/inject=enabled" in warning
    assert not examined(policy_document(attach={"mode": "ConfigMapOnly"}), labels={}).warnings
    (warning,) = examined(policy_document(), watched=("elsewhere",)).warnings
    assert "does not look at serving" in warning


def test_other_objects_and_operations_are_nobodys_business() -> None:
    broken = changed(policy_document(), {"spec.chunkTokens": 7})
    assert examined(broken, operation="DELETE") == Findings()
    assert examined({**broken, "kind": "Other"}) == Findings()
    assert examined(broken, subResource="status") == Findings()
