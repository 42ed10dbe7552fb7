"""KVTierPolicy: the public API."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from kvtier.topology.models import Daemon, Selection
from kvtier_operator.api.base import (
    LIVE,
    RFC1123_SUBDOMAIN,
    STRUCTURAL,
    Accepts,
    Integer,
    MapKey,
    Model,
    Name,
    NonNegativeQuantity,
    Rule,
    Scalar,
    Violation,
)
from kvtier_operator.api.quantity import Quantity
from kvtier_operator.api.selector import LabelSelector
from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.api.tiers import Tier

GROUP = "kvtier.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "KVTierPolicy"

MAX_POLICY_NAME = 63
"""So that the name fits a label value, and `/dev/shm/kvtier-<name>-<hash>/tierd.sock` the 107 bytes of a socket path."""


class EngineType(StrEnum):
    """The engine that the pods run."""

    VLLM = "VLLM"
    ATOM = "ATOM"


class Connector(StrEnum):
    """Whose configuration the engine is given."""

    KVTIER = "KVTier"
    OFFLOADING = "Offloading"
    LMCACHE = "LMCache"


class Delivery(StrEnum):
    """How the connector reaches the engine's image."""

    INIT_CONTAINER = "InitContainer"
    IMAGE = "Image"
    IMAGE_VOLUME = "ImageVolume"


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


HASH_SEED_WORDS = "a decimal number from 0 to 4294967295, in quotes"


def _hash_seed(seed: str) -> str:
    if not (seed.isascii() and seed.isdigit() and len(seed) <= 10 and int(seed) < 1 << 32):
        raise PydanticCustomError("hash_seed", "not a seed")
    return seed


class Engine(Model):
    """The engine and how the connector gets into it."""

    type: Annotated[EngineType, STRUCTURAL, Field(description="The engine.")] = EngineType.VLLM
    container_name: Annotated[
        Name | None,
        STRUCTURAL,
        Field(description="The engine's container; if not set, the only one with a GPU, else by command or image."),
    ] = None
    connector: Annotated[
        Connector, STRUCTURAL, Field(description="Whose configuration the engine is given.")
    ] = Connector.KVTIER
    delivery: Annotated[
        Delivery,
        STRUCTURAL,
        Field(description="How the connector reaches the engine's image: copied in by an init container, part of it, or an image volume."),
    ] = Delivery.INIT_CONTAINER
    python_path: Annotated[
        str,
        STRUCTURAL,
        Field(max_length=4096, description="What the image's own PYTHONPATH holds, if it has one: setting the variable in a pod replaces it."),
    ] = ""
    daemon: Annotated[
        Daemon,
        STRUCTURAL,
        Field(description="Where tierd runs: in a sidecar with the storage in its mounts, or started by the engine in its own container."),
    ] = Daemon.SIDECAR
    local_ranks: Annotated[
        Integer | None,
        STRUCTURAL,
        Field(ge=1, le=64, description="Worker ranks in a pod; if not set, from the engine's parallel sizes, else the GPU limit."),
    ] = None
    hash_seed: Annotated[
        str,
        STRUCTURAL,
        Field(max_length=10, pattern=r"^[0-9]+$", description="PYTHONHASHSEED, set where absent; another value in the pod is reported."),
        AfterValidator(_hash_seed),
        Accepts(HASH_SEED_WORDS),
        Scalar(
            cel="self.size() == 0 || int(self) <= 4294967295",
            message=f"accepted is {HASH_SEED_WORDS}",
            expression=f"self + ' is not accepted; accepted is {HASH_SEED_WORDS}'",
        ),
    ] = "0"


class Breaker(Model):
    """When a tier is given up for a while."""

    failure_threshold: Annotated[
        Integer, LIVE, Field(ge=1, le=1000, description="Failures in a row after which a tier is given up.")
    ] = 5
    period_seconds: Annotated[
        Integer, LIVE, Field(ge=1, le=86_400, description="How long until it is probed again.")
    ] = 60


class KeySecretReference(Model):
    """A Secret of the policy's namespace, or none."""

    name: Annotated[
        str,
        STRUCTURAL,
        Field(max_length=253, pattern=f"^$|{RFC1123_SUBDOMAIN}", description="Name of the Secret; empty: objects carry no keyed tag."),
        Accepts("empty, or the name of a Kubernetes object: lower-case letters, digits, - and ., at most 253"),
    ] = ""


class Isolation(Model):
    """What keeps objects apart beyond what the engine computes."""

    salt: Annotated[
        str, STRUCTURAL, Field(max_length=256, description="Part of every object's namespace: other salt, other objects.")
    ] = ""
    model_revision: Annotated[
        str,
        STRUCTURAL,
        Field(max_length=256, description="Part of every object's namespace, for models whose revision the engine cannot tell."),
    ] = ""
    key_secret_ref: Annotated[
        KeySecretReference, STRUCTURAL, Field(description="Secret that keys the tags of objects in shared directories.")
    ] = KeySecretReference()


