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


AtomJob = AtomLoad | AtomSave | AtomCancel


@dataclass(slots=True)
class AtomStepMetadata:
    """The jobs of one engine step."""

    requests: list[AtomJob] = field(default_factory=list)
