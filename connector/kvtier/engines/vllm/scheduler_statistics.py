"""What the scheduler side adds to the engine's statistics. The scheduler's thread only."""

from __future__ import annotations

from collections import Counter

from kvtier.engines.common.scheduler_stores import SchedulerStores
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.engines.vllm.kv_events import KVEvents
from kvtier.engines.vllm.metrics import KVTierStats
from kvtier.engines.vllm.queued_prefixes import QueuedPrefixes
from kvtier.engines.vllm.request_hints import HintReader
from kvtier.engines.vllm.scheduler_loads import SchedulerLoads


class SchedulerStatistics:
    """Reads the counts and the state of the parts of one scheduler side."""

    def __init__(
        self,
        session: TierdSession,
        loads: SchedulerLoads,
        stores: SchedulerStores,
        queue: QueuedPrefixes,
        hints: HintReader,
        skipped: Counter[str],
    ) -> None:
        self._session = session
        self._loads = loads
        self._stores = stores
        self._queue = queue
        self._hints = hints
        self._skipped = skipped
        self._gauges: dict[tuple[str, str], int] = {}
        """As they were last reported."""

    def collect(self, stats: KVTierStats, events: KVEvents | None) -> None:
        """Moves the counts since the last call into ``stats``."""
        counts = self._loads.in_flight.take_counts()
        stats.add("queries", counts.queries)
        stats.add("queried_tokens", counts.queried_tokens)
        stats.add_all("decisions", counts.decisions)
        stats.add("offered_tokens", counts.offered_tokens)
        stats.add_all("loaded_tokens", counts.loaded_tokens)
        stats.add_all("tier_loaded_bytes", counts.tier_bytes)
        stats.add_all("load_failures", counts.failures)
        stats.add_all("promotions", counts.promotions)
        for tier, seconds in counts.load_seconds.items():
            stats.observe("load_duration_seconds", seconds, tier)
        stats.observe("wait_seconds", counts.wait_seconds)
        stats.observe("store_duration_seconds", self._stores.store_seconds)
        self._stores.store_seconds.clear()
        found = {
            "dropped_stores": self._stores.dropped,
            "skipped_requests": self._skipped,
            "rejected_hints": self._hints.rejected,
            "prefetch_hints": self._queue.outcomes,
        }
        if events is not None:
            found |= {"kv_events": events.counts, "dropped_kv_events": events.unannounced}
        for name, values in found.items():
            stats.add_all(name, values)
            values.clear()

    def report_gauges(self, stats: KVTierStats) -> None:
        """Adds the current state to ``stats``, as far as it has changed since the last call."""
        session = self._session
        bits = session.replica.usable_bits if session.replica_ready else 0
        values = {
            ("loads_in_flight", ""): len(self._loads.in_flight),
            ("stores_in_flight", ""): self._stores.in_flight,
            ("waiting_requests", ""): self._loads.waiting,
            ("applied_generation", ""): session.live.generation,
            **{
                ("tier_usable", name): bits >> index & 1
                for index, name in enumerate(session.tier_names)
            },
        }
        for (name, label), value in values.items():
            if self._gauges.get((name, label)) != value:
                stats.set_gauge(name, value, label)
        self._gauges = values
