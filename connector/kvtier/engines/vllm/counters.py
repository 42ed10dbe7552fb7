"""The counters of the connector and every label value that each can have.

They reach the engine's ``/metrics`` as ``vllm:kvtier_<name>_total``, with vLLM's labels beside the
one here. Every label value of ``COUNTERS`` exists from the start at 0, because ``increase()``
misses the first occurrence of a counter that appears with value 1. With ``strict``, which tests
set, an unregistered name or value raises ``LookupError``; otherwise it is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

strict = False
"""Whether an unregistered counter raises. For tests."""

TIER = "tier"
"""The label whose values are the names of the policy's tiers."""
UNEXPECTED = "Unexpected"


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter. ``label``: its one label beyond vLLM's own; empty for none. ``values``: what the
    label can be, except for ``TIER``."""

    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ("",)


COUNTERS = (
    Metric("queries", "Requests that were looked up, once for each admission."),
    Metric("queried_tokens", "Tokens of these requests that were not in GPU memory."),
    Metric(
        "decisions",
        "How lookups ended, by decision.",
        "decision",
        (
            "load", "load_failed", "not_held", "not_in_time", "not_read", "not_ready",
            "ram_slower_than_recomputing", "skip_load", "skipped", "too_short",
        ),
    ),
    Metric(
        "loaded_tokens",
        "Prompt tokens whose KV was loaded into GPU memory, counted when the load ends.",
        TIER,
    ),
    Metric(
        "offered_tokens", "Prompt tokens for which a load was started, whether or not it succeeded."
    ),
    Metric("stored_tokens", "Tokens whose KV was copied from GPU memory to the memory tier."),
    Metric("stored_chunks", "Chunks whose KV was copied from GPU memory to the memory tier."),
    Metric(
        "load_failures",
        "Loads that failed completely or in part, by reason.",
        "reason",
        (
            "address", "asleep", "block_table", "cancelled", "closing", "copy", "duplicate",
            "epoch", "error", "gone", "identity", "limit", "lost", "not_arrived", "off",
            "partial",
            "unknown_report", "unpinned",
        ),
    ),
    Metric(
        "promotions",
        "Promotions from secondary tiers, by outcome.",
        "outcome",
        (
            "whole", "partial", "failed", "absent", "cancelled", "lost", "out_of_time", "early",
            "ram_slower_than_recomputing", "too_many_waiting",
        ),
    ),
    Metric(
        "dropped_stores",
        "Computed chunks that were not stored, by reason.",
        "reason",
        (
            "blocks_gone", "in_flight_blocks", "invalid_hints", "lost", "no_block_pool",
            "no_credit", "not_attached", "off", "replica_incomplete", "reset", "short_prompt",
            "skip_store", "tiers", "unknown_report", "weights_stale", "weights_unknown",
            "worker_not_attached",
        ),
    ),
    Metric(
        "skipped_requests",
        "Finished requests that took no part, or only stored, by reason.",
        "reason",
        (
            "adapter_replaced", "adapter_unreadable", "error", "media_id", "not_read",
            "prompt_embeds", "reset", "skip_load", "streaming_session",
        ),
    ),
    Metric("loaded_bytes", "Bytes copied from the memory tier to GPU memory."),
    Metric(
        "tier_loaded_bytes",
        "Bytes of objects that were loaded, of all ranks, by the tier that they came from.",
        TIER,
    ),
    Metric("stored_bytes", "Bytes copied from GPU memory to the memory tier."),
    Metric(
        "worker_events",
        "Other worker events, by event.",
        "event",
        (
            "bad_addresses", "copy_errors", "duplicate_loads", "duplicate_requests",
            "duplicate_stores", "loads_failed", "loads_partial", "loads_reported_early", "lost",
            "lost_jobs", "off", "pins_broken", "pool_failures", "refused", "shards_refused",
            "slots_reused",
            "step_errors", "stores_aborted", "stores_dropped", "stores_stale", "stores_voided",
            "thread_failures", "thread_rearms", "unexpected_reports", "unknown_cancels",
            "unsent_dropped", "weights_hashed",
        ),
    ),
    Metric(
        "errors",
        "Unexpected errors in connector hooks. Each turns KVTier off for a while.",
        "hook",
        (
            "begin_step", "bind_gpu_block_pool", "build_connector_meta",
            "build_connector_worker_meta",
            "get_external_cache_hit_sources", "get_finished",
            "get_kv_connector_stats", "get_num_new_matched_tokens", "get_transfer_results",
            "has_pending_push_work", "on_new_request",
            "rearm", "register_kv_caches", "request_finished", "reset_cache", "restore_kv_caches",
            "shutdown", "start_load_kv", "take_events",
            "unregister_kv_caches", "update_connector_output", "update_state_after_alloc",
            "wait_for_save",
        ),
    ),
    Metric(
        "rejected_hints",
        "Requests whose hints were ignored because one of them is not valid, by reason.",
        "reason",
        (
            "duplicate", "range", "too_many", "type", "unknown", "unknown_tier", "version",
        ),
    ),
    Metric(
        "prefetch_hints",
        "Requests with the hint prefetch, by what came of it.",
        "outcome",
        ("nothing_missing", "not_ready", "started", "too_many"),
    ),
    Metric("kv_events", "KV events for routers, by event.", "event", ("removed", "stored")),
    Metric(
        "dropped_kv_events",
        "Chunks that routers are not told of although a tier may hold them, and events without a "
        "place in the queue, by reason.",
        "reason",
        ("error", "not_described", "queue_full", "table_full"),
    ),
    Metric("rearms", "How often KVTier was used again some time after an unexpected error."),
    Metric(
        "off",
        "Starts of engine processes without tiers, by reason.",
        "reason",
        ("ConfigurationError", "UnsupportedGeometryError", UNEXPECTED),
    ),
)  # fmt: skip
WITHOUT_TIERS = (
    "processes_without_tiers",
    "Processes of the engine, scheduler and ranks, in which KVTier is turned off now.",
)
"""Name and help of the gauge. Processes report changes of it: 1 when KVTier is turned off in one
and -1 when it is used again."""
HISTOGRAMS = (
    Metric(
        "load_duration_seconds",
        "Duration of loads, from the worker's receipt of the job to its report, by the slowest "
        "tier that the objects came from.",
        TIER,
    ),
    Metric(
        "store_duration_seconds",
        "Duration of stores to the memory tier, from their plan to the report of the last rank.",
    ),
    Metric(
        "wait_seconds",
        "How long requests waited for secondary tiers before they were admitted, whatever came of "
        "it.",
    ),
)
GAUGES = (
    Metric("loads_in_flight", "Loads that some rank has not ended."),
    Metric("stores_in_flight", "Stores that some rank has not ended, and chunks without a slot."),
    Metric("waiting_requests", "Requests that wait for a secondary tier."),
    Metric(
        "tier_usable",
        "1 if the engine may use the tier; 0 while tierd is not attached, or the tier is not open "
        "or its breaker is open.",
        TIER,
    ),
    Metric("applied_generation", "Generation of the live values that the engine applies."),
)
"""States of the scheduler side, as they were when it was last asked for statistics."""
BY_NAME = {metric.name: metric for metric in COUNTERS}
HISTOGRAM_NAMES = frozenset(metric.name for metric in HISTOGRAMS)


def off_reason(error: Exception) -> str:
    """The label value of ``off`` for this error."""
    name = type(error).__name__
    return name if name in BY_NAME["off"].values else UNEXPECTED


def check(name: str, value: str) -> None:
    """With ``strict``, raises ``LookupError`` for a name or a label value that is not registered.

    Names of tiers are not checked.
    """
    if not strict or name == WITHOUT_TIERS[0]:
        return
    metric = BY_NAME.get(name)
    if metric is None or (metric.label != TIER and value not in metric.values):
        raise LookupError(
            f"counter {name!r} with label value {value!r} is not registered: "
            "add it to COUNTERS in engines/vllm/counters.py"
        )
