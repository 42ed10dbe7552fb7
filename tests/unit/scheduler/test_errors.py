"""Whatever raises in the hooks of the scheduler side: each load that vLLM waits for reaches the
workers once, and no block stays referenced."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.injected_errors import CallInjector
from tests.unit.scheduler.scheduler_testbed import CHUNK, SchedulerTestbed

pytest.importorskip("vllm", reason="vllm is not installed: install the extra `engine`")
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtier.engines.common.jobs import LoadResult
from kvtier.engines.vllm.connector import KVTierConnector
from kvtier.engines.vllm.metadata import StepMetadata

SCHEDULER_FILES = (
    "kvtier/engines/vllm/scheduler",
    "kvtier/engines/vllm/loads_in_flight.py",
    "kvtier/engines/common/scheduler_stores.py",
    "kvtier/engines/common/allowed_tiers.py",
    "kvtier/engines/common/referenced_blocks.py",
    "kvtier/engines/common/store_conditions.py",
    "kvtier/engines/common/request_state.py",
    "kvtier/engines/common/tierd_session.py",
)
SPARED = frozenset(
    f"{owner}.{name}"
    for owner, names in {
        # They hand over lists, or pass blocks to and from vLLM. What they call counts.
        "SchedulerStores": (
            *("_release", "_drop", "_store", "on_stores_done"),
            *("take_jobs", "take_voided", "turn_off"),
        ),
        "ReferencedBlocks": ("free",),
        "LoadsInFlight": ("take_jobs", "start_failing"),
        # They run after an error, and contain what it may have prevented.
        "KVTierConnectorScheduler": ("build_load_meta", "fail_load", "_take_ends"),
    }.items()
    for name in names
)


class _Hooks:
    """The hooks as vLLM calls them, in place of the testbed's scheduler side."""

    def __init__(self, connector: KVTierConnector, calls: CallInjector | None) -> None:
        self._connector = connector
        self._calls = calls

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._calls is None:
            return getattr(self._connector, name)(*arguments)
        with self._calls.counting():
            return getattr(self._connector, name)(*arguments)

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> Any:
        return self._call("get_num_new_matched_tokens", request, computed)

    def update_state_after_alloc(self, request: Any, tables: Any, tokens: int) -> None:
        blocks = SimpleNamespace(get_block_ids=lambda: tables)
        self._call("update_state_after_alloc", request, blocks, tokens)

    def build_connector_meta(self, output: Any) -> Any:
        return self._call("build_connector_meta", output)

    def update_connector_output(self, report: Any, *, recomputes: bool = False) -> None:
        output = SimpleNamespace(
            kv_connector_worker_meta=report, invalid_block_ids={1} if recomputes else set()
        )
        self._call("update_connector_output", output)

    def request_finished(self, request: Any, tables: Any) -> None:
        self._call("request_finished_all_groups", request, tables)


class _Run:
    """One run of the scenario, and the workers' part in it."""

    def __init__(self, directory: Path, calls: CallInjector | None) -> None:
        transfer = SimpleNamespace(
            kv_connector="KVTierConnector",
            engine_id="e",
            kv_connector_extra_config={"topology": str(directory / "absent")},
        )
        config = SimpleNamespace(kv_transfer_config=transfer)
        caches = SimpleNamespace(kv_cache_groups=[])
        connector = KVTierConnector(config, KVConnectorRole.SCHEDULER, caches)  # type: ignore[arg-type]
        connector._guard.off_reason = ""
        self.connector = connector
        self.testbed = SchedulerTestbed()
        self.connector._scheduler = self.testbed.scheduler
        self.testbed.scheduler = _Hooks(connector, calls)  # type: ignore[assignment]
        self.jobs: Counter[str] = Counter()
        self.waits = False
        """Whether vLLM waits for the load of the second request."""

    def step(self, scheduled: dict[str, int] | None = None) -> None:
        """A step that the workers execute, and report what they were given."""
        metadata = self.testbed.build(scheduled)
        assert isinstance(metadata, StepMetadata)
        self.jobs.update(job.request_id for job in metadata.loads)
        self.testbed.report(
            loads=[LoadResult(job.load, job.request_id, 0, "gone") for job in metadata.loads],
            done={job.reservation: 1 for job in metadata.stores},
            recomputes=bool(metadata.loads),
        )

    def scenario(self) -> None:
        testbed, hooks = self.testbed, self.testbed.scheduler
        testbed.client.credit(8)
        first = testbed.request(300, "first", seed=1)
        testbed.ask(first)
        self.step({"first": 300})
        first.append(1)
        second = testbed.request(300, "second")
        testbed.hold(second.keys(0, 4))
        tokens = testbed.ask(second)
        self.waits = bool(tokens)
        if tokens:
            assert tokens == 4 * CHUNK
            testbed.admit(second, 0, tokens)
        self.step({"first": 1})
        first.append(2)
        first.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
        hooks.request_finished(first, (testbed.tables["first"],))  # type: ignore[arg-type]
        self.step()
        second.status = SimpleNamespace(name="FINISHED_ABORTED")
        hooks.request_finished(second, (testbed.tables.get("second", []),))  # type: ignore[arg-type]


def test_an_error_in_any_call_of_the_hooks_forgets_no_load_and_no_block(tmp_path: Path) -> None:
    calls = CallInjector(*SCHEDULER_FILES, spared=SPARED)
    run = _Run(tmp_path, calls)
    run.scenario()
    assert run.waits
    assert run.jobs == {"second": 1}
    assert len(calls.found) > 50, "the injector found the scheduler side"
    for place, number in calls.found.items():
        run = _Run(tmp_path, calls)
        calls.raise_at(number)
        run.scenario()
        calls.raise_at(None)
        run.testbed.now += 10
        for _ in range(4):
            run.step()
        assert run.jobs == ({"second": 1} if run.waits else {}), place
        assert run.testbed.pool.referenced() == [], place
        assert run.connector._guard.errors, place
