"""KVTierPolicy: the public API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from kvtier.config import lmcache_url
from kvtier.config.models import Selection
from kvtier_operator.api.base import (
    LIVE,
    STRUCTURAL,
    Accepts,
    ErrorType,
    Integer,
    MapKey,
    Model,
    Name,
    Rule,
    Violation,
)
from kvtier_operator.api.engine import Connector, Engine
from kvtier_operator.api.file_tier import MountedVolume
from kvtier_operator.api.selector import LabelSelector
from kvtier_operator.api.settings import (
    Attach,
    Breaker,
    Hints,
    Isolation,
    Monitoring,
    PodResources,
    Rollout,
    Security,
    Tenants,
)
from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.api.tiers import LMCacheTierSpec, TierSpec

GROUP = "kvtier.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "KVTierPolicy"

MAX_POLICY_NAME = 63
"""So that the name fits a label value, and `/dev/shm/kvtier-<name>-<hash>/tierd.sock` the 107 bytes
of a socket path."""

CHUNK_TOKENS = 64
"""A conversation that comes back loses half a chunk on average. At 64 tokens an object of an 8B
model has 8 MiB, which disks and links move at their full rate."""
OTHER_CHUNK_TOKENS = 256
"""Of the connectors whose cost of an object is higher; LMCache's own default."""


def _first_is_memory(spec: PolicySpec) -> Iterator[Violation]:
    if spec.tiers[0].memory is None:
        yield Violation(("tiers", 0), spec.tiers[0].name, "must be a memory tier")


def _one_memory_tier(spec: PolicySpec) -> Iterator[Violation]:
    memory = [index for index, tier in enumerate(spec.tiers) if tier.memory is not None]
    for index in memory[1:]:
        first = spec.tiers[memory[0]].name
        detail = f"must not be a second memory tier (the first is {first})"
        yield Violation(("tiers", index), spec.tiers[index].name, detail)


def _unique_names(spec: PolicySpec) -> Iterator[Violation]:
    seen: set[str] = set()
    for index, tier in enumerate(spec.tiers):
        if tier.name in seen:
            yield Violation(("tiers", index, "name"), tier.name, "", ErrorType.DUPLICATE)
        seen.add(tier.name)


def _served_stores(spec: PolicySpec) -> Iterator[tuple[int, LMCacheTierSpec]]:
    """The lmcache tiers that tierd serves. With another connector, LMCache itself reads the URL."""
    if spec.engine.connector is Connector.KVTIER:
        for index, tier in enumerate(spec.tiers):
            if tier.lmcache is not None:
                yield index, tier.lmcache


def _store_url(spec: PolicySpec) -> Iterator[Violation]:
    for index, store in _served_stores(spec):
        must = lmcache_url.requirement(store.url, lmcache_url.REMOTE_SCHEMES)
        if must:
            shown = lmcache_url.printable(store.url)
            yield Violation(("tiers", index, "lmcache", "url"), shown, must)


def _store_credentials(spec: PolicySpec) -> Iterator[Violation]:
    for index, store in _served_stores(spec):
        reference = store.credentials_secret_ref
        if reference is not None and store.url.startswith("lm://"):
            path = ("tiers", index, "lmcache", "credentialsSecretRef")
            yield Violation(path, reference.name, _NO_CREDENTIALS)


_NO_CREDENTIALS = "must not be set: only redis:// and rediss:// have credentials"
_OTHER_CONNECTOR = (
    "has(self.engine) && has(self.engine.connector) && self.engine.connector != 'KVTier'"
)


