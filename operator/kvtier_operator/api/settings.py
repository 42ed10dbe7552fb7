"""Parts of a policy: breaker, isolation, security, resources, attach, rollout and monitoring."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from kvtier.config.models import Encryption, Honour, TenantKind
from kvtier_operator.api.base import (
    LIVE,
    RFC1123_SUBDOMAIN,
    STRUCTURAL,
    Accepts,
    ErrorType,
    Integer,
    Model,
    NonNegativeQuantity,
    Rule,
    Scalar,
    Violation,
)
from kvtier_operator.api.quantity import Quantity


class MemoryPolicy(StrEnum):
    """How the memory limit of an engine that is charged for the host pool is handled."""

    VALIDATE = "Validate"
    GROW = "Grow"
    IGNORE = "Ignore"


class AttachMode(StrEnum):
    """How tiers are injected into pods."""

    WEBHOOK = "Webhook"
    CONFIG_MAP_ONLY = "ConfigMapOnly"


class RolloutStrategy(StrEnum):
    """How a structural change reaches running pods."""

    ON_POD_RESTART = "OnPodRestart"
    RESTART_WORKLOADS = "RestartWorkloads"


class PodMonitor(StrEnum):
    """Whether a PodMonitor is created."""

    AUTO = "Auto"
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class Breaker(Model):
    """When a failing tier is suspended."""

    failure_threshold: Annotated[
        Integer,
        LIVE,
        Field(
            ge=1,
            le=1000,
            description=("Number of consecutive failures after which a tier is suspended."),
        ),
    ] = 5
    period_seconds: Annotated[
        Integer,
        LIVE,
        Field(ge=1, le=86_400, description=("Time until a suspended tier is probed again.")),
    ] = 60


class Hints(Model):
    """What requests may ask for with hints."""

    honour: Annotated[
        Honour,
        LIVE,
        Field(description="Whether hints of requests have an effect."),
    ] = Honour.ENABLED
    max_pinned_percent: Annotated[
        Integer,
        LIVE,
        Field(
            ge=0,
            le=80,
            description=(
                "Share of the memory tier that requests may pin, in percent, and of each tenant's "
                "share of it. Further pins are refused and counted."
            ),
        ),
    ] = 20
    default_retain_seconds: Annotated[
        Integer,
        LIVE,
        Field(
            ge=0,
            le=604_800,
            description=(
                "How long the objects of a request that does not say are evicted from the memory "
                "tier after others. 0: not at all."
            ),
        ),
    ] = 0


class Tenants(Model):
    """Bounds what one tenant holds in the memory tier and in file tiers."""

    by: Annotated[
        TenantKind,
        LIVE,
        Field(
            description=(
                "What makes requests belong to one tenant. CacheSalt: the same cache_salt; those "
                "without one belong to none. Policy: all requests of the policy's pods are one "
                "tenant of the directories that they share with others."
            )
        ),
    ] = TenantKind.CACHE_SALT
    max_percent: Annotated[
        Integer,
        LIVE,
        Field(
            ge=1,
            le=100,
            description=(
                "Share of the capacity of each memory and file tier that one tenant may hold, in "
                "percent. A store beyond it evicts the tenant's own objects. 100: no limit."
            ),
        ),
    ] = 100


class KeySecretReference(Model):
    """Optional Secret of the policy's namespace."""

    name: Annotated[
        str,
        STRUCTURAL,
        Field(
            max_length=253,
            pattern=f"^$|{RFC1123_SUBDOMAIN}",
            description=(
                "Name of the Secret. Each entry is a key of 32 bytes or more, named by its id; the "
                "entry current holds the id of the key for new objects. If empty, objects have no "
                "keyed tag."
            ),
        ),
        Accepts(
            "empty, or the name of a Kubernetes object: lower-case letters, digits, - and ., at "
            "most 253"
        ),
    ] = ""


def _encryption_needs_keys(isolation: Isolation) -> Iterator[Violation]:
    if isolation.encryption is not Encryption.NONE and not isolation.key_secret_ref.name:
        yield Violation(
            ("keySecretRef", "name"),
            "",
            f"must be set if encryption is {isolation.encryption.value}",
            ErrorType.REQUIRED,
        )


class Isolation(Model):
    """Isolation of objects, in addition to what the engine's hashes ensure, and their protection in
    file tiers."""

    salt: Annotated[
        str,
        STRUCTURAL,
        Field(
            max_length=256,
            description=(
                "Part of the namespace of every object. Engines with different salts share no "
                "objects."
            ),
        ),
    ] = ""
    model_revision: Annotated[
        str,
        STRUCTURAL,
        Field(
            max_length=256,
            description=(
                "Part of the namespace of every object, for models whose revision the engine does "
                "not know."
            ),
        ),
    ] = ""
    key_secret_ref: Annotated[
        KeySecretReference,
        STRUCTURAL,
        Field(
            description=(
                "Secret with the keys that protect objects in file tiers. Every object carries a "
                "keyed tag, and an object whose tag is not proven is a miss. Without the Secret "
                "file tiers are suspended."
            )
        ),
    ] = KeySecretReference()
    encryption: Annotated[
        Encryption,
        STRUCTURAL,
        Field(
            description=(
                "How new objects in file tiers are encrypted, with the keys of keySecretRef. "
                "Objects written with another setting can be read."
            )
        ),
    ] = Encryption.NONE

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="encryption-needs-keys",
            check=_encryption_needs_keys,
            cel="!has(self.encryption) || self.encryption == 'None' || "
            "(has(self.keySecretRef) && has(self.keySecretRef.name) && "
            "self.keySecretRef.name.size() > 0)",
            message="must be set if encryption is not None",
            field_path=".keySecretRef",
        ),
    )