class Security(Model):
    """Who may read what is stored."""

    storage_gid: Annotated[
        Integer, STRUCTURAL, Field(ge=1, le=2_147_483_647, description="Group of directories and files in file tiers.")
    ] = 3000


RESOURCE_WORDS = "cpu, ephemeral-storage and other resources but memory, which is computed from the memory tier"


def _not_memory(resources: dict[str, Quantity]) -> dict[str, Quantity]:
    if "memory" in resources:
        raise PydanticCustomError("resources", "memory is computed")
    return resources


Resources = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=253)], NonNegativeQuantity],
    Field(max_length=16),
    AfterValidator(_not_memory),
    Accepts(RESOURCE_WORDS),
    Scalar(cel="!('memory' in self)", message=f"memory is not accepted; accepted are {RESOURCE_WORDS}"),
]


_CPU_REQUEST = "(has(self.requests) ? ('cpu' in self.requests ? string(self.requests['cpu']) : '0') : '1')"
_CPU_LIMIT = "(has(self.limits) ? ('cpu' in self.limits ? string(self.limits['cpu']) : '8E') : '8')"


def _cpu_within_limit(resources: DaemonResources) -> Iterator[Violation]:
    request, limit = resources.requests.get("cpu"), resources.limits.get("cpu")
    if request is not None and limit is not None and request.value > limit.value:
        yield Violation(("requests", "cpu"), request.text, f"at most the limit ({limit})")


class DaemonResources(Model):
    """Resources of the sidecar. Its memory is computed from the memory tier and cannot be set."""

    requests: Annotated[Resources, STRUCTURAL, Field(description="What the sidecar asks for.")] = {"cpu": Quantity.parse("1")}
    limits: Annotated[Resources, STRUCTURAL, Field(description="What the sidecar may use.")] = {"cpu": Quantity.parse("8")}

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="cpu-within-limit",
            check=_cpu_within_limit,
            # The defaults stand here because structural ones are not in the schema.
            cel=f"!isQuantity({_CPU_REQUEST}) || !isQuantity({_CPU_LIMIT}) || "
            f"quantity({_CPU_REQUEST}).compareTo(quantity({_CPU_LIMIT})) <= 0",
            message="requests.cpu must be at most limits.cpu (8 if not set)",
            expression=f"{_CPU_REQUEST} + ' is not accepted; accepted is at most the limit (' + {_CPU_LIMIT} + ')'",
            field_path=".requests",
        ),
    )


class PodResources(Model):
    """Resources of what is added to a pod."""

    daemon: Annotated[DaemonResources, STRUCTURAL, Field(description="Of the sidecar; memory is computed.")] = DaemonResources()
    memory_policy: Annotated[
        MemoryPolicy,
        STRUCTURAL,
        Field(description="With daemon: Engine, whether the memory limit of the engine's container is checked, raised or left alone."),
    ] = MemoryPolicy.VALIDATE


class Attach(Model):
    """How pods get their tiers, and when that is given up."""

    mode: Annotated[
        AttachMode,
        STRUCTURAL,
        Field(description="Webhook patches pods. ConfigMapOnly injects nothing and writes <policy>-live and <policy>-structural for pods that people write."),
    ] = AttachMode.WEBHOOK
    start_timeout_seconds: Annotated[
        Integer,
        LIVE,
        Field(ge=10, le=3600, description="An engine not started by then, for a reason in an injected part, gets its next pod unchanged."),
    ] = 120
    retry_seconds: Annotated[
        Integer, LIVE, Field(ge=10, le=86_400, description="How long until attaching is tried again.")
    ] = 600


class Rollout(Model):
    """How a structural change reaches pods that run."""

    strategy: Annotated[
        RolloutStrategy,
        LIVE,
        Field(description="OnPodRestart waits for pods to be replaced; RestartWorkloads restarts one workload at a time."),
    ] = RolloutStrategy.ON_POD_RESTART


class Monitoring(Model):
    """What is created for Prometheus."""

    pod_monitor: Annotated[
        PodMonitor, LIVE, Field(description="Auto: where the cluster knows PodMonitors.")
    ] = PodMonitor.AUTO


def _first_is_memory(spec: PolicySpec) -> Iterator[Violation]:
    if spec.tiers[0].memory is None:
        first = spec.tiers[0]
        yield Violation(("tiers", 0), f"{first.name} ({', '.join(first.kinds)})", "a memory tier as the first")


def _one_memory_tier(spec: PolicySpec) -> Iterator[Violation]:
    memory = [index for index, tier in enumerate(spec.tiers) if tier.memory is not None]
    for index in memory[1:]:
        yield Violation(
            ("tiers", index), f"{spec.tiers[index].name} (memory)", f"one memory tier ({spec.tiers[memory[0]].name} is one)"
        )


