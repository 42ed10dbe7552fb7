"""The topology document: what the operator (or ``kvtier render``) writes and the engine and tierd read.

A directory with two files. ``structural.json`` never changes in a pod's life and carries the live values of the time of
attaching; ``live.json`` is replaced in place while the engine serves, and may be absent.

Field names in the files are camelCase, as in the policy; units are in the names, sizes are plain bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

SCHEMA_VERSION: Final = 1
MAX_BYTES: Final = (1 << 63) - 1
"""Of a size, as in Kubernetes. Numbers have bounds here as in the policy: a larger one has no meaning, and none in the arithmetic of a clock."""


class Document(BaseModel):
    """Base of everything in the document: frozen, camelCase in files, unknown fields refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True
    )


class Selection(StrEnum):
    """How a plan is chosen among usable prefixes."""

    COST = "Cost"
    WEIGHTED = "Weighted"


class StorePolicy(StrEnum):
    """Which objects a lower tier is given: all, those seen a second time, none."""

    ALL = "All"
    REUSED = "Reused"
    NONE = "None"


class Daemon(StrEnum):
    """Where tierd runs: a container of its own, or started by the first engine process that finds none."""

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
    """None: as fast as it goes."""
    capacity_bytes: Annotated[int, Field(gt=0, le=MAX_BYTES)] | None = None
    high_watermark_percent: Annotated[int, Field(ge=2, le=100)] = 90
    low_watermark_percent: Annotated[int, Field(ge=1, le=99)] = 75
    retention_seconds: Annotated[int, Field(ge=0, le=315_360_000)] = 604_800
    sync_data: bool = False


class Breaker(Document):
    """When a tier is given up for a while, and for how long."""

    failure_threshold: Annotated[int, Field(ge=1, le=1000)] = 5
    period_seconds: Annotated[int, Field(ge=1, le=86_400)] = 60


class Live(Document):
    """Everything that may change under a running engine, tiers keyed by name."""

    generation: Annotated[int, Field(ge=0, le=MAX_BYTES)] = 0
    selection: Selection = Selection.COST
    min_load_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 512
    breaker: Breaker = Breaker()
    tiers: dict[str, LiveTier]


class MemoryTierDocument(Document):
    """The host pool. ``capacity_bytes`` is per pod."""

    kind: Literal["memory"] = "memory"
    name: str
    capacity_bytes: Annotated[int, Field(gt=0, le=MAX_BYTES)]
    eviction_policy: Literal["LRU", "ARC"] = "LRU"
    persistence: Literal["Process", "Pod"] = "Pod"


class FileSystemTierDocument(Document):
    """A directory as tierd sees it (``path``), whatever volume is behind it."""

    kind: Literal["fileSystem"] = "fileSystem"
    name: str
    path: str
    sharing: Literal["Pod", "Node", "Cluster"]
    direct_io: Literal["Auto", "Always", "Never"] = "Auto"
    read_threads: Annotated[int, Field(ge=1, le=256)] = 8
    write_threads: Annotated[int, Field(ge=1, le=256)] = 4


class LMCacheTierDocument(Document):
    """A storage backend of LMCache."""

    kind: Literal["lmcache"] = "lmcache"
    name: str
    url: str
    credentials_directory: str | None = None


TierDocument = Annotated[
    MemoryTierDocument | FileSystemTierDocument | LMCacheTierDocument, Field(discriminator="kind")
]


class PolicyIdentity(Document):
    """Which policy this came from."""

    namespace: str
    name: str
    uid: str = ""


class HttpEndpoint(Document):
    """Where tierd serves /metrics, /status and /healthz. Port 0: any free port, written to the run directory."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 9_400


class Isolation(Document):
    """What keeps objects apart beyond what the engine computes."""

    salt: str = ""
    model_revision: str = ""
    key_file: str | None = None


class Structural(Document):
    """Everything that needs a new pod to change."""

    schema_version: Literal[1] = SCHEMA_VERSION
    policy: PolicyIdentity
    content_hash: str
    engine_type: Literal["VLLM", "ATOM"] = "VLLM"
    daemon: Daemon = Daemon.ENGINE
    run_directory: str
    """Memory-backed directory that engine and tierd share: host pool, socket, locks."""
    chunk_tokens: Annotated[int, Field(gt=0)] = 256
    hash_seed: str = "0"
    local_ranks: Annotated[int, Field(ge=1)] | None = None
    tiers: Annotated[list[TierDocument], Field(min_length=1, max_length=8)]
    isolation: Isolation = Isolation()
    storage_gid: int | None = None
    http: HttpEndpoint = HttpEndpoint()
    live: Live


class Topology(Document):
    """Both documents as in force."""

    structural: Structural
    live: Live
