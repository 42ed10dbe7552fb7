"""What the scheduler side and the worker side of the vLLM connector tell each other through vLLM's own channels.

Scheduler to worker: ``StepMetadata``, once per engine step. Worker to scheduler: ``WorkerReport``, once per step and rank,
aggregated over ranks by vLLM. Both are pickled by vLLM between processes of one version.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Part of one object and where it lies on the GPU: ``blocks`` are consecutive engine blocks of the object of ``group``,
    the first of which is the object's block number ``first`` (0 unless an HBM hit ends inside the chunk)."""

    group: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill GPU blocks from slots that tierd announces under ``load``.

    ``runs[i]`` belongs to the i-th key of the load. ``limit_seconds``: how long the worker may wait for the announcement
    and go on submitting copies, from when it gets this job.
    """

    load: int
    request_id: str
    runs: tuple[BlockRun, ...]
    limit_seconds: float


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Copy a whole chunk from GPU blocks into ``slot`` (byte offset in the pool), then deliver ``reservation``.

    ``epoch``: the tierd epoch that granted the slot; a worker attached to another one drops the job.
    """

    reservation: int
    slot: int
    epoch: int
    run: BlockRun


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """One engine step. ``step`` counts from 1."""

    step: int = 0
    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    cancelled_loads: list[int] = field(default_factory=list)
    """Loads whose request was aborted: issue no further copy, drain, report."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The end of one load on one rank: the first ``keys_loaded`` keys are in GPU memory, ``tiers[i]`` says where key i came from."""

    load: int
    request_id: str
    keys_loaded: int
    tiers: tuple[int, ...]
    reason: str = ""
    seconds: float = 0.0
    copied_bytes: int = 0


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What one step brought. ``step``: the step this rank has executed. ``stores_done``: reservation -> ranks that are done with it."""

    step: int = 0
    ranks: int = 1
    loads: list[LoadResult] = field(default_factory=list)
    stores_done: dict[int, int] = field(default_factory=dict)
    attached_epoch: int = 0
    """tierd epoch that every rank is attached to, 0 if one is not: nothing is loaded or stored then."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Joins the reports of two ranks for the same step."""
        if not isinstance(other, WorkerReport):
            return self
        done = dict(self.stores_done)
        for reservation, count in other.stores_done.items():
            done[reservation] = done.get(reservation, 0) + count
        return WorkerReport(
            step=min(self.step, other.step),
            ranks=self.ranks + other.ranks,
            loads=self.loads + other.loads,
            stores_done=done,
            attached_epoch=self.attached_epoch
            if self.attached_epoch == other.attached_epoch
            else 0,
        )