def _unique_names(spec: PolicySpec) -> Iterator[Violation]:
    seen: dict[str, int] = {}
    for index, tier in enumerate(spec.tiers):
        if tier.name in seen:
            yield Violation(
                ("tiers", index, "name"), tier.name, f"a name that no other tier has (tiers[{seen[tier.name]}] has it)"
            )
        seen.setdefault(tier.name, index)


class PolicySpec(Model):
    """Which pods get which tiers."""

    pod_selector: Annotated[
        LabelSelector, STRUCTURAL, Field(description="Pods of the namespace that this policy governs.")
    ]
    engine: Annotated[
        Engine, STRUCTURAL, Field(description="The engine and how the connector gets into it.")
    ] = Engine()
    chunk_tokens: Annotated[
        Integer,
        STRUCTURAL,
        Field(ge=16, le=65_536, multiple_of=16, description="Tokens of a prompt that are stored and looked up together."),
        Accepts("a multiple of 16 from 16 to 65536"),
    ] = 256
    min_load_tokens: Annotated[
        Integer, LIVE, Field(ge=0, le=10_000_000, description="Hits shorter than this are recomputed.")
    ] = 512
    selection: Annotated[
        Selection,
        LIVE,
        Field(description="Cost loads what is expected to be ready first, and never what loses to recomputing. Weighted takes the most tokens x loadWeight."),
    ] = Selection.COST
    tiers: Annotated[
        list[Tier],
        STRUCTURAL,
        MapKey("name"),
        Field(min_length=1, max_length=8, description="Where KV may live, nearest first. The first tier, and only it, is memory."),
    ]
    breaker: Annotated[Breaker, LIVE, Field(description="When a tier is given up for a while.")] = Breaker()
    isolation: Annotated[
        Isolation, STRUCTURAL, Field(description="What keeps objects apart beyond what the engine computes.")
    ] = Isolation()
    security: Annotated[Security, STRUCTURAL, Field(description="Who may read what is stored.")] = Security()
    resources: Annotated[PodResources, STRUCTURAL, Field(description="Resources of what is added to a pod.")] = PodResources()
    attach: Annotated[
        Attach, STRUCTURAL, Field(description="How pods get their tiers, and when that is given up.")
    ] = Attach()
    rollout: Annotated[Rollout, LIVE, Field(description="How a structural change reaches pods that run.")] = Rollout()
    monitoring: Annotated[Monitoring, LIVE, Field(description="What is created for Prometheus.")] = Monitoring()

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="first-is-memory",
            check=_first_is_memory,
            cel="self.tiers.size() == 0 || has(self.tiers[0].memory)",
            message="the first tier must be a memory tier",
            expression="self.tiers[0].name + ' is not accepted as the first tier; accepted is a memory tier'",
            field_path=".tiers",
        ),
        Rule(
            name="one-memory-tier",
            check=_one_memory_tier,
            cel="self.tiers.filter(tier, has(tier.memory)).size() <= 1",
            message="there is one memory tier",
            expression="'%s is not accepted as a second memory tier; accepted is one'.format("
            "[self.tiers.filter(tier, has(tier.memory))[1].name])",
            field_path=".tiers",
        ),
        Rule(name="unique-names", check=_unique_names),
    )

    def tier(self, name: str) -> Tier:
        """The tier of that name. Raises ``KeyError``."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)


class Metadata(Model):
    """Kubernetes' own; only what KVTier reads has a type."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[
        str,
        Field(min_length=1, max_length=MAX_POLICY_NAME, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", description="Name of the policy."),
        Accepts(f"the name of a Kubernetes object of at most {MAX_POLICY_NAME} characters: lower-case letters, digits, - and ."),
    ]
    namespace: Annotated[Name | None, Field(description="Namespace of the policy and of the pods it governs.")] = None
    uid: str | None = None
    generation: int | None = None
    labels: Annotated[dict[str, str] | None, Field(description="Labels of the policy.")] = None
    annotations: Annotated[dict[str, str] | None, Field(description="Annotations of the policy.")] = None
    resource_version: str | None = None
    self_link: str | None = None
    generate_name: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    owner_references: list[Any] | None = None
    finalizers: list[str] | None = None
    managed_fields: list[Any] | None = None


class KVTierPolicy(Model):
    """Which tiers of KV cache the selected pods get besides GPU memory."""

    api_version: Annotated[Literal["kvtier.io/v1alpha1"], Field(description="kvtier.io/v1alpha1")]
    kind: Annotated[Literal["KVTierPolicy"], Field(description="KVTierPolicy")]
    metadata: Annotated[Metadata, Field(description="Name, namespace, labels and annotations.")]
    spec: Annotated[PolicySpec, Field(description="Which pods get which tiers.")]
    status: Annotated[PolicyStatus | None, Field(description="What the operator reports; not written by people.")] = None

    @property
    def namespace(self) -> str:
        """The policy's namespace; ``default`` where the document names none, as kubectl does."""
        return self.metadata.namespace or "default"
