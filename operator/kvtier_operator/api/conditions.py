"""Condition types of a policy, and all reasons: of conditions, of skipped pods and of Events.

``docs/troubleshooting.md`` explains each reason; a test compares.
"""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """Conditions of a policy, in the order of its status."""

    READY = "Ready"
    ACCEPTED = "Accepted"
    STORAGE_READY = "StorageReady"
    ATTACHED = "Attached"
    UP_TO_DATE = "UpToDate"
    TUNED = "Tuned"
    ENGINES_COMPATIBLE = "EnginesCompatible"
    TIERS_HEALTHY = "TiersHealthy"


class PolicyReason(StrEnum):
    """Reasons of the conditions that depend on the policy and its storage."""

    # Accepted.
    ACCEPTED = "Accepted"
    NOT_ENFORCED = "NotEnforced"
    PARTLY_EXPRESSED = "PartlyExpressed"
    PARTLY_APPLIED = "PartlyApplied"
    INVALID = "Invalid"
    VOLUME_NOT_ALLOWED = "VolumeNotAllowed"
    NOT_ALLOWED = "NotAllowed"
    UNSUPPORTED = "Unsupported"
    TOO_LARGE = "TooLarge"

    # StorageReady.
    NO_CLAIMS = "NoClaims"
    BOUND = "Bound"
    BINDS_ON_FIRST_USE = "BindsOnFirstUse"
    CLAIM_PENDING = "ClaimPending"
    CLAIM_MISSING = "ClaimMissing"
    CLAIM_LOST = "ClaimLost"
    CLAIM_TERMINATING = "ClaimTerminating"
    CLAIM_NOT_SHARED = "ClaimNotShared"
    APPLY_REFUSED = "ApplyRefused"
    NOT_ACCEPTED = "NotAccepted"


class Reason(StrEnum):
    """Reasons of Ready and of the conditions that depend on pods.

    ``Attached`` also has those of ``SkipReason``.
    """

    IN_FORCE = "InForce"
    NO_PODS = "NoPods"

    # Attached.
    ATTACHED = "Attached"
    STARTING = "Starting"
    NOT_ATTACHED = "NotAttached"
    ENGINE_CRASHED = "EngineCrashed"
    TIERD_FAILED = "TierdFailed"
    UNREACHABLE = "Unreachable"
    MISSED = "Missed"
    CONFLICTED = "Conflicted"
    REFUSED = "Refused"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_NOT_PULLED = "ImageNotPulled"
    CONTAINER_NOT_STARTED = "ContainerNotStarted"
    VOLUME_NOT_MOUNTED = "VolumeNotMounted"

    # UpToDate.
    CURRENT = "Current"
    OUTDATED = "Outdated"
    ROLLING_OUT = "RollingOut"
    RESTART_UNSUPPORTED = "RestartUnsupported"
    MIXED_GROUP = "MixedGroup"

    # Tuned.
    APPLIED = "Applied"
    APPLYING = "Applying"
    LIVE_VALUES_REFUSED = "LiveValuesRefused"

    # EnginesCompatible.
    COMPATIBLE = "Compatible"
    SESSIONS_REFUSED = "SessionsRefused"
    ENGINE_UNSUPPORTED = "EngineUnsupported"
    NOT_REPORTED = "NotReported"

    # TiersHealthy.
    HEALTHY = "Healthy"
    DEGRADED = "Degraded"
    BREAKER_OPEN = "BreakerOpen"
    TIER_NOT_SERVED = "TierNotServed"
    POOL_MISSING = "PoolMissing"
    KEY_MISSING = "KeyMissing"
    KEY_INVALID = "KeyInvalid"
    MIN_FREE_REACHED = "MinFreeReached"
    CAPACITY_EXCEEDS_DISK = "CapacityExceedsDisk"
    STUCK_TERMINATING = "StuckTerminating"


class SkipReason(StrEnum):
    """Why a selected pod is skipped: in its annotation, in an Event and in the policy's status."""

    ALREADY_CONFIGURED = "AlreadyConfigured"
    WOULD_BE_REFUSED = "WouldBeRefused"
    WOULD_NOT_START = "WouldNotStart"
    MEMORY_TOO_SMALL = "MemoryTooSmall"
    MIXED_GROUP = "MixedGroup"
    UNSUPPORTED_OWNER = "UnsupportedOwner"
    UNSUPPORTED_ENGINE = "UnsupportedEngine"
    NO_ENGINE_CONTAINER = "NoEngineContainer"
    SUSPENDED = "Suspended"
    NOT_ACCEPTED = "NotAccepted"
    CONFLICTED = "Conflicted"
    NO_NATIVE_SIDECARS = "NoNativeSidecars"
    MULTI_HOST = "MultiHost"
    DISABLED = "Disabled"


class EventReason(StrEnum):
    """Reasons of Events that are not reasons of conditions."""

    SKIPPED = "Skipped"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    STUCK_POD_DELETED = "StuckPodDeleted"
    WORKLOAD_RESTARTED = "WorkloadRestarted"
    TIER_DEGRADED = "TierDegraded"
    TIER_BREAKER_OPEN = "TierBreakerOpen"
    TIER_HEALTHY = "TierHealthy"
    DATA_LEFT = "DataLeft"
