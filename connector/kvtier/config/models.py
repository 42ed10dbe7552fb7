"""The topology document: what the operator (or ``kvtier render``) writes and the engine and tierd
read.

A directory with two files. ``structural.json`` never changes in the life of a pod and contains the
live values at the time of injection. ``live.json`` is replaced while the engine serves, and may be
absent.

Field names in the files are camelCase, as in the policy. Units are in the names; sizes are plain
bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

SCHEMA_VERSION: Final = 1
MAX_BYTES: Final = (1 << 63) - 1
"""Maximum of a size, as in Kubernetes. Other numbers have the bounds of the policy."""


class Document(BaseModel):
    """Base of all parts: frozen, camelCase in files, unknown fields are invalid."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True
    )


class Selection(StrEnum):
    """How a load is chosen among the usable prefixes."""

    COST = "Cost"
    WEIGHTED = "Weighted"


class StorePolicy(StrEnum):
    """Which objects are written to a secondary tier: all, those used a second time, none."""

    ALL = "All"
    REUSED = "Reused"
    NONE = "None"


class Daemon(StrEnum):
    """Where tierd runs: in a sidecar container, or started by an engine process."""

    SIDECAR = "Sidecar"
    ENGINE = "Engine"


class LiveTier(Document):
    """Live values of one tier."""

    load_weight: Annotated[int, Field(ge=1, le=10_000)] = 100
    lookup_timeout_milliseconds: Annotated[int, Field(ge=1, le=10_000)] = 50
    load_timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 5
    store_policy: StorePolicy = StorePolicy.ALL
    max_pending_store_bytes: Annotated[int, Field(ge=0, le=MAX_BYTES)] = 1 << 30
    max_write_bytes_per_second: Annotated[int, Field(gt=0, le=MAX_BYTES)] | None = None
    """None: unlimited."""
    capacity_bytes: Annotated[int, Field(gt=0, le=MAX_BYTES)] | None = None
    high_watermark_percent: Annotated[int, Field(ge=2, le=100)] = 90
    low_watermark_percent: Annotated[int, Field(ge=1, le=99)] = 75
    retention_seconds: Annotated[int, Field(ge=0, le=315_360_000)] = 604_800
    sync_data: bool = False
    min_free_bytes: Annotated[int, Field(ge=0, le=MAX_BYTES)] = 0
    min_free_percent: Annotated[int, Field(ge=0, le=99)] = 0
    """What stays free on the file system of a fileSystem tier: the larger of both."""
    volume_capacity_bytes: dict[str, Annotated[int, Field(gt=0, le=MAX_BYTES)]] = Field(
        default_factory=dict, max_length=64
    )
    """By volume, of a tier that has several. ``capacity_bytes`` is their sum."""


class BreakerSettings(Document):
    """When a tier's circuit breaker opens, and for how long."""

    failure_threshold: Annotated[int, Field(ge=1, le=1000)] = 5
    period_seconds: Annotated[int, Field(ge=1, le=86_400)] = 60


class TenantKind(StrEnum):
    """What makes requests belong to one tenant: their ``cache_salt``, or the policy."""

    CACHE_SALT = "CacheSalt"
    POLICY = "Policy"


class TenantSettings(Document):
    """Tenants, and the share of each tier's capacity that one of them may hold. 100: no limit."""

    by: TenantKind = TenantKind.CACHE_SALT
    max_percent: Annotated[int, Field(ge=1, le=100)] = 100


class Honour(StrEnum):
    """Whether hints of requests have an effect."""

    ENABLED = "Enabled"
    DISABLED = "Disabled"


class HintSettings(Document):
    """What requests may ask for. ``max_pinned_percent``: of the memory tier, and of one tenant's
    share of it. ``default_retain_seconds``: for requests that do not say; 0: not retained."""

    honour: Honour = Honour.ENABLED
    max_pinned_percent: Annotated[int, Field(ge=0, le=80)] = 20
    default_retain_seconds: Annotated[int, Field(ge=0, le=604_800)] = 0


