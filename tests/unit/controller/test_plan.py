"""Planning from values. ``tests/cluster`` tests what a real API server does with a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.support import controllers
from tests.support.controllers import file_tier

from kvtier_operator.controller.cached_policy import CachedPolicy, parse_policy
from kvtier_operator.controller.children.observe import NAMESPACE_LABEL, UID_LABEL, Observed
from kvtier_operator.controller.children.plan import Plan, plan
from kvtier_operator.kube.resources import CLAIMS, CONFIG_MAPS, VOLUMES
from kvtier_operator.settings import Settings

EXPORT = file_tier("shared", {"nfs": {"server": "nas", "path": "/kv"}})
CLAIM = file_tier("disk", {"claimTemplate": {"storageClassName": "fast"}})
SETTINGS = controllers.settings(
    storage={"createVolumes": True},
    allowedVolumes=[{"namespaces": ["n"], "nfs": {"server": "nas", "exportPrefix": "/"}}],
)


def cached_policy(
    *, uid: str = "u-1", status: dict[str, Any] | None = None, tiers: Any = (), **spec: Any
) -> CachedPolicy:
    body = controllers.policy("n", tiers=tiers, **spec)
    body["metadata"] |= {"uid": uid, "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return parse_policy({**body, **({"status": status} if status else {})})


def stored(planned: Plan, observed: Observed) -> Observed:
    """As the API server would have it after the plan was applied, everything bound."""
    maps, claims, volumes = (
        dict(observed.config_maps),
        dict(observed.claims),
        list(observed.volumes),
    )
    for number, desired in enumerate(planned.apply):
        metadata = {**desired.body["metadata"], "uid": f"o-{number}", "resourceVersion": "1"}
        body = {**desired.body, "metadata": metadata, "status": {"phase": "Bound"}}
        if desired.kind is CONFIG_MAPS:
            maps[metadata["name"]] = body
        elif desired.kind is CLAIMS:
            claims[metadata["name"]] = body
        else:
            volumes.append(body)
    return replace(observed, config_maps=maps, claims=claims, volumes=volumes)


def settled(found: CachedPolicy, settings: Settings = SETTINGS) -> Observed:
    observed = Observed(found)
    return stored(plan(observed, settings), observed)


def test_applied_objects_are_not_applied_again() -> None:
    found = cached_policy(tiers=[EXPORT, CLAIM], attach={"mode": "ConfigMapOnly"})
    planned = plan(Observed(found), SETTINGS)
    assert [each.kind.kind for each in planned.apply] == [
        "PersistentVolume",
        "PersistentVolumeClaim",
        "PersistentVolumeClaim",
        "ConfigMap",
        "ConfigMap",
    ]
    again = plan(settled(found), SETTINGS)
    assert (again.apply, again.delete, again.live_generation) == ((), (), 1)


def test_every_object_has_the_policys_uid_and_all_but_volumes_have_an_owner() -> None:
    for each in plan(Observed(cached_policy(tiers=[EXPORT])), SETTINGS).apply:
        metadata = each.body["metadata"]
        assert metadata["labels"][UID_LABEL] == "u-1"
        if each.kind is VOLUMES:
            assert metadata["labels"][NAMESPACE_LABEL] == "n"
            assert "ownerReferences" not in metadata
        else:
            assert [owner["uid"] for owner in metadata["ownerReferences"]] == ["u-1"]
            assert "blockOwnerDeletion" not in metadata["ownerReferences"][0]


def test_a_later_policy_of_the_same_name_gets_other_claims_and_volumes() -> None:
    def names(uid: str) -> set[str]:
        planned = plan(Observed(cached_policy(uid=uid, tiers=[EXPORT, CLAIM])), SETTINGS)
        return {
            each.body["metadata"]["name"] for each in planned.apply if each.kind is not CONFIG_MAPS
        }

    assert not names("u-1") & names("u-2")


@pytest.mark.parametrize(
    ("held", "status", "expected"),
    [
        (None, None, 1),
        (None, {"liveGeneration": 4}, 5),
        ({"generation": 7, "minLoadTokens": 1}, {"liveGeneration": 4}, 8),
        ({"generation": 2, "minLoadTokens": 1}, {"liveGeneration": 4}, 5),
        ({"generation": "x"}, {"liveGeneration": 4}, 5),
        ({"generation": 1 << 60}, {"liveGeneration": 4}, 5),
        ({"generation": -1}, None, 1),
        ("no json", {"liveGeneration": 4}, 5),
        ([], None, 1),
    ],
)
def test_changed_live_values_get_an_unused_generation(
    held: Any, status: Any, expected: int
) -> None:
    found = cached_policy(status=status)
    observed = settled(found)
    if held is None:
        observed = replace(observed, config_maps={})
    else:
        (name, live), *_ = observed.config_maps.items()
        text = held if isinstance(held, str) else json.dumps(held)
        observed = replace(observed, config_maps={name: {**live, "data": {"live.json": text}}})
    planned = plan(observed, SETTINGS)
    assert planned.live_generation == expected
    (desired,) = planned.apply
    assert json.loads(desired.body["data"]["live.json"])["generation"] == expected


def test_unchanged_live_values_keep_their_generation_for_any_status() -> None:
    found = cached_policy()
    (name, live), *_ = settled(found).config_maps.items()
    document = {**json.loads(live["data"]["live.json"]), "generation": 6}
    held = {name: {**live, "data": {"live.json": json.dumps(document)}}}
    planned = plan(Observed(cached_policy(status={"liveGeneration": 5}), held), SETTINGS)
    assert planned.live_generation == 6


def test_an_existing_claim_keeps_its_spec() -> None:
    found = cached_policy(tiers=[CLAIM])
    observed = settled(found)
    (name, claim), *_ = observed.claims.items()
    spec = {**claim["spec"], "resources": {"requests": {"storage": "1Gi"}}, "volumeName": "pv"}
    metadata = {**claim["metadata"], "labels": {}}
    changed = replace(observed, claims={name: {**claim, "metadata": metadata, "spec": spec}})
    (desired,) = plan(changed, SETTINGS).apply
    assert desired.body["spec"]["resources"] == {"requests": {"storage": "1Gi"}}
    assert "volumeName" not in desired.body["spec"]
    assert desired.body["metadata"]["labels"][UID_LABEL] == "u-1"


def test_nothing_is_applied_to_a_terminating_object() -> None:
    observed = settled(cached_policy(tiers=[EXPORT]))
    terminating = {
        name: {**each, "metadata": {**each["metadata"], "labels": {}, "deletionTimestamp": "now"}}
        for name, each in observed.claims.items()
    }
    planned = plan(replace(observed, claims=terminating), SETTINGS)
    assert planned.apply == ()
    storage = next(each for each in planned.conditions if each.type == "StorageReady")
    assert (storage.status, storage.reason) == ("False", "ClaimTerminating")


def test_obsolete_objects_are_deleted_and_a_mounted_claim_waits() -> None:
    observed = settled(cached_policy(tiers=[CLAIM, EXPORT], attach={"mode": "ConfigMapOnly"}))
    less = replace(observed, cached=cached_policy())
    names = sorted(each.existing["metadata"]["name"] for each in plan(less, SETTINGS).delete)
    assert names == sorted([*observed.claims, "chat-structural"])
    mounted = replace(less, mounted_claims=frozenset(observed.claims))
    assert [each.existing["metadata"]["name"] for each in plan(mounted, SETTINGS).delete] == [
        "chat-structural"
    ]
    claimless = replace(less, claims={})
    assert VOLUMES in [each.kind for each in plan(claimless, SETTINGS).delete], "its claim is gone"


def test_objects_of_another_policy_of_the_same_name_are_not_deleted() -> None:
    theirs = settled(cached_policy(uid="u-2", tiers=[CLAIM]))
    assert plan(replace(theirs, cached=cached_policy(uid="u-1")), SETTINGS).delete == ()


def test_a_released_volume_is_deleted_even_if_its_name_is_needed() -> None:
    observed = settled(cached_policy(tiers=[EXPORT]))
    (volume,) = observed.volumes
    released = replace(observed, volumes=[{**volume, "status": {"phase": "Released"}}])
    (deletion,) = plan(released, SETTINGS).delete
    assert deletion.existing["metadata"]["name"] == volume["metadata"]["name"]


def test_a_policy_that_is_not_accepted_keeps_its_objects() -> None:
    observed = settled(cached_policy(tiers=[EXPORT, CLAIM]))
    planned = plan(
        replace(observed, cached=cached_policy(tiers=[EXPORT], status={"liveGeneration": 3})),
        controllers.settings(),
    )
    assert (planned.accepted, planned.apply, planned.delete, planned.live_generation) == (
        False,
        (),
        (),
        3,
    )


def test_a_field_of_a_newer_definition_is_reported_and_changes_nothing() -> None:
    cached = cached_policy()
    spec = {**cached.raw["spec"], "later": 1}
    spec["tiers"] = [{**tier, "burst": "x"} for tier in spec["tiers"]]
    planned, before = (
        plan(Observed(each), SETTINGS)
        for each in (parse_policy({**cached.raw, "spec": spec}), cached)
    )
    assert planned.structural_hash == before.structural_hash
    assert planned.apply == before.apply
    (accepted,) = [each for each in planned.conditions if each.type == "Accepted"]
    assert (accepted.status, accepted.reason) == ("True", "NotEnforced")
    assert "spec.later: has no effect" in accepted.message
    assert "spec.tiers[0].burst: has no effect" in accepted.message


def test_a_share_of_tenants_without_effect_on_a_tier_is_reported() -> None:
    remote = {"name": "remote", "lmcache": {"url": "redis://cache:6379"}}
    planned = plan(Observed(cached_policy(tiers=[remote], tenants={"maxPercent": 25})), SETTINGS)
    (accepted,) = [each for each in planned.conditions if each.type == "Accepted"]
    assert (accepted.status, accepted.reason) == ("True", "NotEnforced")
    assert "spec.tenants.maxPercent: has no effect on tier remote" in accepted.message


def test_an_invalid_policy_keeps_its_objects() -> None:
    raw = dict(cached_policy(status={"liveGeneration": 3}).raw)
    broken = parse_policy({**raw, "spec": {**raw["spec"], "chunkTokens": 7}})
    planned = plan(Observed(broken), SETTINGS)
    assert (planned.accepted, planned.apply, planned.delete) == (False, (), ())
    assert planned.conditions[0].reason == "Invalid"


def test_without_create_volumes_exports_get_no_volume_and_no_claim() -> None:
    settings = SETTINGS.model_copy(update={"storage": controllers.settings().storage})
    planned = plan(Observed(cached_policy(tiers=[EXPORT, CLAIM])), settings)
    assert [each.kind for each in planned.apply] == [CLAIMS, CONFIG_MAPS]
    assert set(planned.claims) == {"shared", "disk"}
