"""One engine's connectors, and the metrics of its API process.

The statistics go the way that vLLM sends them: each process hands over what it has counted, all of
it is added up, crosses a process as plain data, and is observed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.scheduler.connector_configs import (
    cache_config,
    connector_config,
    full_spec,
    write_topology,
)
from tests.unit.scheduler.metric_types import MetricTypes
from tests.unit.scheduler.scheduler_testbed import SchedulerTestbed
from tests.unit.worker.worker_testbeds import WorkerTestbed, make_worker_testbed
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtier.engines.vllm.connector import KVTierConnector
from kvtier.engines.vllm.counters import COUNTERS, HISTOGRAMS, TIER, Metric

ENGINE = 1


def _sent(data: Any) -> Any:
    """As another process gets it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(data))


class MeteredEngine:
    """``connector`` has the scheduler role, over ``testbed``, and has made a step. ``close`` at the
    end."""

    def __init__(self, directory: Path) -> None:
        write_topology(directory)
        self.directory = directory
        self._connectors: list[KVTierConnector] = []
        self._sides: list[Any] = []
        self._workers: list[WorkerTestbed] = []
        self._types = MetricTypes()
        labels: dict[int, list[object]] = {0: ["m", "0"], ENGINE: ["m", str(ENGINE)]}
        made = KVTierConnector.build_prom_metrics(
            connector_config(directory), self._types.types(), ["model_name", "engine"], labels
        )
        assert made is not None
        self._metrics = made
        self.testbed = SchedulerTestbed()
        self.connector = self.start()
        self.use(self.testbed)
        self.testbed.build()

    def start(self, config: Any = None, *specs: Any, rank: bool = False) -> KVTierConnector:
        """A process of the engine starts. By default it has tiers."""
        made = KVTierConnector(
            config or connector_config(self.directory),
            KVConnectorRole.WORKER if rank else KVConnectorRole.SCHEDULER,
            cache_config(*(specs or (full_spec(),))),
        )
        self._connectors.append(made)
        self._sides += [side for side in (made._scheduler, made._worker) if side is not None]
        return made

    def use(self, testbed: SchedulerTestbed) -> None:
        """The connector's scheduler side is this one, and both have its clock."""
        self.testbed = testbed
        self.connector._scheduler = testbed.scheduler
        self.connector._clock = lambda: self.testbed.now  # type: ignore[method-assign, assignment]

    def start_rank(self) -> WorkerTestbed:
        """A rank with a worker side whose copies the test moves."""
        connector = self.start(rank=True)
        assert connector._guard.off_reason == ""
        directory = self.directory / "rank"
        directory.mkdir()
        made = make_worker_testbed(directory)
        connector._worker = made.worker
        self._workers.append(made)
        return made

    def close(self) -> None:
        for worker in self._workers:
            worker.engine.open = True
            worker.engine.move()
        for each in (*self._connectors, *self._sides):
            each.shutdown()

    def _report(self) -> None:
        joined = KVTierConnector.build_kv_connector_stats()
        assert joined is not None
        for connector in self._connectors:
            stats = connector.get_kv_connector_stats()
            if stats is not None:
                received = KVTierConnector.build_kv_connector_stats(_sent(stats.data))
                assert received is not None
                joined = joined.aggregate(received)
        self._metrics.observe(_sent(joined.data), ENGINE)

    def shown(self, metric: Metric) -> dict[str, float]:
        """What ``/metrics`` shows of a metric after another report, without zeros, by the value
        of its own label. Of a histogram: how much it has observed."""
        self._report()
        name = f"vllm:kvtier_{metric.name}"
        if metric in COUNTERS:
            name += "_total"
        elif metric in HISTOGRAMS:
            name += "_count"
        samples = [
            sample
            for family in text_string_to_metric_families(self._types.text())
            for sample in family.samples
            if sample.name == name
        ]
        labels = {"model_name", "engine", *([metric.label] if metric.label else ())}
        assert samples, f"{name} is not shown"
        assert all(sample.labels.keys() == labels for sample in samples)
        assert not any(each.value for each in samples if each.labels["engine"] != str(ENGINE))
        if metric.label == TIER:
            assert {each.labels[TIER] for each in samples} == {"ram", "disk", "nfs"}
        return {
            sample.labels.get(metric.label, ""): sample.value for sample in samples if sample.value
        }
