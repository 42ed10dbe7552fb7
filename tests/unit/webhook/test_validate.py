"""Policies are denied for their errors; warnings point out settings that may be unintended."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.invalid_policies import INVALID, InvalidCase
from tests.support.policies import changed, complete_policy
from tests.unit.webhook.fixtures import SERVING, admission_review, body, disk, policy_document

from kvtier_operator.api.allowlist import AllowedVolume
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.unenforced import NO_RESTARTS
from kvtier_operator.api.validation import FieldError
from kvtier_operator.settings import Settings
from kvtier_operator.webhook import review
from kvtier_operator.webhook.validate import AdmissionAllowed, AdmissionDenied, validate

ALLOWED = [
    AllowedVolume.model_validate({"namespaces": ["*"], "hostPath": "/mnt"}),
    AllowedVolume.model_validate(
        {"namespaces": ["*"], "nfs": {"server": "nas.example", "exportPrefix": "/"}}
    ),
]


@dataclass(frozen=True)
class Result:
    errors: tuple[FieldError, ...] = ()
    warnings: tuple[str, ...] = ()


def validated(
    document: dict[str, Any],
    others: list[dict[str, Any]] | None = None,
    allowed: list[AllowedVolume] | None = None,
    labels: dict[str, str] | None = None,
    watched: tuple[str, ...] = (),
    **request: Any,
) -> Result:
    parsed = review.parse(body(admission_review(document, **request)))
    known = [KVTierPolicy.model_validate(other) for other in others or []]
    settings = Settings(
        allowed_volumes=tuple(ALLOWED if allowed is None else allowed), watch_namespaces=watched
    )
    result = validate(parsed, known, settings, labels)
    if isinstance(result, AdmissionDenied):
        return Result(result.errors, result.warnings)
    assert isinstance(result, AdmissionAllowed)
    return Result(warnings=result.warnings)


def ram_and(tier: dict[str, Any], name: str = "chat", **spec: Any) -> dict[str, Any]:
    return policy_document(
        name, tiers=[{"name": "ram", "memory": {"capacity": "1Gi"}}, tier], **spec
    )


def test_the_complete_policy_is_allowed() -> None:
    found = validated(complete_policy())
    assert not found.errors
    assert all("has no effect in this version" in warning for warning in found.warnings)


def test_fields_without_effect_and_fields_of_a_newer_definition_give_warnings() -> None:
    document = policy_document(monitoring={"podMonitor": "Enabled"}, fromTheFuture=1)
    found = validated(document)
    assert not found.errors
    fields = {warning.split(":")[0] for warning in found.warnings}
    assert fields == {"spec.monitoring.podMonitor", "spec.fromTheFuture"}


REMOTE = {"name": "remote", "lmcache": {"url": "redis://cache:6379"}}


def test_a_share_of_tenants_on_an_lmcache_tier_gives_a_warning() -> None:
    found = validated(ram_and(REMOTE, tenants={"maxPercent": 25}))
    assert not found.errors
    assert list(found.warnings) == [
        "spec.tenants.maxPercent: has no effect on tier remote: KVTier does not evict from an "
        "lmcache tier by tenant"
    ]
    assert not validated(ram_and(REMOTE)).warnings
    assert not validated(ram_and(REMOTE, tenants={"maxPercent": 100})).warnings


def test_restarts_that_the_administrator_does_not_allow_give_a_warning() -> None:
    found = validated(policy_document(rollout={"strategy": "RestartWorkloads"}))
    assert list(found.warnings) == [NO_RESTARTS]


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_every_error_of_the_models_denies_and_names_the_field(
    case: InvalidCase,
) -> None:
    found = validated(changed(complete_policy(), case.changes))
    assert found.errors
    for error in found.errors:
        assert error.message.startswith(f"{error.field}: {error.type.value}")
        assert case.detail in error.message


def test_all_errors_are_reported_together() -> None:
    document = ram_and({**disk("/etc"), "loadWeight": 0})
    fields = [error.field for error in validated(document).errors]
    assert fields == ["spec.tiers[1].loadWeight"]
    fields = [error.field for error in validated(changed(document, {"spec.chunkTokens": 7})).errors]
    assert sorted(fields) == ["spec.chunkTokens", "spec.tiers[1].loadWeight"]


def test_a_directory_that_is_not_allowed_in_the_namespace_is_denied() -> None:
    lists = [AllowedVolume.model_validate({"namespaces": ["other"], "hostPath": "/mnt/kv"})]
    (error,) = validated(ram_and(disk("/mnt/kv")), allowed=lists).errors
    assert error.field == "spec.tiers[1].fileSystem.volume.hostPath.path"
    assert SERVING in error.message


def test_the_namespace_defaults_to_that_of_the_request() -> None:
    document = ram_and(disk("/mnt/kv"))
    del document["metadata"]["namespace"]
    lists = [AllowedVolume.model_validate({"namespaces": [SERVING], "hostPath": "/mnt/kv"})]
    assert not validated(document, allowed=lists).errors


def test_a_generated_name_is_allowed() -> None:
    document = policy_document()
    del document["metadata"]["name"]
    document["metadata"]["generateName"] = "chat-"
    assert not validated(document, name="").errors


def test_stricter_allowed_volumes_do_not_block_other_changes() -> None:
    old = ram_and(disk("/mnt/kv"))
    labelled = changed(old, {"metadata.labels": {"a": "b"}})
    lighter = changed(old, {"spec.tiers.1.loadWeight": 5})
    for document in (labelled, lighter):
        found = validated(document, allowed=[], operation="UPDATE", old=old)
        assert not found.errors
        assert any("/mnt/kv" in warning for warning in found.warnings)
    moved = changed(old, {"spec.tiers.1.fileSystem.volume.hostPath.path": "/mnt/other"})
    (error,) = validated(moved, allowed=[], operation="UPDATE", old=old).errors
    assert "/mnt/other" in error.message


def test_an_invalid_policy_can_be_labelled_and_deleted() -> None:
    broken = changed(policy_document(), {"spec.fromTheFuture": 1})
    assert not validated(
        changed(broken, {"metadata.labels": {}}), operation="UPDATE", old=broken
    ).errors
    going = changed(
        broken, {"metadata.deletionTimestamp": "2026-01-01T00:00:00Z", "spec.chunkTokens": 7}
    )
    assert not validated(going, operation="UPDATE", old=broken).errors
    worse = changed(broken, {"spec.chunkTokens": 7})
    assert [error.field for error in validated(worse, operation="UPDATE", old=broken).errors] == [
        "spec.chunkTokens"
    ]


def test_the_status_is_not_validated() -> None:
    assert not validated({**policy_document(), "status": {"conditions": "new style"}}).errors


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
def test_overlapping_selectors_are_a_warning(selector: dict[str, Any], warned: bool) -> None:
    found = validated(
        policy_document(), [policy_document("other", podSelector=selector), policy_document()]
    )
    assert not found.errors
    assert any('policy "other" selects' in warning for warning in found.warnings) == warned
    assert bool(found.warnings) == warned


@pytest.mark.parametrize("selector", [{}, {"matchLabels": {}}, {"matchExpressions": []}])
def test_a_selector_of_every_pod_is_a_warning(selector: dict[str, Any]) -> None:
    found = validated(policy_document(podSelector=selector))
    assert not found.errors
    (warning,) = found.warnings
    assert "selects every pod" in warning
    assert not validated(policy_document()).warnings


def test_a_shared_claim_with_another_hash_seed_is_a_warning() -> None:
    claim = disk(persistentVolumeClaim={"claimName": "kv"})
    elsewhere = {"podSelector": {"matchLabels": {"app": "other"}}}
    other = ram_and(copy.deepcopy(claim), "other", engine={"hashSeed": "7"}, **elsewhere)
    found = validated(ram_and(claim), [other])
    assert any("claim kv" in warning and "own capacity" in warning for warning in found.warnings)
    assert any("hashSeed" in warning and "7" in warning for warning in found.warnings)
    same = ram_and(copy.deepcopy(claim), "other", **elsewhere)
    assert not any("hashSeed" in warning for warning in validated(ram_and(claim), [same]).warnings)


@pytest.mark.parametrize("shared", [False, True])
def test_a_host_path_is_one_directory_only_if_the_administrator_shares_it(
    shared: bool,
) -> None:
    entry = AllowedVolume.model_validate(
        {"namespaces": ["*"], "hostPath": "/mnt", "shared": shared}
    )
    other = ram_and(
        disk(), "other", engine={"hashSeed": "7"}, podSelector={"matchLabels": {"app": "other"}}
    )
    warnings = validated(ram_and(disk()), [other], allowed=[entry]).warnings
    assert any("hostPath /mnt/kv" in warning and "own capacity" in warning for warning in warnings)
    assert any("hashSeed" in warning for warning in warnings) == shared


def test_a_namespace_that_is_not_labelled_or_not_watched_is_a_warning() -> None:
    assert validated(policy_document(), labels={"kvtier.io/inject": "enabled"}) == Result()
    (warning,) = validated(policy_document(), labels={}).warnings
    assert "kvtier.io/inject=enabled" in warning
    assert not validated(policy_document(attach={"mode": "ConfigMapOnly"}), labels={}).warnings
    (warning,) = validated(policy_document(), watched=("elsewhere",)).warnings
    assert 'does not watch namespace "serving"' in warning


def test_other_objects_and_operations_are_allowed() -> None:
    broken = changed(policy_document(), {"spec.chunkTokens": 7})
    assert validated(broken, operation="DELETE") == Result()
    assert validated({**broken, "kind": "Other"}) == Result()
    assert validated(broken, subResource="status") == Result()
