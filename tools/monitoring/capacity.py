"""The dashboard about what tiers hold, earn and cost."""

from __future__ import annotations

from tools.monitoring.panels import (
    ENGINE,
    LEGEND,
    LEGEND_TIER,
    POD,
    RATE,
    TIER,
    Board,
    Panel,
    Query,
)

CAPACITY = Board(
    "capacity",
    "KVTier / Capacity",
    "What each tier holds, earns and costs.",
    ("namespace", "policy", "model", "tier"),
    {
        "Holds": (
            Panel(
                "Used of capacity",
                "Share of a tier's capacity that is used. A full tier is normal: the least "
                "recently used objects are evicted.",
                "percentunit",
                (
                    Query(
                        f"sum by (tier) (kvtier_tier_used_bytes{{{TIER}}})"
                        f" / sum by (tier) (kvtier_tier_capacity_bytes{{{TIER}}})",
                        "{{tier}}",
                    ),
                ),
            ),
            Panel(
                "Bytes used",
                "Bytes that a tier is charged for. Pods that share a directory each report it, so "
                "this is the largest report.",
                "bytes",
                (
                    Query(
                        f"max by (namespace, policy, tier) (kvtier_tier_used_bytes{{{TIER}}})",
                        "{{namespace}}/{{policy}} {{tier}}",
                    ),
                ),
                "KVTierCapacityExceedsDisk",
            ),
            Panel(
                "Objects",
                "Objects that a tier holds and can serve.",
                "short",
                (
                    Query(
                        f"max by (namespace, policy, tier) (kvtier_tier_objects{{{TIER}}})",
                        "{{namespace}}/{{policy}} {{tier}}",
                    ),
                ),
            ),
            Panel(
                "Free space of file systems",
                "Free share of the file system that a tier is on, and what minFree keeps free.",
                "percentunit",
                (
                    Query(
                        "min by (namespace, pod, tier) (kvtier_tier_volume_available_bytes"
                        f"{{{TIER}}} / kvtier_tier_volume_size_bytes{{{TIER}}})",
                        LEGEND_TIER,
                    ),
                    Query(
                        f"max by (namespace, pod, tier) (kvtier_tier_min_free_bytes{{{TIER}}}"
                        f" / kvtier_tier_volume_size_bytes{{{TIER}}})",
                        f"minFree of {LEGEND_TIER}",
                    ),
                ),
                "KVTierDiskFilling",
            ),
        ),
        "Earns": (
            Panel(
                "Tokens loaded by tier",
                "Prompt tokens per second that were loaded instead of computed, by the tier where "
                "they were found.",
                "cps",
                (
                    Query(
                        f"sum by (tier) (rate(kvtier_loaded_tokens_total{{{TIER}}}{RATE}))",
                        "{{tier}}",
                    ),
                ),
                "KVTierTierEarnsNothing",
                stacked=True,
            ),
            Panel(
                "Share of prompt tokens by tier",
                "Of all prompt tokens, the share that each tier provided.",
                "percentunit",
                (
                    Query(
                        f"sum by (tier) (rate(kvtier_loaded_tokens_total{{{TIER}}}{RATE}))"
                        " / scalar(clamp_min("
                        f"sum(rate(kvtier_prompt_tokens_total{{{POD}}}{RATE})), 1e-9))",
                        "{{tier}}",
                    ),
                ),
                "KVTierTierEarnsNothing",
                stacked=True,
            ),
            Panel(
                "Loaded tokens by model",
                "Prompt tokens per second that engines loaded into GPU memory.",
                "cps",
                (
                    Query(
                        "sum by (model_name) "
                        f'(rate(vllm:kvtier_loaded_tokens_total{{{ENGINE},tier=~"$tier"}}{RATE}))',
                        "{{model_name}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Decisions",
                "Which prefix tierd chose to load, by reason. `recomputing_is_faster` means that "
                "no tier would have helped.",
                "cps",
                (
                    Query(
                        f"sum by (reason) (rate(kvtier_selections_total{{{POD}}}{RATE}))",
                        "{{reason}}",
                    ),
                ),
                stacked=True,
            ),
        ),
        "Costs": (
            Panel(
                "Read from tiers",
                "Bytes per second that were read from secondary tiers.",
                "Bps",
                (
                    Query(
                        f"sum by (tier) (rate(kvtier_tier_read_bytes_total{{{TIER}}}{RATE}))",
                        "{{tier}}",
                    ),
                ),
            ),
            Panel(
                "Written to tiers",
                "Bytes per second that were written to secondary tiers: the wear of a disk.",
                "Bps",
                (
                    Query(
                        f"sum by (tier) (rate(kvtier_tier_write_bytes_total{{{TIER}}}{RATE}))",
                        "{{tier}}",
                    ),
                ),
                "KVTierTierEarnsNothing",
            ),
            Panel(
                "Not written",
                "Objects that were not written to a tier, or that wait for it.",
                "cps",
                (
                    Query(
                        "sum by (tier, reason) "
                        f"(rate(kvtier_tier_writes_dropped_total{{{TIER}}}{RATE}))",
                        "{{tier}} {{reason}}",
                    ),
                    Query(
                        f"sum by (tier) (rate(kvtier_tier_writes_postponed_total{{{TIER}}}{RATE}))",
                        "{{tier}} postponed",
                    ),
                ),
                "KVTierDiskFull",
            ),
            Panel(
                "Copies between RAM and GPU memory",
                "Bytes per second in both directions.",
                "Bps",
                (
                    Query(f"sum(rate(vllm:kvtier_loaded_bytes_total{{{ENGINE}}}{RATE}))", "to GPU"),
                    Query(
                        f"sum(rate(vllm:kvtier_stored_bytes_total{{{ENGINE}}}{RATE}))", "from GPU"
                    ),
                ),
            ),
        ),
        "RAM": (
            Panel(
                "Host pool by use",
                "Bytes of the host pool.",
                "bytes",
                (
                    Query(
                        f'sum by (use) (kvtier_pool_bytes{{{POD},use!~"pool_bytes|touched"}})',
                        "{{use}}",
                    ),
                ),
                "KVTierSlotsQuarantined",
            ),
            Panel(
                "Evictions from RAM",
                "Objects per second that left RAM to make room.",
                "cps",
                (
                    Query(
                        f"sum by (namespace, pod) (rate(kvtier_evictions_total{{{POD}}}{RATE}))",
                        LEGEND,
                    ),
                ),
            ),
            Panel(
                "Free on the memory volume",
                "Free bytes on the volume of the run directory, which holds the pool.",
                "bytes",
                (
                    Query(
                        f"min by (namespace, pod) (kvtier_run_volume_available_bytes{{{POD}}})",
                        LEGEND,
                    ),
                ),
                "KVTierSharedMemoryLow",
            ),
            Panel(
                "Bytes of pending stores",
                "Bytes that wait to be written to a tier, and pin RAM.",
                "bytes",
                (Query(f"sum by (tier) (kvtier_tier_pending_store_bytes{{{TIER}}})", "{{tier}}"),),
            ),
        ),
    },
)
