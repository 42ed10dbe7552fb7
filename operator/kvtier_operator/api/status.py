"""What the operator reports about a policy."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from kvtier_operator.api.base import Integer, MapKey, Model

Text = Annotated[str, Field(max_length=1024)]
ShortText = Annotated[str, Field(max_length=253)]
Count = Annotated[Integer, Field(ge=0)]


class TierState(StrEnum):
    """What the pods say about a tier."""

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
    """Pods of the policy."""

    selected: Annotated[
        Count, Field(description="Pods that the selector matches and this policy governs.")
    ] = 0
    attached: Annotated[Count, Field(description="Pods with tiers.")] = 0
    current: Annotated[Count, Field(description="Attached pods with the policy's structure.")] = 0
    outdated: Annotated[Count, Field(description="Attached pods with an older structure.")] = 0
    skipped: Annotated[Count, Field(description="Pods left alone, see skippedPods.")] = 0
    tuned: Annotated[
        Count, Field(description="Attached pods that have applied the live values in force.")
    ] = 0


class SkippedPod(Reported):
    """A pod that was left alone, and why."""

    name: Annotated[ShortText, Field(description="Name of the pod.")]
    reason: Annotated[ShortText, Field(description="Why, in one word.")]
    message: Annotated[Text | None, Field(description="Why, for people.")] = None


class TierStatus(Reported):
    """What the pods say about one tier."""

    name: Annotated[str, Field(max_length=63, description="Name of the tier.")]
    state: Annotated[TierState, Field(description="The worst state that a pod reports.")] = (
        TierState.UNKNOWN
    )
    reporting_pods: Annotated[Count, Field(description="Pods that answered.")] = 0
    used_bytes: Annotated[Count | None, Field(description="Bytes in use.")] = None
    capacity_bytes: Annotated[Count | None, Field(description="Bytes that may be used.")] = None
    hit_tokens_percent: Annotated[
        Annotated[int, Field(ge=0, le=100)] | None,
        Field(description="Of prompt tokens, those loaded from here, last five minutes."),
    ] = None
    claim_name: Annotated[
        ShortText | None, Field(description="The claim behind the tier, if the operator made one.")
    ] = None


class SuspendedOwner(Reported):
    """An owner whose next pods are left alone, because attaching kept one from starting."""

    kind: Annotated[ShortText, Field(description="Kind of the owner.")]
    name: Annotated[ShortText, Field(description="Name of the owner.")]
    uid: Annotated[ShortText, Field(description="UID of the owner.")]
    reason: Annotated[ShortText | None, Field(description="Why, in one word.")] = None
    until: Annotated[
        Annotated[str, Field(max_length=64)] | None,
        Field(
            description="When attaching is tried again.", json_schema_extra={"format": "date-time"}
        ),
    ] = None


class Condition(Reported):
    """A condition as Kubernetes defines it."""

    type: Annotated[str, Field(min_length=1, max_length=316, description="What it is about.")]
    status: Annotated[Literal["True", "False", "Unknown"], Field(description="Whether it holds.")]
    reason: Annotated[str, Field(min_length=1, max_length=1024, description="Why, in one word.")]
    message: Annotated[str, Field(max_length=32_768, description="Why, for people.")] = ""
    observed_generation: Annotated[
        Count | None, Field(description="Generation of the policy it was found for.")
    ] = None
    last_transition_time: Annotated[
        str,
        Field(
            max_length=64,
            description="When status last changed.",
            json_schema_extra={"format": "date-time"},
        ),
    ]


class Summary(Reported):
    """The same in few words, for kubectl's columns."""

    pods: Annotated[
        str, Field(max_length=32, description="Attached and selected pods, such as 7/8.")
    ] = ""
    tiers: Annotated[
        str, Field(max_length=1024, description="Names of the tiers, nearest first.")
    ] = ""
    hit_tokens_percent: Annotated[
        Annotated[int, Field(ge=0, le=100)] | None,
        Field(description="Of prompt tokens, those loaded from any tier, last five minutes."),
    ] = None


class PolicyStatus(Reported):
    """What the operator reports."""

    observed_generation: Annotated[
        Count | None, Field(description="Generation of the policy this status is about.")
    ] = None
    structural_hash: Annotated[
        Annotated[str, Field(max_length=64)] | None,
        Field(description="Of the structural fields as written and the schema version."),
    ] = None
    live_generation: Annotated[
        Count | None, Field(description="Counts changes of the live values.")
    ] = None
    summary: Annotated[
        Summary | None, Field(description="In few words, for kubectl's columns.")
    ] = None
    pods: Annotated[PodCounts | None, Field(description="Pods of the policy.")] = None
    skipped_pods: Annotated[
        list[SkippedPod] | None,
        MapKey("name"),
        Field(max_length=16, description="Pods left alone; at most 16 are listed."),
    ] = None
    suspended_owners: Annotated[
        list[SuspendedOwner] | None,
        MapKey("uid"),
        Field(
            max_length=16,
            description="Owners whose next pods are left alone; at most 16 are listed.",
        ),
    ] = None
    tiers: Annotated[
        list[TierStatus] | None,
        MapKey("name"),
        Field(max_length=8, description="What the pods say about each tier."),
    ] = None
    conditions: Annotated[
        list[Condition] | None,
        MapKey("type"),
        Field(
            max_length=16,
            description=(
                "Ready, Accepted, StorageReady, Attached, UpToDate, Tuned, EnginesCompatible, "
                "TiersHealthy."
            ),
        ),
    ] = None
