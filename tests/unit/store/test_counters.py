"""Every counter exists from the start at 0, and the code counts only what is registered."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry

import kvtier
from kvtier import errors
from kvtier.store import counters
from kvtier.store.types import StoreCounters
from kvtier.tierd import wire
from kvtier.tierd.status import Snapshot, metrics_text, status_json
from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.controller.metrics import ControllerMetrics
from kvtier_operator.webhook.metrics import WebhookMetrics

PACKAGE = Path(kvtier.__file__).parent


def counted() -> Iterator[tuple[str, str, str, str | None]]:
    """Place, name, tier and reason (None: computed) of each call that counts."""
    for folder in ("store", "tiers", "tierd"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                function, arguments = node.func, node.args
                if ast.unparse(function) == "partial":
                    function, *arguments = arguments
                if not isinstance(function, ast.Attribute):
                    continue
                owner = ast.unparse(function.value)
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                literal = [a.value if isinstance(a, ast.Constant) else None for a in arguments]
                if function.attr == "violation":
                    for each in ast.walk(arguments[0]):
                        if isinstance(each, ast.Constant) and isinstance(each.value, str):
                            yield place, "protocol_violations", "", each.value
                elif owner.endswith("_shared") and function.attr in ("count", "lose"):
                    # A tier's own totals, which the store adds to its counters.
                    if function.attr == "lose":
                        literal = ["tier_announcements_lost", *literal]
                    yield place, str(literal[0]), "tier", literal[1]
                elif function.attr == "_note_removed":
                    yield place, str(literal[0]), "tier", ""
                elif function.attr == "_on_loss":
                    yield place, "tier_announcements_lost", "tier", literal[0]
                elif isinstance(literal[0] if literal else None, str) and (
                    (function.attr == "count" and re.search("context|self$", owner))
                    or (function.attr == "add" and owner.endswith("_counters"))
                ):
                    tier = "" if len(literal) < 2 or literal[1] == "" else "tier"
                    reason = literal[2] if len(literal) > 2 else ""
                    name = str(literal[0])
                    yield place, name, tier, reason if reason is None else str(reason)


def test_every_counter_in_the_code_is_registered() -> None:
    found = list(counted())
    assert len(found) > 60
    assert [
        (place, name, tier, reason)
        for place, name, tier, reason in found
        if name not in counters.COUNTERS
        or counters.COUNTERS[name].per_tier != bool(tier)
        or (reason is not None and reason not in counters.COUNTERS[name].reasons)
    ] == []
    assert set(counters.COUNTERS) - {name for _, name, _, _ in found} == set()


def test_reasons_follow_the_errors_and_messages() -> None:
    classes = [errors.TierError]
    for each in classes:
        classes.extend(each.__subclasses__() if each.__module__ == errors.__name__ else ())
    reasons = {each.reason for each in classes if each.__module__ == errors.__name__}
    reasons |= {"unexpected", *errors.TierUntrustedError.REASONS}
    assert reasons == set(counters.READ_ERRORS)
    assert set(counters.TIER_ERRORS) < reasons
    assert {each.__name__ for each in get_args(wire.FromEngine)} == set(counters.MESSAGES)


def test_an_unregistered_counter_fails_a_test_and_works_in_production(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key in (("new", "", ""), ("tier_reads_failed", "disk", "new"), ("tier_reads", "", "")):
        monkeypatch.setattr(counters, "strict", True)
        with pytest.raises(LookupError, match="is not registered"):
            StoreCounters().add(*key)
        monkeypatch.setattr(counters, "strict", False)
        found = StoreCounters()
        found.add(*key)
        found.add(*key)
        assert found.values == {key: 2}


def test_the_first_occurrence_is_an_increase() -> None:
    found = StoreCounters()
    found.declare(["disk", "nfs"])
    before = metrics_text(Snapshot(events=dict(found.values))).decode()
    series = 'kvtier_tier_reads_failed_total{reason="corrupt",tier="disk"}'
    assert f"{series} 0.0" in before
    found.add("tier_reads_failed", "disk", "corrupt")
    after = metrics_text(Snapshot(events=dict(found.values))).decode()
    assert f"{series} 1.0" in after
    assert before.count("\n") == after.count("\n")


def test_status_leaves_out_counters_that_are_zero() -> None:
    found = StoreCounters()
    found.declare(["disk"])
    found.add("evictions")
    text = status_json(Snapshot(events=dict(found.values))).decode()
    assert text.count('"reason"') == 1
    assert '"evictions"' in text


def test_the_operators_counters_exist_from_the_start() -> None:
    registry = CollectorRegistry()
    ControllerMetrics(registry)
    WebhookMetrics(registry)
    value = registry.get_sample_value
    assert value("kvtier_operator_reconcile_errors_total", {"reason": "Fault"}) == 0
    assert value("kvtier_operator_reconcile_errors_total", {"reason": "Deadline"}) == 0
    for reason in SkipReason:
        assert value("kvtier_webhook_skipped_pods_total", {"reason": str(reason)}) == 0
    assert value("kvtier_webhook_request_duration_seconds_count", {"path": "/mutate"}) == 0
