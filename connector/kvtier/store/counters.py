"""The counters of tierd and every label set that each can have.

A counter ``name`` is exported as ``kvtier_<name>_total`` with the labels ``tier`` and ``reason`` as
far as its row has them. A Prometheus counter that appears with value 1 has not increased, so
``increase()`` misses the first occurrence: ``label_sets`` lists what exists from the start at 0. A
counter that the table lacks works, from its first occurrence on; with ``strict``, which tests set,
it raises ``LookupError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MESSAGES = (
    "Abort", "Bye", "Cancel", "Deliver", "EvictionAck", "Heartbeat", "Hello", "Load",
    "Identify", "Keep", "LoadReleased", "Prefetch", "Promote", "Queued", "Reserve",
    "Resync",
)  # fmt: skip
"""What an engine sends (``tierd/wire.py``)."""
TIER_ERRORS = ("corrupt", "error", "expired", "key_missing", "min_free", "no_space",
               "tenant_quota", "unavailable", "unexpected", "unverifiable", "vanished")  # fmt: skip
"""``TierError.reason`` of each class, and ``unexpected`` for any other exception."""
READ_ERRORS = (*TIER_ERRORS, "no_key", "other_version", "unkeyed", "unknown_key", "wrong_tag")
"""With the reasons of objects that a read finds and cannot use."""
_NONE = ("",)

strict = False
"""Whether an unregistered counter raises. For tests."""


@dataclass(frozen=True, slots=True)
class CounterLabels:
    """The help text and the label sets of one counter. ``per_tier``: one set for each secondary
    tier."""

    help: str
    per_tier: bool = False
    reasons: tuple[str, ...] = _NONE

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels."""
        tier = ("tier",) if self.per_tier else ()
        return (*tier, "reason") if self.reasons != _NONE else tier


def _global(text: str, *reasons: str) -> CounterLabels:
    return CounterLabels(text, False, reasons or _NONE)


def _tier(text: str, *reasons: str) -> CounterLabels:
    return CounterLabels(text, True, reasons or _NONE)


