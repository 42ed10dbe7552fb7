"""The counters of ``WeightedMultiConnector`` and every label value that each can have."""

from __future__ import annotations

from dataclasses import dataclass

CONNECTOR_LABEL = "connector"
"""The label with the name of a child, of every metric of a child too."""


@dataclass(frozen=True, slots=True)
class MultiMetric:
    """A counter of the parent. It has the label ``connector``, and ``label`` if that is not empty.

    ``values``: what ``label`` can be; empty: it appears with its first event.
    """

    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ("",)


OUTCOMES = (
    "chosen", "error", "failed_before", "fewer", "invalid", "nothing", "not_yet", "suspended",
    "synchronous", "unweighted", "wrong_rank_count",
)  # fmt: skip
MULTI_COUNTERS = (
    MultiMetric(
        "multi_lookups",
        "Admitted requests, by what the connector's last answer before the admission led to.",
        "outcome",
        OUTCOMES,
    ),
    MultiMetric(
        "multi_loads", "Loads by the connector that ended.", "result", ("failed", "loaded")
    ),
    MultiMetric("multi_loaded_tokens", "Tokens that the connector loaded without a failure."),
    MultiMetric("multi_errors", "Exceptions that the connector raised, by hook.", "hook", ()),
    MultiMetric(
        "multi_abandoned_sends",
        "Finished requests whose blocks were released although the connector, which has raised, "
        "has not reported that it needs them no more.",
    ),
    MultiMetric(
        "multi_unexpected_reports",
        "Reports of the connector that were dropped, because vLLM does not wait for them.",
        "kind",
        ("blocks", "received", "sent", "transfer_params"),
    ),
)