class PolicySpec(Model):
    """Desired tiers, and the pods that get them."""

    pod_selector: Annotated[
        LabelSelector,
        STRUCTURAL,
        Field(description="Selects the pods of the namespace that the policy governs."),
    ]
    engine: Annotated[
        Engine,
        STRUCTURAL,
        Field(description=("The engine, and how the connector is delivered to it.")),
    ] = Engine()
    chunk_tokens: Annotated[
        Integer | None,
        STRUCTURAL,
        Field(
            ge=16,
            le=65_536,
            multiple_of=16,
            description=(
                "Number of tokens in a chunk, the unit of storage and lookup. If not set, 64, and "
                "256 with another connector than KVTier."
            ),
        ),
        Accepts("a multiple of 16 from 16 to 65536"),
    ] = None
    min_load_tokens: Annotated[
        Integer,
        LIVE,
        Field(
            ge=0,
            le=10_000_000,
            description=("Minimum number of tokens to load. Shorter hits are recomputed."),
        ),
    ] = 512
    min_store_tokens: Annotated[
        Integer,
        LIVE,
        Field(
            ge=0,
            le=10_000_000,
            description=(
                "Minimum number of tokens in a prompt to store. Nothing of a request with a "
                "shorter prompt is stored."
            ),
        ),
    ] = 0
    selection: Annotated[
        Selection,
        LIVE,
        Field(
            description=(
                "How a tier is selected for a load. Cost minimizes the estimated time to the first "
                "token, including recomputation. Weighted maximizes tokens x loadWeight."
            )
        ),
    ] = Selection.COST
    tiers: Annotated[
        list[TierSpec],
        STRUCTURAL,
        MapKey("name"),
        Field(
            min_length=1,
            max_length=8,
            description=(
                "Tiers, nearest first. The first tier, and only the first, must be memory."
            ),
        ),
    ]
    breaker: Annotated[Breaker, LIVE, Field(description="When a failing tier is suspended.")] = (
        Breaker()
    )
    hints: Annotated[Hints, LIVE, Field(description="What requests may ask for with hints.")] = (
        Hints()
    )
    tenants: Annotated[
        Tenants,
        LIVE,
        Field(description="Bounds what one tenant holds in the memory tier and in file tiers."),
    ] = Tenants()
    isolation: Annotated[
        Isolation,
        STRUCTURAL,
        Field(description="Isolation of objects, in addition to what the engine's hashes ensure."),
    ] = Isolation()
    security: Annotated[Security, STRUCTURAL, Field(description="Ownership of stored files.")] = (
        Security()
    )
    resources: Annotated[
        PodResources, STRUCTURAL, Field(description="Resources of injected containers.")
    ] = PodResources()
    attach: Annotated[
        Attach,
        STRUCTURAL,
        Field(description="How tiers are injected into pods, and when injection is suspended."),
    ] = Attach()
    rollout: Annotated[
        Rollout, LIVE, Field(description="How a structural change reaches running pods.")
    ] = Rollout()
    monitoring: Annotated[
        Monitoring, LIVE, Field(description="Objects created for Prometheus.")
    ] = Monitoring()

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="first-is-memory",
            check=_first_is_memory,
            cel="self.tiers.size() == 0 || has(self.tiers[0].memory)",
            message="the first tier must be a memory tier",
            expression="'the first tier must be a memory tier, got ' + self.tiers[0].name",
            field_path=".tiers",
        ),
        Rule(
            name="one-memory-tier",
            check=_one_memory_tier,
            cel="self.tiers.filter(tier, has(tier.memory)).size() <= 1",
            message="must have one memory tier",
            expression="'must have one memory tier, got %s as well'.format("
            "[self.tiers.filter(tier, has(tier.memory))[1].name])",
            field_path=".tiers",
        ),
        Rule(name="unique-names", check=_unique_names),
        Rule(
            name="store-url",
            check=_store_url,
            cel=f"({_OTHER_CONNECTOR}) || self.tiers.all(tier, !has(tier.lmcache) "
            f"|| tier.lmcache.url.matches('{lmcache_url.REMOTE_PATTERN}'))",
            message="lmcache.url must be a redis://, rediss:// or lm:// URL without a password",
            field_path=".tiers",
        ),
        Rule(
            name="store-credentials",
            check=_store_credentials,
            cel=f"({_OTHER_CONNECTOR}) || self.tiers.all(tier, !has(tier.lmcache) "
            "|| !has(tier.lmcache.credentialsSecretRef) || !tier.lmcache.url.startsWith('lm:'))",
            message=f"lmcache.credentialsSecretRef {_NO_CREDENTIALS}",
            field_path=".tiers",
        ),
    )

    @property
    def tokens_per_chunk(self) -> int:
        """``chunkTokens``, or what it is if it is not set."""
        if self.chunk_tokens is not None:
            return self.chunk_tokens
        ours = self.engine.connector is Connector.KVTIER
        return CHUNK_TOKENS if ours else OTHER_CHUNK_TOKENS

    def volume(self, key: str) -> MountedVolume:
        """The volume of a file tier with that key. Raises ``KeyError``."""
        for each in self.tier(key.split("/", 1)[0]).volumes:
            if each.key == key:
                return each
        raise KeyError(key)

    def tier(self, name: str) -> TierSpec:
        """The tier of that name. Raises ``KeyError``."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)


class Metadata(Model):
    """Metadata of Kubernetes; only the fields that KVTier reads have a type."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[
        str,
        Field(
            min_length=1,
            max_length=MAX_POLICY_NAME,
            pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
            description="Name of the policy.",
        ),
        Accepts(
            f"the name of a Kubernetes object of at most {MAX_POLICY_NAME} characters: lower-case "
            "letters, "
            f"digits, - and ."
        ),
    ]
    namespace: Annotated[
        Name | None, Field(description="Namespace of the policy and of the pods it governs.")
    ] = None
    uid: str | None = None
    generation: int | None = None
    labels: Annotated[dict[str, str] | None, Field(description="Labels of the policy.")] = None
    annotations: Annotated[
        dict[str, str] | None, Field(description="Annotations of the policy.")
    ] = None
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
    """KVTierPolicy configures the KV cache tiers of the selected pods, in addition to GPU
    memory."""

    api_version: Annotated[Literal["kvtier.io/v1alpha1"], Field(description="kvtier.io/v1alpha1")]
    kind: Annotated[Literal["KVTierPolicy"], Field(description="KVTierPolicy")]
    metadata: Annotated[Metadata, Field(description="Name, namespace, labels and annotations.")]
    spec: Annotated[PolicySpec, Field(description="Desired tiers, and the pods that get them.")]
    status: Annotated[
        PolicyStatus | None, Field(description="Observed state, written by the operator.")
    ] = None

    @property
    def namespace(self) -> str:
        """The policy's namespace; ``default`` if the document has none, as in kubectl."""
        return self.metadata.namespace or "default"

    @property
    def uid(self) -> str | None:
        """``metadata.uid``; None for a policy that is not in the cluster."""
        return self.metadata.uid

    @property
    def creation_timestamp(self) -> str | None:
        """``metadata.creationTimestamp``; None for a policy that is not in the cluster."""
        return self.metadata.creation_timestamp

    @property
    def deletion_timestamp(self) -> str | None:
        """``metadata.deletionTimestamp``; set if the policy is being deleted."""
        return self.metadata.deletion_timestamp

    @property
    def pod_selector(self) -> LabelSelector:
        """``spec.podSelector``."""
        return self.spec.pod_selector
