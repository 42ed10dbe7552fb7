"""Status of a policy."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from kvtier_operator.api.base import Accepts, Integer, MapKey, Model
from kvtier_operator.api.conditions import ConditionType

Text = Annotated[str, Field(max_length=1024)]
ShortText = Annotated[str, Field(max_length=253)]
Count = Annotated[Integer, Field(ge=0)]
PodCount = Annotated[Integer, Field(ge=0, le=2**31 - 1)]
REASON = r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
CONDITION_TYPE = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"
)
"""Both as in ``metav1.Condition``."""
IN_CAMEL_CASE = Accepts("a reason in CamelCase")
ReasonText = Annotated[str, Field(min_length=1, max_length=253, pattern=REASON), IN_CAMEL_CASE]


class TierState(StrEnum):
    """State of a tier, as reported by the pods."""

    HEALTHY = "Healthy"
    DEGRADED = "Degraded"
    BREAKER_OPEN = "BreakerOpen"
    UNKNOWN = "Unknown"


class Reported(Model):
    """Base of status parts: read leniently, since another version of the operator may have written
    them.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel)


class PodCounts(Reported):
    """Numbers of pods of the policy."""

    selected: Annotated[PodCount, Field(description="Number of pods that the policy governs.")] = 0
    attached: Annotated[PodCount, Field(description="Number of pods with tiers.")] = 0
    current: Annotated[
        PodCount, Field(description=("Number of attached pods with the current structure."))
    ] = 0
    outdated: Annotated[
        PodCount, Field(description=("Number of attached pods with an older structure."))
    ] = 0
    skipped: Annotated[PodCount, Field(description="Number of skipped pods. See skippedPods.")] = 0
    tuned: Annotated[
        PodCount,
        Field(description=("Number of attached pods that have applied the current live values.")),
    ] = 0


class SkippedPod(Reported):
    """Pod that was skipped."""

    name: Annotated[ShortText, Field(description="Name of the pod.")]
    reason: Annotated[ReasonText, Field(description="Reason, in CamelCase.")]
    message: Annotated[Text | None, Field(description="Human-readable explanation.")] = None


class VolumeStatus(Reported):
    """Status of one of the volumes of a tier, as reported by the pods."""

    name: Annotated[str, Field(max_length=63, description="Name of the volume.")]
    state: Annotated[TierState, Field(description="Worst state that a pod reports.")] = (
        TierState.UNKNOWN
    )


class TierStatus(Reported):
    """Status of a tier, as reported by the pods."""

    name: Annotated[str, Field(max_length=63, description="Name of the tier.")]
    state: Annotated[TierState, Field(description="Worst state that a pod reports.")] = (
        TierState.UNKNOWN
    )
    reporting_pods: Annotated[PodCount, Field(description="Number of pods that report.")] = 0
    used_bytes: Annotated[Count | None, Field(description="Bytes in use.")] = None
    capacity_bytes: Annotated[Count | None, Field(description="Capacity in bytes.")] = None
    hit_tokens_percent: Annotated[
        Annotated[int, Field(ge=0, le=100)] | None,
        Field(
            description=(
                "Percentage of prompt tokens that were loaded from the tier in the last "
                "five minutes."
            )
        ),
    ] = None
    claim_name: Annotated[
        ShortText | None,
        Field(description=("Name of the claim of the tier, if the operator created it.")),
    ] = None
    volumes: Annotated[
        list[VolumeStatus] | None,
        MapKey("name"),
        Field(max_length=16, description="Volumes of the tier, if it has several."),
    ] = None


class SuspendedOwner(Reported):
    """Owner for which injection is suspended, because it prevented a pod from starting."""

    kind: Annotated[ShortText, Field(description="Kind of the owner.")]
    name: Annotated[ShortText, Field(description="Name of the owner.")]
    uid: Annotated[ShortText, Field(description="UID of the owner.")]
    reason: Annotated[ReasonText | None, Field(description="Reason, in CamelCase.")] = None
    until: Annotated[
        Annotated[str, Field(max_length=64)] | None,
        Field(
            description="Time when injection is retried.", json_schema_extra={"format": "date-time"}
        ),
    ] = None


class Condition(Reported):
    """Condition, as defined by Kubernetes."""

    type: Annotated[
        str,
        Accepts("a type of condition in CamelCase"),
        Field(
            min_length=1,
            max_length=316,
            pattern=CONDITION_TYPE,
            description="Type of the condition.",
        ),
    ]
    status: Annotated[
        Literal["True", "False", "Unknown"], Field(description=("Status of the condition."))
    ]
    reason: Annotated[
        str,
        IN_CAMEL_CASE,
        Field(min_length=1, max_length=1024, pattern=REASON, description="Reason, in CamelCase."),
    ]
    message: Annotated[str, Field(max_length=32_768, description="Human-readable explanation.")] = (
        ""
    )
    observed_generation: Annotated[
        Count | None, Field(description="Generation of the policy that the condition was set for.")
    ] = None
    last_transition_time: Annotated[
        str,
        Field(
            max_length=64,
            description="Time when the status last changed.",
            json_schema_extra={"format": "date-time"},
        ),
    ]


class Summary(Reported):
    """Summary for the columns of kubectl."""

    pods: Annotated[
        str, Field(max_length=32, description="Attached and selected pods, for example 7/8.")
    ] = ""
    tiers: Annotated[
        str, Field(max_length=1024, description="Names of the tiers, nearest first.")
    ] = ""
    hit_tokens_percent: Annotated[
        Annotated[int, Field(ge=0, le=100)] | None,
        Field(
            description=(
                "Percentage of prompt tokens that were loaded from any tier in the last "
                "five minutes."
            )
        ),
    ] = None


class PolicyStatus(Reported):
    """Observed state of a policy."""

    observed_generation: Annotated[
        Count | None,
        Field(description=("Generation of the policy that the status was computed for.")),
    ] = None
    structural_hash: Annotated[
        Annotated[str, Field(max_length=64)] | None,
        Field(description="Hash of the structural fields as written and of the schema version."),
    ] = None
    live_generation: Annotated[
        Count | None, Field(description="Generation of the live values.")
    ] = None
    summary: Annotated[Summary | None, Field(description="Summary for the columns of kubectl.")] = (
        None
    )
    pods: Annotated[PodCounts | None, Field(description="Numbers of pods.")] = None
    skipped_pods: Annotated[
        list[SkippedPod] | None,
        MapKey("name"),
        Field(max_length=16, description="Skipped pods. At most 16 are listed."),
    ] = None
    suspended_owners: Annotated[
        list[SuspendedOwner] | None,
        MapKey("uid"),
        Field(
            max_length=16,
            description="Owners for which injection is suspended. At most 16 are listed.",
        ),
    ] = None
    tiers: Annotated[
        list[TierStatus] | None,
        MapKey("name"),
        Field(max_length=8, description="State of each tier, as reported by the pods."),
    ] = None
    conditions: Annotated[
        list[Condition] | None,
        MapKey("type"),
        Field(
            max_length=16,
            description=f"{', '.join(ConditionType)}.",
        ),
    ] = None
