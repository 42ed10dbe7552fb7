"""The parts of a policy beside engine and tiers."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from kvtier_operator.api.base import (
    LIVE,
    RFC1123_SUBDOMAIN,
    STRUCTURAL,
    Accepts,
    Integer,
    Model,
    NonNegativeQuantity,
    Rule,
    Scalar,
    Violation,
)
from kvtier_operator.api.quantity import Quantity


class MemoryPolicy(StrEnum):
    """What is done about the memory limit of an engine that pays for the host pool itself."""

    VALIDATE = "Validate"
    GROW = "Grow"
    IGNORE = "Ignore"


class AttachMode(StrEnum):
    """How pods get their tiers."""

    WEBHOOK = "Webhook"
    CONFIG_MAP_ONLY = "ConfigMapOnly"


class RolloutStrategy(StrEnum):
    """How a structural change reaches pods that run."""

    ON_POD_RESTART = "OnPodRestart"
    RESTART_WORKLOADS = "RestartWorkloads"


class PodMonitor(StrEnum):
    """Whether a PodMonitor is created."""

    AUTO = "Auto"
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class Breaker(Model):
    """When a tier is given up for a while."""

    failure_threshold: Annotated[
        Integer,
        LIVE,
        Field(ge=1, le=1000, description="Failures in a row after which a tier is given up."),
    ] = 5
    period_seconds: Annotated[
        Integer, LIVE, Field(ge=1, le=86_400, description="How long until it is probed again.")
    ] = 60


class KeySecretReference(Model):
    """A Secret of the policy's namespace, or none."""

    name: Annotated[
        str,
        STRUCTURAL,
        Field(
            max_length=253,
            pattern=f"^$|{RFC1123_SUBDOMAIN}",
            description="Name of the Secret; empty: objects carry no keyed tag.",
        ),
        Accepts(
            "empty, or the name of a Kubernetes object: lower-case letters, digits, - and ., at "
            "most 253"
        ),
    ] = ""


class Isolation(Model):
    """What keeps objects apart beyond what the engine computes."""

    salt: Annotated[
        str,
        STRUCTURAL,
        Field(
            max_length=256,
            description="Part of every object's namespace: other salt, other objects.",
        ),
    ] = ""
    model_revision: Annotated[
        str,
        STRUCTURAL,
        Field(
            max_length=256,
            description=(
                "Part of every object's namespace, for models whose revision the engine cannot "
                "tell."
            ),
        ),
    ] = ""
    key_secret_ref: Annotated[
        KeySecretReference,
        STRUCTURAL,
        Field(description="Secret that keys the tags of objects in shared directories."),
    ] = KeySecretReference()


class Security(Model):
    """Who may read what is stored."""

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

    requests: Annotated[Resources, STRUCTURAL, Field(description="What the sidecar asks for.")] = (
        DEFAULT_REQUESTS
    )
    limits: Annotated[Resources, STRUCTURAL, Field(description="What the sidecar may use.")] = (
        DEFAULT_LIMITS
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="cpu-within-limit",
            check=_cpu_within_limit,
            # The defaults stand here because structural ones are not in the schema.
            cel=f"!isQuantity({_CPU_REQUEST}) || !isQuantity({_CPU_LIMIT}) || "
            f"quantity({_CPU_REQUEST}).compareTo(quantity({_CPU_LIMIT})) <= 0",
            message="cpu must be at most limits.cpu (8 if not set)",
            expression=f"'cpu must be at most the limit (' + {_CPU_LIMIT} + '), got ' + {_CPU_REQUEST}",
            field_path=".requests",
        ),
    )


class PodResources(Model):
    """Resources of what is added to a pod."""

    daemon: Annotated[
        DaemonResources, STRUCTURAL, Field(description="Of the sidecar; memory is computed.")
    ] = DaemonResources()
    memory_policy: Annotated[
        MemoryPolicy,
        STRUCTURAL,
        Field(
            description="With daemon: Engine, whether the memory limit of the engine's container is "
            "checked, "
            "raised or left alone."
        ),
    ] = MemoryPolicy.VALIDATE


class Attach(Model):
    """How pods get their tiers, and when that is given up."""

    mode: Annotated[
        AttachMode,
        STRUCTURAL,
        Field(
            description="Webhook patches pods. ConfigMapOnly injects nothing and writes <policy>-live and "
            "<policy>-structural for pods that people write."
        ),
    ] = AttachMode.WEBHOOK
    start_timeout_seconds: Annotated[
        Integer,
        LIVE,
        Field(
            ge=10,
            le=3600,
            description=(
                "An engine not started by then, for a reason in an injected part, gets its next "
                "pod unchanged."
            ),
        ),
    ] = 120
    retry_seconds: Annotated[
        Integer,
        LIVE,
        Field(ge=10, le=86_400, description="How long until attaching is tried again."),
    ] = 600


class Rollout(Model):
    """How a structural change reaches pods that run."""

    strategy: Annotated[
        RolloutStrategy,
        LIVE,
        Field(
            description=(
                "OnPodRestart waits for pods to be replaced; RestartWorkloads restarts one "
                "workload at a time."
            )
        ),
    ] = RolloutStrategy.ON_POD_RESTART


class Monitoring(Model):
    """What is created for Prometheus."""

    pod_monitor: Annotated[
        PodMonitor, LIVE, Field(description="Auto: where the cluster knows PodMonitors.")
    ] = PodMonitor.AUTO
