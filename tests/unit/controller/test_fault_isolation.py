"""A fault in one reconcile, or in garbage collection, does not stop the controller."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.support import controllers
from tests.unit.controller.test_plan import SETTINGS, cached_policy, settled

from kvtier_operator.controller import controller as module
from kvtier_operator.controller.children.observe import Observed
from kvtier_operator.controller.children.plan import plan
from kvtier_operator.controller.controller import Controller
from kvtier_operator.kube.resources import CONFIG_MAPS

KEY = ("n", "chat")


def counted(registry: CollectorRegistry, reason: str) -> float:
    name = "kvtier_operator_reconcile_errors_total"
    return registry.get_sample_value(name, {"reason": reason}) or 0.0


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RecursionError(), "Fault"), (RuntimeError("x"), "Fault"), (OSError("x"), "Fault"),
     (KeyError("x"), "Fault"), (TimeoutError(), "Deadline")],
    ids=repr,
)  # fmt: skip
def test_a_failed_reconcile_is_counted_and_retried(error: Exception, reason: str) -> None:
    async def scenario() -> None:
        registry = CollectorRegistry()
        controller = Controller(controllers.settings(), None, registry)  # type: ignore[arg-type]

        async def fails(_key: Any) -> None:
            raise error

        controller._reconciler.reconcile = fails  # type: ignore[method-assign]
        controller.queue.add(KEY)
        await controller._process(await controller.queue.get())
        assert controller.queue.failures(KEY) == 1
        assert len(controller.queue) == 1
        assert counted(registry, reason) == 1.0

    asyncio.run(scenario())


def test_failed_garbage_collection_is_counted_and_does_not_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(*_: Any) -> int:
        raise TypeError("unexpected")

    async def scenario() -> None:
        registry = CollectorRegistry()
        controller = Controller(controllers.settings(), None, registry)  # type: ignore[arg-type]
        monkeypatch.setattr(module, "collect_garbage", fails)
        await controller._collect_garbage()
        assert counted(registry, "Fault") == 1.0

    asyncio.run(scenario())


def test_a_config_map_with_deeply_nested_json_is_overwritten() -> None:
    found = cached_policy(attach={"mode": "ConfigMapOnly"})
    observed = settled(found)
    nested = "[" * 100_000 + "]" * 100_000
    maps = {
        name: {**each, "data": dict.fromkeys(each["data"], nested)}
        for name, each in observed.config_maps.items()
    }
    planned = plan(Observed(found, maps), SETTINGS)
    assert [each.kind for each in planned.apply] == [CONFIG_MAPS, CONFIG_MAPS]
    assert all("[[" not in text for each in planned.apply for text in each.body["data"].values())


def test_a_fault_while_reporting_orphaned_data_is_counted_and_the_next_policy_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[str] = []

    def fails_once(gone: Any, _allowed: Any) -> list[Any]:
        reported.append(gone.uid)
        if len(reported) == 1:
            raise TypeError("unexpected")
        return []

    async def scenario() -> None:
        registry = CollectorRegistry()
        controller = Controller(controllers.settings(), None, registry)  # type: ignore[arg-type]
        monkeypatch.setattr(module, "orphaned_data_events", fails_once)
        reporting = asyncio.ensure_future(controller._report_orphaned_data())
        for uid in ("u-1", "u-2"):
            controller._gone(KEY, cached_policy(uid=uid))
        while len(reported) < 2:
            await asyncio.sleep(0)
            assert not reporting.done()
        reporting.cancel()
        assert counted(registry, "Fault") == 1.0

    asyncio.run(scenario())


def test_unreported_deletions_beyond_the_bound_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_DELETED", 2)

    async def scenario() -> float:
        registry = CollectorRegistry()
        controller = Controller(controllers.settings(), None, registry)  # type: ignore[arg-type]
        for number in range(5):
            controller._gone(KEY, cached_policy(uid=f"u{number}"))
        return counted(registry, "OrphanedDataUnreported")

    assert asyncio.run(scenario()) == 3