class Live(Document):
    """The settings that may change while the engine runs. ``tiers`` is keyed by tier name."""

    generation: Annotated[int, Field(ge=0, le=MAX_BYTES)] = 0
    selection: Selection = Selection.COST
    min_load_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 512
    min_store_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    breaker: BreakerSettings = BreakerSettings()
    tenants: TenantSettings = TenantSettings()
    hints: HintSettings = HintSettings()
    tiers: dict[str, LiveTier]


class MemoryTierDocument(Document):
    """The host pool. ``capacity_bytes`` is per pod."""

    kind: Literal["memory"] = "memory"
    name: str
    capacity_bytes: Annotated[int, Field(gt=0, le=MAX_BYTES)]
    eviction_policy: Literal["LRU", "ARC"] = "LRU"
    persistence: Literal["Process", "Pod"] = "Pod"


class TierVolumeDocument(Document):
    """One of several directories of a tier, usually each on a disk of its own."""

    name: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    path: str


class FileSystemTierDocument(Document):
    """A directory at ``path`` in tierd's file system, from any kind of volume; or ``volumes``, with
    a directory each. ``read_threads`` and ``write_threads`` are for each volume."""

    kind: Literal["fileSystem"] = "fileSystem"
    name: str
    path: str = ""
    volumes: Annotated[tuple[TierVolumeDocument, ...], Field(max_length=16)] = ()
    sharing: Literal["Pod", "Node", "Cluster"]
    direct_io: Literal["Auto", "Always", "Never"] = "Auto"
    read_threads: Annotated[int, Field(ge=1, le=256)] = 8
    write_threads: Annotated[int, Field(ge=1, le=256)] = 4

    @property
    def directories(self) -> tuple[TierVolumeDocument, ...]:
        """The directory of each volume; of a tier without volumes, one whose name is empty."""
        return self.volumes or (TierVolumeDocument.model_construct(name="", path=self.path),)


class LMCacheTierDocument(Document):
    """A storage backend of LMCache."""

    kind: Literal["lmcache"] = "lmcache"
    name: str
    url: str
    credentials_directory: str | None = None
    read_threads: ClassVar[int] = 4
    write_threads: ClassVar[int] = 2


TierDocument = Annotated[
    MemoryTierDocument | FileSystemTierDocument | LMCacheTierDocument, Field(discriminator="kind")
]


class PolicyIdentity(Document):
    """The policy that the document was rendered from."""

    namespace: str
    name: str
    uid: str = ""


class HttpEndpoint(Document):
    """Where tierd serves /metrics, /status and /healthz. Port 0: in a pod with ``hostNetwork`` one
    that is derived from its uid (``config/host_ports.py``), elsewhere any free port. http.json of
    the run directory has the port."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 9_400


class Encryption(StrEnum):
    """How new objects in file tiers are encrypted."""

    NONE = "None"
    AES256GCM = "AES256GCM"


class IsolationSettings(Document):
    """Separates namespaces beyond the engine's identity, and seals objects in file tiers.

    ``key_directory``: a mounted Secret, with one file per key (tiers/isolation_keys.py). None:
    objects have no tag. ``encryption`` requires it.
    """

    salt: str = ""
    model_revision: str = ""
    key_directory: str | None = None
    encryption: Encryption = Encryption.NONE


class Structural(Document):
    """The settings that can change only with a new pod."""

    schema_version: Literal[1] = SCHEMA_VERSION
    policy: PolicyIdentity
    content_hash: str
    engine_type: Literal["VLLM", "ATOM"] = "VLLM"
    daemon: Daemon = Daemon.ENGINE
    run_directory: str
    """Memory-backed directory shared by engine and tierd: host pool, socket, locks."""
    chunk_tokens: Annotated[int, Field(gt=0)] = 256
    hash_seed: str = "0"
    local_ranks: Annotated[int, Field(ge=1)] | None = None
    tiers: Annotated[list[TierDocument], Field(min_length=1, max_length=8)]
    isolation: IsolationSettings = IsolationSettings()
    storage_gid: int | None = None
    http: HttpEndpoint = HttpEndpoint()
    live: Live


class Topology(Document):
    """The structural document and the live settings in effect."""

    structural: Structural
    live: Live
