"""Groups and directories that the administrator allows in policies."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.pod_objects import file_tier, memory_tier, pod, policy

from kvtier_operator.api.allowlist import PolicyBounds, bound_errors
from kvtier_operator.controller.children.plan import validation_errors
from kvtier_operator.settings import Settings

FILES = file_tier("disk", {"emptyDir": {}}, "Pod")
DEFAULT = PolicyBounds()
WIDE = PolicyBounds.model_validate(
    {"storageGids": [{"min": 10, "max": 20}, {"min": 3000, "max": 3100}], "pythonPaths": ["/"]}
)
NONE = PolicyBounds.model_validate({"storageGids": [], "pythonPaths": []})


def gid(number: int) -> dict[str, Any]:
    return {"security": {"storageGid": number}}


def path(text: str) -> dict[str, Any]:
    return {"engine": {"pythonPath": text}}


@pytest.mark.parametrize(
    ("spec", "bounds", "fields"),
    [
        ({}, DEFAULT, []),
        (gid(3000), DEFAULT, []),
        (gid(3001), DEFAULT, ["spec.security.storageGid"]),
        (gid(1), WIDE, ["spec.security.storageGid"]),
        (gid(20), WIDE, []),
        ({}, NONE, ["spec.security.storageGid"]),
        (path("/opt/venv/lib:/usr/lib/python3"), DEFAULT, []),
        (path("/optional"), DEFAULT, ["spec.engine.pythonPath"]),
        (path("/opt/../data"), DEFAULT, ["spec.engine.pythonPath"]),
        (path("opt"), DEFAULT, ["spec.engine.pythonPath"]),
        (path("/opt:"), DEFAULT, ["spec.engine.pythonPath"]),
        (path("/data:/data2"), DEFAULT, ["spec.engine.pythonPath"]),
        (path("/data"), WIDE, []),
        ({**gid(7), **path("/x")}, NONE, ["spec.security.storageGid", "spec.engine.pythonPath"]),
    ],
)
def test_a_policy_stays_within_the_bounds(
    spec: dict[str, Any], bounds: PolicyBounds, fields: list[str]
) -> None:
    found = bound_errors(policy(memory_tier(), FILES, **spec), bounds)
    assert [each.field for each in found] == fields
    assert all("policyBounds" in each.message for each in found)


def test_without_file_tiers_no_pod_gets_the_group() -> None:
    assert bound_errors(policy(memory_tier(), **gid(1)), DEFAULT) == []


def test_the_controller_does_not_accept_the_policy_and_the_webhook_skips_its_pods() -> None:
    refused = policy(memory_tier(), FILES, **gid(1))
    found = validation_errors(refused, Settings())
    assert found is not None
    assert found[0] == "NotAllowed"
    from tests.unit.webhook.fixtures import SERVING, Fixture, policy_document

    from kvtier_operator.api.pods import decode_pod

    fixture = Fixture()
    fixture.policy(**{**policy_document()["spec"], **path("/data")})
    governing = fixture.lister.governing(SERVING, {"app": "engine"})
    assert governing is not None
    context = fixture.lister.admission_context(governing, SERVING, decode_pod(pod()))
    assert "pythonPath" in context.policy_errors[0]
