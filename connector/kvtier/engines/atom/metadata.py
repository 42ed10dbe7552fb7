"""Jobs from the scheduler side to the worker side.

ATOM's idle loop sends metadata to the workers only if its ``requests`` are not empty, so every job
is in that list, cancellations included. ATOM pickles it between processes of one version.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.engines.atom.types import LoadOperationId, SaveOperationId
from kvtier.engines.common.jobs import LoadJob, StoreJob


@dataclass(frozen=True, slots=True)
class AtomLoad:
    """One load; the worker reports ``operation`` once."""

    operation: LoadOperationId
    job: LoadJob


@dataclass(frozen=True, slots=True)
class AtomSave:
    """One store; the worker reports ``operation`` once."""

    operation: SaveOperationId
    job: StoreJob


@dataclass(frozen=True, slots=True)
class AtomCancel:
    """A load whose sequence was aborted: submit no further copy, drain, and report."""

    load: int


@dataclass(frozen=True, slots=True)
class CacheLoad(AtomLoad):
    """A load through LMCache's engines: ``keys[i]`` and ``stores[i]`` belong to ``job.runs[i]``.

    ``job`` has no slots of a pool here. Fewer keys than runs: the load fails.
    """

    keys: tuple[bytes, ...] = ()
    stores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheSave(AtomSave):
    """A store through LMCache's engines. An empty ``key``: the store is dropped."""

    key: bytes = b""
    store: int = 0


AtomJob = AtomLoad | AtomSave | AtomCancel


@dataclass(slots=True)
class AtomStepMetadata:
    """The jobs of one engine step."""

    requests: list[AtomJob] = field(default_factory=list)
