"""The counters of ``WeightedMultiConnector`` and every label value that each can have."""

from __future__ import annotations

from kvtier.engines.vllm.counters import Metric

CONNECTOR_LABEL = "connector"
"""The label with the name of a child, of every metric of a child and of the parent."""
OUTCOMES = (
    "chosen", "error", "failed_before", "fewer", "invalid", "nothing", "not_yet", "suspended",
    "synchronous", "unweighted", "wrong_rank_count",
)  # fmt: skip
MULTI_COUNTERS = (
    Metric(
        "multi_lookups",
        "Admitted requests, by what the connector's last answer before the admission led to.",
        "outcome",
        OUTCOMES,
    ),
    Metric("multi_loads", "Loads by the connector that ended.", "result", ("failed", "loaded")),
    Metric("multi_loaded_tokens", "Tokens that the connector loaded without a failure."),
    Metric("multi_errors", "Exceptions that the connector raised, by hook.", "hook", ()),
    Metric(
        "multi_abandoned_sends",
        "Finished requests whose blocks were released although the connector, which has raised, "
        "has not reported that it needs them no more.",
    ),
    Metric(
        "multi_unexpected_reports",
        "Reports of the connector that were dropped, because vLLM does not wait for them.",
        "kind",
        ("blocks", "received", "sent", "transfer_params"),
    ),
)
"""Each has the label ``connector`` too. ``multi_errors`` of a hook appears with its first event."""
