"""The dashboard for people on call."""

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

ON_CALL = Board(
    "on-call",
    "KVTier / On call",
    "Whether a tier hurts anyone, which one, and since when.",
    ("namespace", "policy", "model", "tier"),
    {
        "Is anyone hurt": (
            Panel(
                "Tiers not used",
                "Tiers whose breaker is open. They delay no request; what they hold is recomputed.",
                "short",
                (Query(f'sum(kvtier_tier_state{{{TIER},state="BreakerOpen"}})'),),
                "KVTierTierUnavailable",
                single=True,
                bad=1,
            ),
            Panel(
                "Engines without tiers",
                "Engines in which KVTier is turned off now, in the scheduler or in a rank.",
                "short",
                (
                    Query(
                        "count(sum by (namespace, pod) "
                        f"(vllm:kvtier_processes_without_tiers{{{ENGINE}}}) > 0) or vector(0)"
                    ),
                ),
                "KVTierEngineWithoutTiers",
                single=True,
                bad=1,
            ),
            Panel(
                "Loads that failed",
                "Share of loads into GPU memory that failed wholly or in part. Their tokens were "
                "recomputed.",
                "percentunit",
                (
                    Query(
                        f"sum(rate(vllm:kvtier_load_failures_total{{{ENGINE}}}{RATE}))"
                        " / clamp_min(sum(rate("
                        f"vllm:kvtier_load_duration_seconds_count{{{ENGINE}}}{RATE})), 1e-9)"
                    ),
                ),
                "KVTierLoadTimeouts",
                single=True,
                bad=0.05,
            ),
            Panel(
                "Prompt tokens loaded",
                "Share of prompt tokens that were loaded from tiers instead of computed.",
                "percentunit",
                (
                    Query(
                        f"sum(rate(kvtier_loaded_tokens_total{{{TIER}}}{RATE}))"
                        f" / clamp_min(sum(rate(kvtier_prompt_tokens_total{{{POD}}}{RATE})), 1e-9)"
                    ),
                ),
                single=True,
            ),
        ),
        "Which tier": (
            Panel(
                "State of tiers",
                "1 while a tier is in a state other than Healthy.",
                "short",
                (
                    Query(
                        f"max by (namespace, pod, tier, state) (kvtier_tier_state{{{TIER},"
                        'state!="Healthy"})',
                        LEGEND_TIER + " {{state}}",
                    ),
                ),
                "KVTierTierUnavailable",
            ),
            Panel(
                "State of volumes",
                "1 while a volume of a tier with several is in a state other than Healthy.",
                "short",
                (
                    Query(
                        "max by (namespace, pod, tier, volume, state) "
                        f'(kvtier_volume_state{{{TIER},state!="Healthy"}})',
                        LEGEND_TIER + " {{volume}} {{state}}",
                    ),
                ),
                "KVTierVolumeUnavailable",
                needs="a tier with several volumes",
            ),
            Panel(
                "Failed reads by reason",
                "Objects that could not be read from a tier. Each was recomputed.",
                "cps",
                (
                    Query(
                        f"sum by (tier, reason) (rate(kvtier_tier_reads_failed_total{{{TIER}}}"
                        f"{RATE}))",
                        "{{tier}} {{reason}}",
                    ),
                ),
                "KVTierCorruptObjects",
                stacked=True,
            ),
            Panel(
                "Reads beyond their deadline",
                "Reads that did not end within the deadline of the request, and reads that hang "
                "now.",
                "short",
                (
                    Query(
                        f"sum by (tier) (rate(kvtier_tier_reads_timed_out_total{{{TIER}}}{RATE}))",
                        "{{tier}} timed out per second",
                    ),
                    Query(
                        f"sum by (tier) (kvtier_tier_late_reads_running{{{TIER}}})",
                        "{{tier}} hanging",
                    ),
                ),
                "KVTierReadTimeouts",
            ),
            Panel(
                "Breakers opened",
                "Times that a breaker opened in the last hour, by cause.",
                "short",
                (
                    Query(
                        "sum by (tier, reason) "
                        f"(increase(kvtier_breaker_opened_total{{{TIER}}}[1h])) > 0",
                        "{{tier}} {{reason}}",
                    ),
                ),
                "KVTierTierUnavailable",
                fault="breaker",
            ),
        ),
        "What requests notice": (
            Panel(
                "Duration of loads",
                "From the worker's receipt of a load to its report.",
                "s",
                tuple(
                    Query(
                        f"histogram_quantile({quantile}, sum by (le) (rate("
                        f"vllm:kvtier_load_duration_seconds_bucket{{{ENGINE}}}{RATE})))",
                        f"p{round(quantile * 100)}",
                    )
                    for quantile in (0.5, 0.99)
                ),
                "KVTierLoadTimeouts",
            ),
            Panel(
                "Promotions by outcome",
                "Requests that waited for a secondary tier, by what came of it.",
                "cps",
                (
                    Query(
                        f"sum by (outcome) (rate(vllm:kvtier_promotions_total{{{ENGINE}}}{RATE}))",
                        "{{outcome}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Failed loads by reason",
                "`limit` is a timeout. Tokens of a failed load are recomputed.",
                "cps",
                (
                    Query(
                        "sum by (reason) "
                        f"(rate(vllm:kvtier_load_failures_total{{{ENGINE}}}{RATE}))",
                        "{{reason}}",
                    ),
                ),
                "KVTierLoadTimeouts",
                stacked=True,
            ),
            Panel(
                "Chunks not stored",
                "Computed chunks that were not stored in RAM, by reason.",
                "cps",
                (
                    Query(
                        "sum by (reason) "
                        f"(rate(vllm:kvtier_dropped_stores_total{{{ENGINE}}}{RATE}))",
                        "{{reason}}",
                    ),
                ),
                stacked=True,
            ),
        ),
        "Processes": (
            Panel(
                "Conditions of tierd",
                "Conditions that hold now.",
                "short",
                (
                    Query(
                        f"max by (namespace, pod, type) (kvtier_condition{{{POD}}}) > 0",
                        LEGEND + " {{type}}",
                    ),
                ),
                "KVTierPoolTooSmall",
                fault="condition",
            ),
            Panel(
                "RAM in quarantine",
                "Memory that a process may still access, and that is not used until it has ended.",
                "bytes",
                (
                    Query(
                        f'sum by (namespace, pod) (kvtier_pool_bytes{{{POD},use="quarantined"}})',
                        LEGEND,
                    ),
                ),
                "KVTierSlotsQuarantined",
            ),
            Panel(
                "Sessions",
                "Engine processes that are attached to their tierd.",
                "short",
                (
                    Query(
                        f"sum by (namespace, pod, role) (kvtier_sessions{{{POD}}})",
                        LEGEND + " {{role}}",
                    ),
                ),
                "KVTierEngineWithoutTiers",
            ),
            Panel(
                "Protocol violations",
                "Messages that tierd rejected, which is a bug.",
                "short",
                (
                    Query(
                        f"sum by (namespace, pod) "
                        f"(increase(kvtier_protocol_violations_total{{{POD}}}[1h]))",
                        LEGEND,
                    ),
                ),
                "KVTierProtocolViolations",
            ),
        ),
    },
)
