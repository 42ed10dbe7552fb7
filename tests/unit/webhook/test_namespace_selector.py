"""The webhook's namespaceSelector: what is injected, and how the operator speaks about it."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.memory_cluster import MemoryCluster
from tests.unit.webhook.fixtures import admission_review, body, policy_document

from kvtier_operator.api.selector import LabelSelector, describe
from kvtier_operator.controller.lookups import Lookups
from kvtier_operator.kube.resources import NAMESPACES
from kvtier_operator.settings import Settings
from kvtier_operator.webhook import review
from kvtier_operator.webhook.validate import validate

SELECTOR = {
    "matchLabels": {"tier": "gpu"},
    "matchExpressions": [
        {"key": "a", "operator": "In", "values": ["x", "y"]},
        {"key": "b", "operator": "NotIn", "values": ["z"]},
        {"key": "c", "operator": "Exists"},
        {"key": "d", "operator": "DoesNotExist"},
    ],
}
MATCHING = {"tier": "gpu", "a": "y", "c": ""}
SETTINGS = Settings.model_validate({"webhook": {"namespaceSelector": SELECTOR}})


def test_a_selector_is_described_as_kubectl_takes_it() -> None:
    assert describe(LabelSelector.model_validate(SELECTOR)) == (
        "tier=gpu,a in (x, y),b notin (z),c,!d"
    )
    assert describe(Settings().webhook.namespace_selector) == "kvtier.io/inject=enabled"


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(MATCHING, True), ({**MATCHING, "d": ""}, False), ({"kvtier.io/inject": "enabled"}, False)],
)
def test_warnings_and_status_follow_the_configured_selector(
    labels: dict[str, str], expected: bool
) -> None:
    request = review.parse(body(admission_review(policy_document())))
    warnings = validate(request, [], SETTINGS, labels).warnings
    assert any("tier=gpu,a in (x, y)" in each for each in warnings) is not expected

    namespace = {"metadata": {"name": "serving", "labels": labels}}
    api = MemoryCluster([(NAMESPACES, namespace)])
    lookups = Lookups(api, lambda: 0.0, SETTINGS.webhook.namespace_selector)
    assert asyncio.run(lookups.injection_enabled("serving")) is expected
    assert asyncio.run(lookups.injection_enabled("unknown")) is None