COUNTERS: dict[str, CounterLabels] = {
    # Secondary tiers.
    "breaker_closed": _tier("Breakers of a tier that closed."),
    "breaker_opened": _tier(
        "Breakers of a tier that opened, by cause.", *TIER_ERRORS, "hung", "late"
    ),
    "breaker_probe_failed": _tier(
        "Failed probes of a tier with an open breaker.", *TIER_ERRORS, "hung"
    ),
    "presence_relisted": _tier("Times that the objects of a tier were listed again."),
    "settings_missing": _tier("Live values that lack the tier, which keeps its settings."),
    "tier_announcements": _tier(
        "Objects published in or removed from a shared tier that were announced, by direction.",
        "received", "sent",
    ),
    "tier_announcements_lost": _tier(
        "Announcements of a shared tier that were lost or not accepted, by reason.",
        "corrupt", "invalid", "lost", "no_key", "not_sent", "other_version", "overrun", "truncated",
        "unkeyed", "unknown_key", "unreadable", "wrong_tag",
    ),
    "tier_late_reads": _tier("Reads that are still running long after their deadline."),
    "tier_lookups": _tier(
        "Lookups of keys that are not in the index of a shared tier, by result.",
        "absent", "busy", "found", "timed_out", "too_slow",
    ),
    "tier_lookups_failed": _tier("Failed lookups in a shared tier.", *TIER_ERRORS),
    "tier_maintain_failed": _tier("Failed maintenance runs of a tier.", *TIER_ERRORS),
    "tier_objects_not_indexed": _tier("Objects that a tier holds and has no memory to index."),
    "tier_open_failed": _tier("Failed attempts to open a tier.", *TIER_ERRORS),
    "tier_probe_reads": _tier("Reads that measure a tier whose speed is unknown or outdated."),
    "tier_read_bytes": _tier("Bytes read from a tier."),
    "tier_reads": _tier("Objects read from a tier and verified."),
    "tier_reads_failed": _tier("Failed reads of objects from a tier.", *READ_ERRORS),
    "tier_reads_timed_out": _tier("Reads that did not end within their deadline."),
    "tier_too_slow": _tier("Promotions that did not use a tier because recomputing was faster."),
    "tier_write_bytes": _tier("Bytes written to a tier."),
    "tier_expired": _tier("Objects of a tier that were removed because they had expired."),
    "tier_tenant_evictions": _tier("Objects of a tier that were evicted for a tenant's share."),
    "tier_writes": _tier("Objects written to a tier."),
    "tier_writes_dropped": _tier(
        "Objects that were not written to a tier, by reason.",
        "breaker", "evicted", "not_open", "too_many_pending",
    ),
    "tier_writes_failed": _tier("Failed writes of objects to a tier.", *TIER_ERRORS),
    "tier_writes_postponed": _tier(
        "Objects that wait in RAM to be written, by reason.", "too_many_pending", "write_budget"
    ),
    "tier_writes_skipped": _tier(
        "Objects that the store policy or a request did not admit to a tier, by reason.",
        "expires", "hint_tiers", "not_reused",
    ),
    "prefetch_reads": _tier("Reads for requests that wait in an engine's queue."),
    # Requests in the queues of engines.
    "queued_requests": _global("Requests in an engine's queue whose prefix in RAM was marked."),
    "queued_requests_expired": _global("Such requests that waited too long to be marked further."),
    "queued_requests_rejected": _global(
        "Requests in an engine's queue that were not marked, by reason.", "too_many"
    ),
    # Promotions.
    "prefetches": _global("Requests in an engine's queue whose prefix was brought into RAM."),
    "prefetches_rejected": _global("Prefetches that did not begin, by reason.", "too_many"),
    "promotion_leases_expired": _global("Promotions whose result was not used in time."),
    "promotions": _global("Promotions that began."),
    "promotions_answered_early": _global(
        "Promotions that were answered before all keys had arrived, because the rest was expected "
        "to arrive while the engine copied them."
    ),
    "promotions_cut": _global(
        "Prefixes of promotions that were cut, by reason.",
        *READ_ERRORS, "absent", "breaker", "fenced", "no_slot", "no_time",
        "read_past_its_estimate", "recovered_corrupt", "selection", "tier_timeout",
        "too_many_promotions",
    ),
    "promotions_ended": _global(
        "Promotions that ended, by outcome.",
        "absent", "cancelled", "failed", "partial", "whole",
    ),
    "promotions_out_of_time": _global("Promotions that reached the deadline of their request."),
    "selections": _global(
        "Decisions which prefix to load, by reason.",
        "below_min_load_tokens", "highest_score", "least_time", "longest_without_estimate",
        "nothing_usable", "recomputing_is_faster", "tier_without_estimate",
    ),
    # Loads and stores.
    "checksums_dropped": _global("Objects that left RAM before their checksum.", "evicted"),
    "checksums_failed": _global("Failed computations of a checksum."),
    "checksums_postponed": _global("Objects that wait for a checksum without being pinned."),
    "early_acks_dropped": _global("Reports of stores without a reservation that were dropped."),
    "late_cancels": _global("Cancellations of promotions that had ended."),
    "loads": _global("Loads from RAM into GPU memory that began."),
    "loads_cut": _global(
        "Prefixes of loads that were cut, by reason.",
        "expired", "gone", "unknown_group", "unverified",
    ),
    "loads_rejected": _global("Loads that were rejected, by reason.", "too_many"),
    "loads_without_promotion": _global("Loads that name a promotion that has ended."),
    "objects_checksummed": _global("Objects whose checksum was computed."),
    "stores_cancelled": _global(
        "Stores that were cancelled, by reason.",
        "aborted", "engine_closed", "no_predecessor", "pending", "present", "read_meanwhile",
        "reset", "tenant_quota",
    ),
    "stores_committed": _global("Objects that were stored in RAM."),
    "stores_dropped_at_end": _global("Stores that were pending when tierd ended."),
    # The host pool.
    "eviction_notices_ended": _global(
        "Eviction notices that ended, by reason.", "acknowledged", "timed_out"
    ),
    "objects_expired": _global("Objects in RAM whose time to live has passed."),
    "objects_passed_on": _global(
        "Objects that left RAM after their writes, because no request lets them stay there."
    ),
    "pins": _global("Objects in RAM that requests have pinned."),
    "pins_ended": _global(
        "Objects that are no longer pinned, by reason.", "expired", "limit", "reclaimed"
    ),
    "pins_refused": _global(
        "Objects that requests could not pin, by reason.",
        "not_in_ram", "tenant_limit", "tier_limit",
    ),
    "tenant_evictions": _global("Objects that were evicted from RAM for their tenant's share."),
    "awaited_evictions": _global(
        "Objects that were evicted from RAM although a queued request waits for them."
    ),
    "evictions": _global("Objects that were evicted from RAM."),
    "evictions_cancelled": _global("Evictions that ended because the object was used again."),
    "late_eviction_acks": _global("Acknowledgements of eviction notices that had ended."),
    "pool_too_small": _global(
        "Engines with a KV cache group for which the pool has no room.",
        *(f"group_{group}" for group in range(8)),
    ),
    "quarantine_ended": _global(
        "Processes whose slots left quarantine, by reason.", "confirmed", "expired"
    ),
    "segments_reclaimed": _global("Segments of the pool that another KV cache group took over."),
    "slots_quarantined": _global("Slots that a process may still access and that are not reused."),
    # Recovery.
    "objects_recovered": _global("Objects that were found in the RAM of an earlier tierd."),
    "orphaned_reads_unplaced": _global("Reads of an earlier tierd whose slot is unknown."),
    "recovered_objects_dropped": _global(
        "Recovered objects that were dropped, by reason.",
        "corrupt", "evicted", "geometry", "replaced", "unverifiable",
    ),
    "recovered_objects_rejected": _global(
        "Objects of an earlier tierd that were not recovered, by reason.",
        "damaged", "format", "header", "layout", "namespace", "overlap", "pool_file", "pool_size",
        "topology",
    ),
    "recovered_objects_verified": _global("Recovered objects that were verified on first use."),
    "slot_records_failed": _global(
        "Failed writes to the slot table, by reason.", "full", "no_space", "not_erased"
    ),
    # Sessions.
    "engines_opened": _global("Engines whose processes have all attached."),
    "engines_reset": _global("Resets of an engine's cache."),
    "hello_while_stopping": _global("Sessions that were refused while tierd stops."),
    "loop_asleep": _global("Times that the process was suspended for seconds."),
    "messages_while_not_open": _global(
        "Messages of engines that are not open, by message.", *MESSAGES
    ),
    "messages_without_session": _global("Messages that belong to no session."),
    "namespace_descriptions_failed": _global("Failed writes of identity.json."),
    "protocol_violations": _global(
        "Messages that break the protocol, by reason.",
        "acknowledged_twice", "engine_opened_twice", "frames", "hello_twice", "load_released_twice",
        "load_twice", "load_without_ranks", "not_a_writer", "owner", "prefetch_twice",
        "prefix_cost", "promotion_twice", "reservation_twice", "slot_not_granted", "undecodable",
        "unknown_engine",
        "unknown_group", "unknown_load", *(f"{role}_{name}" for role in ("scheduler", "worker")
                          for name in MESSAGES),
    ),
    "reservations_while_stopping": _global("Reservations that were refused while tierd stops."),
    "resyncs": _global("Times that an engine asked for the whole presence index."),
    "sessions_attached": _global("Sessions that attached, by role.", "scheduler", "worker"),
    "sessions_refused": _global("Sessions that were refused."),
    "sessions_replaced": _global(
        "Sessions that a process replaced, by whether it had drained.", "drained", "not_drained"
    ),
    "sessions_vanished": _global(
        "Processes that ended without a farewell, by whether that is proven.", "proven", "unproven"
    ),
}  # fmt: skip

UNREGISTERED = CounterLabels("A counter without a description.", True, ())
"""What a counter has that the table lacks."""


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
