"""The counters of tierd and every label set that each can have.

A Prometheus counter that appears with value 1 has not increased, so ``increase()`` misses the first
occurrence. ``label_sets`` lists what exists from the start at 0. A counter that the table lacks
works, from its first occurrence on; with ``strict``, which tests set, it raises ``LookupError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MESSAGES = (
    "Abort", "Bye", "Cancel", "Deliver", "EvictionAck", "Heartbeat", "Hello", "Load",
    "LoadReleased", "Promote", "Reserve", "ResetCache", "Resync",
)  # fmt: skip
"""What an engine sends (``tierd/wire.py``)."""
TIER_ERRORS = ("corrupt", "error", "key_missing", "no_space", "unavailable", "unexpected",
               "unverifiable", "vanished")  # fmt: skip
"""``TierError.reason`` of each class, and ``unexpected`` for any other exception."""
READ_ERRORS = (*TIER_ERRORS, "no_key", "other_version", "unkeyed", "unknown_key", "wrong_tag")
"""With the reasons of objects that a read finds and cannot use."""
_NONE = ("",)

strict = False
"""Whether an unregistered counter raises. For tests."""


@dataclass(frozen=True, slots=True)
class CounterLabels:
    """The label sets of one counter. ``per_tier``: one set for each secondary tier."""

    per_tier: bool = False
    reasons: tuple[str, ...] = _NONE


def _global(*reasons: str) -> CounterLabels:
    return CounterLabels(False, reasons or _NONE)


def _tier(*reasons: str) -> CounterLabels:
    return CounterLabels(True, reasons or _NONE)


COUNTERS: dict[str, CounterLabels] = {
    # Secondary tiers.
    "breaker_closed": _tier(),
    "breaker_opened": _tier(*TIER_ERRORS, "hung", "late"),
    "breaker_probe_failed": _tier(*TIER_ERRORS, "hung"),
    "presence_relisted": _tier(),
    "settings_missing": _tier(),
    "tier_late_reads": _tier(),
    "tier_maintain_failed": _tier(*TIER_ERRORS),
    "tier_objects_not_indexed": _tier(),
    "tier_open_failed": _tier(*TIER_ERRORS),
    "tier_probe_reads": _tier(),
    "tier_read_bytes": _tier(),
    "tier_reads": _tier(),
    "tier_reads_failed": _tier(*READ_ERRORS),
    "tier_reads_timed_out": _tier(),
    "tier_too_slow": _tier(),
    "tier_write_bytes": _tier(),
    "tier_writes": _tier(),
    "tier_writes_dropped": _tier(
        "breaker", "evicted", "not_open", "too_many_pending"
    ),
    "tier_writes_failed": _tier(*TIER_ERRORS),
    "tier_writes_postponed": _tier("too_many_pending", "write_budget"),
    # Promotions.
    "promotion_leases_expired": _global(),
    "promotions": _global(),
    "promotions_cut": _global(
        *READ_ERRORS, "absent", "breaker", "fenced", "no_slot", "no_time", "read_past_its_estimate",
        "recovered_corrupt", "selection", "tier_timeout", "too_many_promotions",
    ),
    "promotions_ended": _global("whole", "partial", "failed", "cancelled"),
    "promotions_out_of_time": _global(),
    "selections": _global(
        "below_min_load_tokens", "highest_score", "least_time", "longest_without_estimate",
        "nothing_usable", "recomputing_is_faster",
        "tier_without_estimate",
    ),
    # Loads and stores.
    "checksums_dropped": _global("evicted"),
    "checksums_failed": _global(),
    "checksums_postponed": _global(),
    "early_acks_dropped": _global(),
    "late_cancels": _global(),
    "loads": _global(),
    "loads_cut": _global("gone", "unknown_group", "unverified"),
    "loads_rejected": _global("too_many"),
    "loads_without_promotion": _global(),
    "objects_checksummed": _global(),
    "stores_cancelled": _global(
        "aborted", "engine_closed", "no_predecessor", "pending", "present", "read_meanwhile",
        "reset",
    ),
    "stores_committed": _global(),
    "stores_dropped_at_end": _global(),
    # The host pool.
    "eviction_notices_ended": _global("acknowledged", "timed_out"),
    "evictions": _global(),
    "evictions_cancelled": _global(),
    "late_eviction_acks": _global(),
    "pool_too_small": _global(*(f"group_{group}" for group in range(8))),
    "quarantine_ended": _global("confirmed", "expired"),
    "segments_reclaimed": _global(),
    "slots_quarantined": _global(),
    # Recovery.
    "objects_recovered": _global(),
    "orphaned_reads_unplaced": _global(),
    "recovered_objects_dropped": _global(
        "corrupt", "evicted", "geometry", "replaced", "unverifiable"
    ),
    "recovered_objects_rejected": _global(
        "damaged", "format", "header", "namespace", "overlap", "pool_file", "pool_size", "topology"
    ),
    "recovered_objects_verified": _global(),
    "slot_records_failed": _global("full", "no_space", "not_erased"),
    # Sessions.
    "engines_opened": _global(),
    "engines_reset": _global(),
    "hello_while_stopping": _global(),
    "loop_asleep": _global(),
    "messages_while_not_open": _global(*MESSAGES),
    "messages_without_session": _global(),
    "namespace_descriptions_failed": _global(),
    "protocol_violations": _global(
        "acknowledged_twice", "engine_opened_twice", "frames", "hello_twice", "load_released_twice",
        "load_twice", "load_without_ranks", "not_a_writer", "prefix_cost", "promotion_twice",
        "reservation_twice", "slot_not_granted", "undecodable", "unknown_engine", "unknown_group",
        "unknown_load", *(f"{role}_{name}" for role in ("scheduler", "worker")
                          for name in MESSAGES),
    ),
    "reservations_while_stopping": _global(),
    "resyncs": _global(),
    "sessions_attached": _global("scheduler", "worker"),
    "sessions_refused": _global(),
    "sessions_replaced": _global("", "not_drained"),
    "sessions_vanished": _global("proven", "unproven"),
}  # fmt: skip


def label_sets(tiers: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Every (name, tier, reason) that can occur with these secondary tiers."""
    names = tuple(tiers)
    for counter, labels in COUNTERS.items():
        for tier in names if labels.per_tier else _NONE:
            for reason in labels.reasons:
                yield counter, tier, reason


def check(name: str, tier: str, reason: str) -> None:
    """With ``strict``, raises ``LookupError`` for a label set that is not registered."""
    if not strict:
        return
    labels = COUNTERS.get(name)
    if labels is None or labels.per_tier != bool(tier) or reason not in labels.reasons:
        raise LookupError(
            f"counter {name!r} with tier {tier!r} and reason {reason!r} is not registered: "
            "add it to COUNTERS in store/counters.py"
        )
