"""KVTier as an offload connector of ATOM: the two classes that its factory creates.

ATOM ends the engine if a hook raises. So every hook runs behind a guard, which logs and counts the
exception and turns KVTier off for this engine. What ATOM still waits for goes on: one report per
load and per store. A configuration that is not served is refused with one log line, and the engine
serves without tiers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from kvtier.config.loader import load_for_engine
from kvtier.engines.atom.cache_engine_config import check_chunk, options_of
from kvtier.engines.atom.cache_engine_scheduler import CacheEngineScheduler
from kvtier.engines.atom.cache_engine_worker import CacheEngineWorker, identity_digest
from kvtier.engines.atom.config import engine_name, limits_of, planner_for, topology_directory
from kvtier.engines.atom.identity import AtomIdentityBuilder
from kvtier.engines.atom.lookup_connection import LookupConnection
from kvtier.engines.atom.metadata import AtomLoad, AtomSave, AtomStepMetadata
from kvtier.engines.atom.rank import RankIdentity
from kvtier.engines.atom.scheduler import AtomScheduler
from kvtier.engines.atom.sequence_state import AtomSequence
from kvtier.engines.atom.types import KVConnectorOutput, LoadOperationId
from kvtier.engines.atom.worker import AtomWorker, tensor_rank
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.errors import ConfigurationError, KVTierError
from kvtier.lookup.client import greeting
from kvtier.lookup.wire import SCHEDULER
from kvtier.tierd.supervisor import Supervisor

logger = logging.getLogger(__name__)
SUPERVISOR_SECONDS = 1.5
P = ParamSpec("P")
T = TypeVar("T")


class _Guard:
    """Keeps exceptions from ATOM. ``off_reason``: why KVTier is off; empty if it is on."""

    def __init__(self) -> None:
        self.off_reason = ""
        self.errors = 0

    def run(
        self, hook: str, fallback: T, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Returns the result of ``call``, or ``fallback`` if it raises."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self.errors += 1
            if not self.off_reason:
                self.off_reason = f"{hook}: {type(error).__name__}: {error}"
                logger.exception("KVTier: unexpected error in %s; serving without tiers", hook)
            return fallback

    def start(self, call: Callable[[], T]) -> T | None:
        """Returns what ``call`` builds; None, with one log line, if that is not possible."""
        try:
            return call()
        except KVTierError as error:
            self.off_reason = str(error)
            logger.warning("KVTier: serving without tiers: %s", self.off_reason)
        except Exception as error:  # a cache never stops an engine
            self.off_reason = f"{type(error).__name__}: {error}"
            logger.exception("KVTier: unexpected error while starting; serving without tiers")
        return None


class _Ledger:
    """What ATOM waits for, apart from the scheduler side, in case that one fails.

    ``broken``: the scheduler side no longer knows what has ended, and only this does.
    """

    def __init__(self) -> None:
        self.broken = False
        self._outstanding: set[object] = set()
        """Operations that the workers were given, and that not every rank has reported."""
        self._unreported: Counter[object] = Counter()
        """Ids of sequences whose loads ATOM was not told the end of."""
        self._deferred: set[Any] = set()
        """Ids of sequences whose blocks ATOM was told to keep."""

    def sent(self, metadata: AtomStepMetadata) -> None:
        for job in metadata.requests:
            if isinstance(job, AtomLoad | AtomSave):
                self._outstanding.add(job.operation)
            if isinstance(job, AtomLoad):
                self._unreported[job.operation.req_id] += 1

    def ended(self, output: KVConnectorOutput) -> None:
        """Takes what every rank has reported."""
        for operations in (output.finished_loading, output.failed_loading, output.finished_saving):
            self._outstanding.difference_update(operations)

    def reported(self, output: KVConnectorOutput) -> None:
        """Takes what ATOM was told."""
        for request_id in (*output.finished_loading, *output.failed_loading):
            self._unreported[request_id] -= 1
            if self._unreported[request_id] <= 0:
                del self._unreported[request_id]

    def deferred(self, seq: AtomSequence, kept: bool) -> bool:
        (self._deferred.add if kept else self._deferred.discard)(seq.id)
        return kept

    @property
    def pending(self) -> bool:
        """Whether a copy may still run, or ATOM must be told of something."""
        return bool(self._outstanding or self._unreported or self._deferred)

    @property
    def copying(self) -> bool:
        """Whether a copy may still access any block."""
        return bool(self._outstanding)

    def report(self, output: KVConnectorOutput) -> None:
        """Writes the ids that ATOM waits for, if it is broken: every load that has ended counts as
        failed, and blocks are free once the last copy has ended."""
        loads = (each for each in self._outstanding if isinstance(each, LoadOperationId))
        loading = {each.req_id for each in loads}
        output.finished_loading = set()
        output.failed_loading = {each for each in self._unreported if each not in loading}
        for request_id in output.failed_loading:
            del self._unreported[request_id]
        output.finished_saving = set() if self.copying else self._deferred
        if not self.copying:
            self._deferred = set()
        output.connector_completions = set()


class KVTierOffloadScheduler:
    """The scheduler side that ATOM's factory creates in the process of the engine core."""

    is_producer = False
    is_offload = True

    def __init__(self, config: Any) -> None:
        """``config``: ATOM's. Never raises."""
        self._guard = _Guard()
        self._ledger = _Ledger()
        self._supervisor: Supervisor | None = None
        self._scheduler = self._guard.start(lambda: self._build(config))

    def _build(self, config: Any) -> AtomScheduler:
        directory = topology_directory(config)
        topology = load_for_engine(Path(directory))
        if topology.structural.engine_type != "ATOM":
            raise ConfigurationError(
                "engine_type", topology.structural.engine_type, "must be ATOM for this engine"
            )
        planner = planner_for(config, topology.structural.chunk_tokens)
        engine = engine_name(config)
        identity = AtomIdentityBuilder(config, planner, topology.structural)
        session = TierdSession(topology, planner, engine, identity)
        scheduler = AtomScheduler(session, planner, limits_of(config))
        self._supervisor = Supervisor(Path(directory), topology)
        self._supervisor.ensure()
        scheduler.start()
        logger.info(
            "KVTier: configured engine %s with chunks of %d tokens and tiers %s",
            engine,
            planner.chunk_tokens,
            ", ".join(tier.name for tier in topology.structural.tiers),
        )
        return scheduler

    @property
    def off_reason(self) -> str:
        """Why nothing is loaded or stored; empty if KVTier is on."""
        return self._guard.off_reason

    def _run(self, fallback: T, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        hook = getattr(call, "__name__", "hook")
        was_off = bool(self._guard.off_reason)
        result = self._guard.run(hook, fallback, call, *args, **kwargs)
        if self._guard.off_reason and not was_off and self._scheduler is not None:
            self._scheduler.turn_off()
        return result

    def get_num_new_matched_tokens(self, seq: AtomSequence) -> tuple[int, bool]:
        scheduler = self._scheduler
        if scheduler is None or self.off_reason:
            return 0, False
        return self._run((0, False), scheduler.get_num_new_matched_tokens, seq)

    def update_state_after_alloc(self, seq: AtomSequence) -> None:
        if self._scheduler is not None:
            self._run(None, self._scheduler.update_state_after_alloc, seq)

    def should_park_for_load_after_alloc(self, seq: AtomSequence) -> bool:
        scheduler = self._scheduler
        if scheduler is None or self.off_reason:
            return False
        return self._run(False, scheduler.should_park_for_load_after_alloc, seq)

    def should_park_partial_prefill_for_load(self, seq: AtomSequence) -> bool:
        scheduler = self._scheduler
        if scheduler is None or self.off_reason:
            return False
        return self._run(False, scheduler.should_park_partial_prefill_for_load, seq)

    def adjust_prefill_chunk_after_alloc(self, seq: AtomSequence, chunk: int) -> int:
        scheduler = self._scheduler
        if scheduler is None or self.off_reason:
            return chunk
        return self._run(chunk, scheduler.adjust_prefill_chunk_after_alloc, seq, chunk)

    def build_connector_meta(self) -> AtomStepMetadata:
        scheduler = self._scheduler
        if scheduler is None:
            return AtomStepMetadata()
        metadata: AtomStepMetadata | None = None
        if not self.off_reason:
            metadata = self._run(None, scheduler.build_connector_meta)
            # It may have taken saves that are sent to no worker.
            self._ledger.broken |= metadata is None
        if metadata is None:
            # Sequences that were parked before may still cause a standstill, and ATOM waits for the
            # loads that were taken.
            self._run(None, scheduler.wake_holders)
            metadata = self._run(AtomStepMetadata(), scheduler.build_load_meta)
        self._ledger.sent(metadata)
        return metadata

    def process_completions(self, output: KVConnectorOutput) -> KVConnectorOutput:
        scheduler = self._scheduler
        if scheduler is None:
            return output
        ledger = self._ledger
        ledger.ended(output)
        if not ledger.broken:
            processed = self._run(None, scheduler.process_completions, output)
            if processed is not None:
                ledger.reported(processed)
                return processed
        waked = self._run(set(), scheduler.take_waked)
        if ledger.broken:
            # It learns what it can; what it returns may lack a sequence.
            copied = replace(
                output,
                finished_loading=set(output.finished_loading),
                failed_loading=set(output.failed_loading),
                finished_saving=set(output.finished_saving),
            )
            self._run(None, scheduler.process_completions, copied)
        ledger.broken = True
        ledger.report(output)
        output.finished_loading = waked - output.failed_loading
        return output

    def should_defer_free(self, seq: AtomSequence) -> bool:
        scheduler, ledger = self._scheduler, self._ledger
        if scheduler is None:
            return False
        kept: bool | None = None
        if not ledger.broken:
            kept = self._run(None, scheduler.should_defer_free, seq)
        if kept is None:
            # Whose copies still run is not known, so blocks are kept until none does.
            ledger.broken = True
            kept = ledger.copying
        return ledger.deferred(seq, kept)

    def request_finished(self, seq: AtomSequence) -> None:
        if self._scheduler is not None:
            self._run(None, self._scheduler.request_finished, seq)

    def has_pending_work(self) -> bool:
        scheduler = self._scheduler
        if scheduler is None:
            return False
        if self._ledger.broken:
            return self._ledger.pending
        return self._run(self._ledger.pending, scheduler.has_pending_work)

    def get_statistics(self) -> dict[str, int]:
        scheduler = self._scheduler
        found = {} if scheduler is None else self._run({}, scheduler.get_statistics)
        return {**found, "errors": self._guard.errors}

    def shutdown(self) -> None:
        """Detaches from tierd. ATOM does not call it; a session also ends with its process."""
        if self._scheduler is not None:
            self._run(None, self._scheduler.shutdown)
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            self._guard.run("shutdown", None, supervisor.stop, SUPERVISOR_SECONDS)


class KVTierOffloadConnector:
    """The worker side that ATOM's factory creates in the process of each rank."""

    is_producer = False
    is_offload = True

    def __init__(self, config: Any) -> None:
        """``config``: ATOM's. Never raises."""
        self._guard = _Guard()
        self._config = config
        self._worker = self._guard.start(lambda: self._build(config))
        self._unserved: list[Any] = []

    def _build(self, config: Any) -> AtomWorker | CacheEngineWorker:
        topology = load_for_engine(Path(topology_directory(config)))
        planner = planner_for(config, topology.structural.chunk_tokens)
        identity = RankIdentity(
            engine_name(config),
            tensor_rank(),
            int(config.kv_cache_block_size),
            planner.chunk_tokens,
            planner.shard_writers,
        )
        return AtomWorker(topology.structural, identity)

    @property
    def off_reason(self) -> str:
        """Why this rank copies nothing; empty if it does."""
        worker = self._worker
        return self._guard.off_reason or ("" if worker is None else worker.off_reason)

    def register_kv_caches(
        self,
        kv_caches: Mapping[object, object],
        transfer_tensors: object = None,
        num_blocks: int | None = None,
    ) -> None:
        worker = self._worker
        blocks = int(num_blocks or getattr(self._config, "num_kvcache_blocks", 0) or 0)
        if worker is not None:
            self._guard.run(
                "register_kv_caches", None, worker.register_kv_caches, kv_caches, blocks
            )

    def start_load_kv(self, metadata: object) -> None:
        worker = self._worker
        if worker is None:
            if isinstance(metadata, AtomStepMetadata):
                self._unserved.extend(metadata.requests)
            return
        self._guard.run("start_load_kv", None, worker.start_load_kv, metadata)

    def get_finished(self) -> KVConnectorOutput:
        worker = self._worker
        if worker is not None:
            return self._guard.run("get_finished", KVConnectorOutput(), worker.get_finished)
        return self._reject()

    def _reject(self) -> KVConnectorOutput:
        """Reports what another side has started although this one is off."""
        output = KVConnectorOutput()
        unserved, self._unserved = self._unserved, []
        for each in unserved:
            if isinstance(each, AtomLoad):
                output.failed_loading.add(each.operation)
            elif isinstance(each, AtomSave):
                output.finished_saving.add(each.operation)
        return output

    def get_finished_recv_blocks(self) -> list[int]:
        return []

    def shutdown(self) -> None:
        """Drains the copies and detaches from tierd."""
        if self._worker is not None:
            self._guard.run("shutdown", None, self._worker.shutdown)


class KVTierCacheEngineScheduler(KVTierOffloadScheduler):
    """The scheduler side of the CacheEngine path (``kvtier-lmcache``), which needs no tierd."""

    def _build(self, config: Any) -> AtomScheduler:
        options = options_of(config)
        topology = options.topology()
        planner = planner_for(config, options.file.chunk_tokens)
        check_chunk(planner, options)
        engine = engine_name(config)
        identity = AtomIdentityBuilder(config, planner, topology.structural)
        connection = LookupConnection(
            options.run_directory,
            greeting(SCHEDULER, engine, planner.ranks, 0, identity_digest(identity())),
            options.lookup_seconds,
        )
        session = TierdSession(topology, planner, engine, identity, connection.connect)
        scheduler = CacheEngineScheduler(
            connection, session, planner, limits_of(config), options.load_seconds
        )
        scheduler.start()
        logger.info(
            "KVTier: configured engine %s with chunks of %d tokens and LMCache's %s",
            engine,
            planner.chunk_tokens,
            options.file.path,
        )
        return scheduler


class KVTierCacheEngineConnector(KVTierOffloadConnector):
    """The worker side of the CacheEngine path (``kvtier-lmcache``)."""

    def _build(self, config: Any) -> CacheEngineWorker:
        options = options_of(config)
        planner = planner_for(config, options.file.chunk_tokens)
        check_chunk(planner, options)
        rank = RankIdentity(
            engine_name(config),
            tensor_rank(),
            int(config.kv_cache_block_size),
            planner.chunk_tokens,
        )
        identity = AtomIdentityBuilder(config, planner, options.topology().structural)
        return CacheEngineWorker(options, rank, planner.ranks, identity)
