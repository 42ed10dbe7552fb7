"""Messages between the scheduler side and the worker side, carried by vLLM.

``StepMetadata`` goes from the scheduler to the workers once per step. ``WorkerReport`` goes back
once per step and rank; vLLM aggregates it over ranks. vLLM pickles both between processes of one
version, in every step: what is as by default is left out, and jobs are packed (``jobs``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtier.engines.common.jobs import (
    ArrivedKeys,
    LoadJob,
    LoadResult,
    Packed,
    Reduced,
    StoreJob,
    pack_stores,
    unpack_stores,
)


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """The jobs of one engine step. ``step`` counts from 1."""

    step: int = 0
    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    idle: bool = False
    """Whether the step computes no token."""
    cancelled_loads: list[int] = field(default_factory=list)
    """Loads of aborted requests: submit no further copy, drain, and report."""
    arrived_keys: tuple[ArrivedKeys, ...] = ()
    """Keys of loads that began before all of them were in RAM."""
    identity: int = 0
    """The identity number. A worker that does not know it yet fails the loads and drops the stores
    of before, and takes the fingerprint of its weights."""
    report_weights: bool = False
    """Whether the report of this step shall contain the fingerprint."""
    assumed_weights: tuple[str, ...] = ()
    """The fingerprints by rank that ``loads`` belong to, while it is not known whether the engine
    still has these weights; empty if it is. A rank uses nothing of them before it knows."""
    voided_stores: tuple[int, ...] = ()
    """Stores whose source blocks are not referenced any longer: they are not delivered."""

    def __reduce__(self) -> Reduced:
        values = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        given = {name: value for name, value in values if value}
        stores = given.pop("stores", None)
        return _unpack_step, (given, pack_stores(stores) if stores else None)


def _unpack_step(given: dict[str, Any], stores: Packed | None) -> StepMetadata:
    return StepMetadata(**given, stores=[] if stores is None else unpack_stores(stores))


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What ended on one rank, or on several after aggregation, up to one step.

    ``step``: the step that was executed. ``stores_done``: reservation -> number of ranks that no
    longer read its blocks.
    """

    step: int = 0
    ranks: int = 1
    loads: list[LoadResult] = field(default_factory=list)
    stores_done: dict[int, int] = field(default_factory=dict)
    attached_epoch: int = 0
    """The tierd epoch that every rank is attached to; 0 if they differ: nothing is copied."""
    identity: int = 0
    """The identity number of ``weights``."""
    weights: tuple[tuple[int, str, str], ...] = ()
    """(rank, fingerprint of its weights, why that is unknown), where it was requested and is
    known."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Combines the reports of two ranks for the same step."""
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
            identity=min(self.identity, other.identity),
            weights=self.weights + other.weights if self.identity == other.identity else (),
        )
