"""Documents, settings and statuses of another release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support import controllers
from tests.support.pods import injected_pod, policy, running

from kvtier.config import loader
from kvtier.config.models import Structural
from kvtier.errors import ConfigurationError
from kvtier_operator.api.pods import decode_pod
from kvtier_operator.api.stored import read_status, read_stored
from kvtier_operator.controller.pods.pod_view import view
from kvtier_operator.controller.pods.reports import NO_REPORT
from kvtier_operator.controller.rollout import outdated, plan_rollout
from kvtier_operator.controller.status.serialize import without_undeclared
from kvtier_operator.kube.resources import STATEFUL_SETS
from kvtier_operator.render.documents import content_hash, pod_placement, structural
from kvtier_operator.settings import load

NOON = 1_800_000_000.0


def stored(**spec: Any) -> dict[str, Any]:
    body = controllers.policy("serving", **spec)
    return {**body, "metadata": {**body["metadata"], "uid": "u", "generation": 3}}


def test_a_status_of_another_release_is_read_as_far_as_possible() -> None:
    condition = {"type": "Later", "status": "True", "reason": "R",
                 "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
    found = read_status(
        {
            "liveGeneration": 7,
            "structuralHash": "3f9c1a2b",
            "observedGeneration": "three",
            "conditions": [condition, {**condition, "type": "Odd", "status": "Perhaps"}],
            "tiers": [{"name": "ram", "state": "Healthy"}, {"name": "disk", "state": "Warming"}],
            "invented": {"a": 1},
        }
    )
    assert found is not None
    assert (found.live_generation, found.structural_hash) == (7, "3f9c1a2b")
    assert found.observed_generation is None
    assert [each.type for each in found.conditions or ()] == ["Later"]
    assert [each.name for each in found.tiers or ()] == ["ram"]


def test_a_status_leaves_out_what_an_earlier_definition_does_not_declare() -> None:
    status = {"liveGeneration": 3, "tiers": [{"name": "a", "used": 1}, {"name": "b", "used": 2}]}
    answer = (
        "failed to create typed patch object (n/chat; kvtier.io/v1alpha1, Kind=KVTierPolicy): "
        'errors:\n  .status.liveGeneration: field not declared in schema\n  .status.tiers[name="a"]'
        ".used: field not declared in schema"
    )
    assert without_undeclared(status, answer) == {"tiers": [{"name": "a"}, {"name": "b"}]}
    assert without_undeclared(status, "conflict: .status.liveGeneration") is None
    assert without_undeclared({"pods": {}}, answer) is None


def test_replicas_of_two_releases_differ_only_in_fields_that_one_does_not_know() -> None:
    """The hash covers what was written and is known: the same for a policy without new fields."""
    plain = read_stored(stored()).policy
    newer = read_stored(stored(laterField=1, chunkTokens=256))
    assert newer.unknown_fields == ("spec.laterField",)
    known = read_stored(stored(chunkTokens=256)).policy
    assert content_hash(newer.policy.spec) == content_hash(known.spec)
    # A field that only one of two releases knows makes the hashes differ; its pods are outdated.
    assert content_hash(newer.policy.spec) != content_hash(plain.spec)
    of = policy()
    pod = decode_pod(running(injected_pod(structural_hash=content_hash(plain.spec))))
    views = [view(of, pod, NO_REPORT, NOON)]
    assert outdated(of, views, content_hash(newer.policy.spec)) == views


def test_a_workload_that_an_older_webhook_injects_again_is_not_restarted_for_ever() -> None:
    of = policy(rollout={"strategy": "RestartWorkloads"})
    template = {"metadata": {"annotations": {"kvtier.io/restarted-for": "newer000"}}}
    workload = {
        "metadata": {"name": "chat", "uid": "uid-of-chat", "generation": 2},
        "spec": {"replicas": 1, "template": template},
        "status": {"observedGeneration": 2, "updatedReplicas": 1, "availableReplicas": 1},
    }
    pod = decode_pod(running(injected_pod(structural_hash="older000", owner="StatefulSet chat")))
    found = plan_rollout(
        of,
        [view(of, pod, NO_REPORT, NOON)],
        "newer000",
        lambda kind, name: workload if kind is STATEFUL_SETS else None,
    )
    assert found.restart is None
    assert found.ineffective == ("StatefulSet chat",)


def test_settings_of_a_later_release_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("namespace: kvtier-system\ncontroller: {laterSetting: 1}\n")
    with pytest.raises(ConfigurationError, match="laterSetting"):
        load(file)


def _structural(directory: Path, **changes: Any) -> Path:
    of = policy()
    text = structural(of, pod_placement(of)).model_dump(mode="json", by_alias=True)
    path = directory / loader.STRUCTURAL_FILE
    path.write_text(json.dumps({**text, **changes}))
    return path


@pytest.mark.parametrize("changes", [{"schemaVersion": 2}, {"laterField": 1}])
def test_a_structural_document_of_a_later_release_is_refused_as_a_whole(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert loader.load_structural(_structural(tmp_path)).policy.name == "chat"
    with pytest.raises(ConfigurationError, match=next(iter(changes))):
        loader.load_structural(_structural(tmp_path, **changes))


def test_live_values_of_an_earlier_release_have_defaults_for_the_rest(tmp_path: Path) -> None:
    of = loader.load_structural(_structural(tmp_path))
    assert isinstance(of, Structural)
    (tmp_path / loader.LIVE_FILE).write_text(
        json.dumps({"generation": 9, "tiers": {"ram": {"loadWeight": 70}}})
    )
    live, rejected = loader.load_live(tmp_path / loader.LIVE_FILE, of.live, of)
    assert rejected == []
    assert (live.generation, live.tiers["ram"].load_weight) == (9, 70)
    assert live.min_load_tokens == 512
