"""Warnings about changes that empty tiers. None of them is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.webhook.fixtures import admission_review, body, policy_document

from kvtier_operator.settings import Settings
from kvtier_operator.webhook import review
from kvtier_operator.webhook.validate import AdmissionAllowed, validate

RAM = {"name": "ram", "memory": {"capacity": "1Gi"}}
TEMPLATE = {"claimTemplate": {"accessModes": ["ReadWriteMany"],
                              "resources": {"requests": {"storage": "1Gi"}}}}  # fmt: skip


def disk(name: str = "disk", volume: Any = None, **rest: Any) -> dict[str, Any]:
    volume = volume or {"emptyDir": {}}
    return {
        "name": name,
        "fileSystem": {"capacity": "1Gi", "sharing": "Pod", "volume": volume},
        **rest,
    }


def warnings(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Of an update from one spec to the other, without warnings of the new spec itself."""

    def ask(**more: Any) -> set[str]:
        document = policy_document(**after)
        request = review.parse(body(admission_review(document, **more)))
        answer = validate(request, [], Settings())
        assert isinstance(answer, AdmissionAllowed), answer
        return set(answer.warnings)

    old = policy_document(**before)
    return sorted(ask(operation="UPDATE", oldObject=old) - ask())


def test_a_renamed_tier_is_another_tier() -> None:
    (warning,) = warnings({"tiers": [RAM, disk("nvme")]}, {"tiers": [RAM, disk("fast")]})
    assert warning.startswith('spec.tiers[1].name: "fast" is another tier than "nvme"')
    assert "Claim" not in warning


def test_the_claim_of_a_renamed_tier_goes_with_its_data() -> None:
    before, after = disk("nvme", TEMPLATE), disk("fast", TEMPLATE)
    (warning,) = warnings({"tiers": [RAM, before]}, {"tiers": [RAM, after]})
    assert "Claim chat-nvme-" in warning
    assert "is deleted with its data once no pod mounts it" in warning


def test_a_memory_tier_can_be_renamed_too() -> None:
    renamed = {**RAM, "name": "host"}
    (warning,) = warnings({"tiers": [RAM]}, {"tiers": [renamed]})
    assert '"host" is another tier than "ram"' in warning


def test_each_renamed_tier_is_named_once() -> None:
    found = warnings({"tiers": [RAM, disk("a"), disk("b")]}, {"tiers": [RAM, disk("c"), disk("d")]})
    assert ['"c" is another tier than "a"' in found[0], '"d" is another tier than "b"' in found[1]]
    assert len(found) == 2


def test_a_removed_tier_and_another_volume_are_said() -> None:
    (warning,) = warnings({"tiers": [RAM, disk()]}, {"tiers": [RAM]})
    assert 'tier "disk" is gone from pods when they are replaced' in warning
    claim = {"persistentVolumeClaim": {"claimName": "kv"}}
    (warning,) = warnings({"tiers": [RAM, disk()]}, {"tiers": [RAM, disk(volume=claim)]})
    assert "spec.tiers[1].fileSystem.volume" in warning


def test_a_tier_of_another_kind_starts_empty() -> None:
    store = {"name": "disk", "lmcache": {"url": "redis://cache.serving:6379", "capacity": "1Gi"}}
    (warning,) = warnings({"tiers": [RAM, disk()]}, {"tiers": [RAM, store]})
    assert 'tier "disk" is of another kind now' in warning


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("chunkTokens", {"chunkTokens": 512}),
        ("engine.hashSeed", {"engine": {"hashSeed": "7"}}),
        ("isolation.salt", {"isolation": {"salt": "x"}}),
        ("isolation.modelRevision", {"isolation": {"modelRevision": "x"}}),
    ],
)
def test_a_change_of_identity_makes_stored_objects_useless(path: str, spec: dict[str, Any]) -> None:
    tiers = {"tiers": [RAM, disk()]}
    (warning,) = warnings(tiers, {**tiers, **spec})
    assert warning.startswith(f"spec.{path}: objects that were stored before")


@pytest.mark.parametrize(
    "after",
    [
        {"tiers": [RAM, disk(loadWeight=7)]},
        {"tiers": [RAM, disk(), disk("second")]},
        {"tiers": [RAM, disk()], "minLoadTokens": 7},
        {"tiers": [RAM, disk()], "chunkTokens": 64},
    ],
)
def test_changes_that_keep_what_is_stored_have_no_warning(after: dict[str, Any]) -> None:
    assert warnings({"tiers": [RAM, disk()]}, after) == []


def test_a_stored_policy_that_cannot_be_read_does_not_prevent_a_change() -> None:
    broken = {"metadata": {"name": "chat"}, "spec": {"tiers": 7}}
    request = admission_review(policy_document(tiers=[RAM]), operation="UPDATE", oldObject=broken)
    answer = validate(review.parse(body(request)), [], Settings())
    assert isinstance(answer, AdmissionAllowed)


def disks(*names: str, capacity: str = "1Gi", base: str = "kv") -> dict[str, Any]:
    volumes = [
        {
            "name": name,
            "capacity": capacity,
            "persistentVolumeClaim": {"claimName": f"{base}-{name}"},
        }
        for name in names
    ]
    return {"name": "nvme", "fileSystem": {"sharing": "Node", "volumes": volumes}}


def test_a_volume_that_is_removed_or_moved_is_named() -> None:
    before = {"tiers": [RAM, disks("d0", "d1")]}
    (removed,) = warnings(before, {"tiers": [RAM, disks("d0")]})
    assert removed.startswith("spec.tiers[1].fileSystem.volumes: what tier")
    assert 'volume "d1"' in removed
    assert len(warnings(before, {"tiers": [RAM, disks("d0", "d1", base="other")]})) == 2
    assert warnings(before, {"tiers": [RAM, disks("d1", "d0", "d2", capacity="9Gi")]}) == []