class Security(Model):
    """Ownership of stored files."""

    storage_gid: Annotated[
        Integer,
        STRUCTURAL,
        Field(ge=1, le=2_147_483_647, description="Group of directories and files in file tiers."),
    ] = 3000


RESOURCE_WORDS = "quantities of resources other than memory, which is computed from the memory tier"


def _not_memory(resources: dict[str, Quantity]) -> dict[str, Quantity]:
    if "memory" in resources:
        raise PydanticCustomError("resources", "memory is computed")
    return resources


Resources = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=253)], NonNegativeQuantity],
    Field(max_length=16),
    AfterValidator(_not_memory),
    Accepts(RESOURCE_WORDS),
    Scalar(cel="!('memory' in self)", message=f"must be {RESOURCE_WORDS}"),
]


_CPU_REQUEST = (
    "(has(self.requests) ? ('cpu' in self.requests ? string(self.requests['cpu']) : '0') : '1')"
)
_CPU_LIMIT = "(has(self.limits) ? ('cpu' in self.limits ? string(self.limits['cpu']) : '8E') : '8')"


def _cpu_within_limit(resources: DaemonResources) -> Iterator[Violation]:
    request, limit = resources.requests.get("cpu"), resources.limits.get("cpu")
    if request is not None and limit is not None and request.value > limit.value:
        yield Violation(("requests", "cpu"), request.text, f"must be at most the limit ({limit})")


DEFAULT_REQUESTS = {"cpu": Quantity.parse("1")}
DEFAULT_LIMITS = {"cpu": Quantity.parse("8")}


class DaemonResources(Model):
    """Resources of the sidecar. Its memory is computed from the memory tier and cannot be set."""

    requests: Annotated[Resources, STRUCTURAL, Field(description="Requests of the sidecar.")] = (
        DEFAULT_REQUESTS
    )
    limits: Annotated[Resources, STRUCTURAL, Field(description="Limits of the sidecar.")] = (
        DEFAULT_LIMITS
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="cpu-within-limit",
            check=_cpu_within_limit,
            # With the defaults, because the schema has no defaults of structural fields.
            cel=f"!isQuantity({_CPU_REQUEST}) || !isQuantity({_CPU_LIMIT}) || "
            f"quantity({_CPU_REQUEST}).compareTo(quantity({_CPU_LIMIT})) <= 0",
            message="cpu must be at most limits.cpu (8 if not set)",
            expression=f"'cpu must be at most the limit (' + {_CPU_LIMIT} + "
            f"'), got ' + {_CPU_REQUEST}",
            field_path=".requests",
        ),
    )


class PodResources(Model):
    """Resources of injected containers."""

    daemon: Annotated[
        DaemonResources,
        STRUCTURAL,
        Field(description=("Resources of the sidecar. Memory is computed from the memory tier.")),
    ] = DaemonResources()
    memory_policy: Annotated[
        MemoryPolicy,
        STRUCTURAL,
        Field(
            description=(
                "With daemon: Engine, how the memory limit of the engine's container is handled: "
                "validated, increased, or ignored."
            )
        ),
    ] = MemoryPolicy.VALIDATE


class Attach(Model):
    """How tiers are injected into pods, and when injection is suspended."""

    mode: Annotated[
        AttachMode,
        STRUCTURAL,
        Field(
            description=(
                "Webhook injects pods when they are created. ConfigMapOnly injects nothing, and "
                "writes the ConfigMaps <policy>-live and <policy>-structural for pods that are "
                "configured manually."
            )
        ),
    ] = AttachMode.WEBHOOK
    start_timeout_seconds: Annotated[
        Integer,
        LIVE,
        Field(
            ge=10,
            le=3600,
            description=(
                "Time for an engine to start. If an injected part prevents the start, injection is "
                "suspended for the pod's owner."
            ),
        ),
    ] = 120
    retry_seconds: Annotated[
        Integer,
        LIVE,
        Field(
            ge=10, le=86_400, description=("Time until injection is retried for a suspended owner.")
        ),
    ] = 600


class Rollout(Model):
    """How a structural change reaches running pods."""

    strategy: Annotated[
        RolloutStrategy,
        LIVE,
        Field(
            description=(
                "OnPodRestart waits until pods are replaced. RestartWorkloads restarts one "
                "workload at a time."
            )
        ),
    ] = RolloutStrategy.ON_POD_RESTART


class Monitoring(Model):
    """Objects created for Prometheus."""

    pod_monitor: Annotated[
        PodMonitor,
        LIVE,
        Field(
            description=(
                "Whether a PodMonitor is created. Auto: if the cluster has the PodMonitor API."
            )
        ),
    ] = PodMonitor.AUTO
