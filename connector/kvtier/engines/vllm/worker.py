"""The worker side of the vLLM connector: one object per rank, called by the engine's thread.

The hooks submit copies and take what has ended. Nothing here blocks, except that a step that
computes nothing waits at most ``IDLE_WAIT_SECONDS`` for what a load needs before it can be
reported. The order within a step:

    handle_preemptions, [forward pass], start_load_kv, wait_for_save,
    get_transfer_results or get_finished, get_block_ids_with_load_errors,
    get_kv_connector_stats, build_connector_worker_meta

vLLM 0.24 calls ``start_load_kv`` before the forward pass, and skips ``wait_for_save`` in steps
without one; 0.32 always calls both after it. So the stores of a step are submitted by whichever of
``wait_for_save`` and ``get_finished`` comes first, behind the step's kernels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvtier.config.models import Daemon, Structural
from kvtier.engines.common.worker_pool import HostPoolMapper
from kvtier.engines.common.worker_reports import OwedReports, no_open_jobs
from kvtier.engines.common.worker_state import (
    CompletionQueue,
    Counters,
    RankContext,
    RankShards,
    SlotGenerations,
    WorkerClientFactory,
    connect_worker,
)
from kvtier.engines.common.worker_thread import TransferThread
from kvtier.engines.vllm import early_pool, weights
from kvtier.engines.vllm.config import engine_name
from kvtier.engines.vllm.metadata import StepMetadata, WorkerReport
from kvtier.errors import KVTierError
from kvtier.planner import Planner
from kvtier.processes import own_identity
from kvtier.store.pool_layout import expected_span
from kvtier.tierd.liveness import hold_peer_lock
from kvtier.tierd.wire import PROTOCOL, Hello
from kvtier.transfer.calibration import SCRATCH_BYTES, calibrate
from kvtier.transfer.codec import Codec, build_codec
from kvtier.transfer.engine import CopyEngine
from kvtier.transfer.factory import cache_device, make_engine, register_pool, unregister_pool
from kvtier.transfer.startup_check import pageable_scratch, pinned_scratch, verify_round_trip

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)
SHUTDOWN_SECONDS = 2.0
MAX_LOGGED_KINDS = 16
"""Kinds of unexpected errors of a step that are logged, each once."""
EARLY_BYTES = 512 << 20
"""An engine that computes nothing may resume a request while so much of its load is being copied,
about 10 ms at 50 GB/s: launching the kernels of its step takes as long. A request that arrives in
this time waits for the copies too."""
IDLE_WAIT_SECONDS = 0.003
"""How long a step that computes nothing may wait until a load can be reported. Another such step
takes 1 to 2 ms, and with asynchronous scheduling vLLM reads its report two steps later. An H200
reads 8 GB of weights in this time."""
IDLE_POLL_SECONDS = 0.0001
CopyEngineFactory = Callable[[Mapping[str, object], Codec], CopyEngine]


class KVTierConnectorWorker:
    """The worker side of one rank. Hook methods have the names of vLLM's hooks.

    ``planner``: the same as the scheduler side's.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structural: Structural,
        planner: Planner,
        *,
        client: WorkerClientFactory | None = None,
        copy_engine: CopyEngineFactory = make_engine,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._run_directory = Path(structural.run_directory)
        self._planner = planner
        self._chunk_tokens = planner.chunk_tokens
        private = structural.daemon is Daemon.ENGINE
        self._make_client = client or partial(connect_worker, private=private)
        self._make_engine = copy_engine
        self._rank = int(getattr(vllm_config.parallel_config, "rank", 0))
        self._counters = Counters()
        self._completions = CompletionQueue(planner.prefix_only)
        self._owed = OwedReports(self._completions, self._counters)
        self._thread: TransferThread | None = None
        self._open_jobs = no_open_jobs
        """Of the last thread, also after it was closed: its copies may still run."""
        self._codec: Codec | None = None
        self._weights = weights.WeightsFingerprint("", "no fingerprint was taken")
        self._identity = 0
        self._fingerprint_due = False
        self._pending_weights: weights.PendingFingerprint | None = None
        """The fingerprint at ``_identity`` while the device computes it."""
        self._started_metadata: StepMetadata | None = None
        self._off_reason = "no KV cache is registered"
        self._metadata: StepMetadata | None = None
        self._stores_submitted: StepMetadata | None = None
        self._reported_counts: dict[str, int] = {}
        self._logged_kinds: set[str] = set()

    @property
    def off_reason(self) -> str:
        """Why this rank copies nothing; empty if it does."""
        return self._off_reason or (self._thread.failure if self._thread is not None else "")

    @property
    def codec(self) -> Codec | None:
        """The byte layout, once the caches are registered and verified."""
        return self._codec

    def register_kv_caches(self, kv_caches: Mapping[str, object]) -> None:
        """Derives the layout, verifies it by a round trip, and attaches to tierd in the background.

        ``kv_caches``: layer name to tensor. Any failure turns KVTier off for this rank, with one
        log line.
        """
        if self._thread is not None:
            self._turn_off("KV caches were registered a second time")
            return
        try:
            self._start(kv_caches)
        except KVTierError as error:
            self._turn_off(str(error))
        except Exception as error:  # a cache never stops an engine
            logger.exception("KVTier: unexpected error while starting")
            self._turn_off(f"{type(error).__name__}: {error}")

    def _start(self, kv_caches: Mapping[str, object]) -> None:
        if not self._planner.prefix_only and not reports_failed_requests():
            raise KVTierError(
                "this vLLM cannot recompute failed loads of models with several KV cache groups: "
                "use vLLM 0.32, or --disable-hybrid-kv-cache-manager if the model has attention "
                "only"
            )
        codec, device = self._build_codec(kv_caches)
        engine = self._make_engine(kv_caches, codec)
        scratch = pageable_scratch if device.type == "cpu" else pinned_scratch
        verify_round_trip(kv_caches, codec, engine, scratch)
        if not engine.synchronous:
            rates = calibrate(engine, scratch(SCRATCH_BYTES))
            logger.info(
                "KVTier: measured copy rates in GB/s: %s",
                ", ".join(f"{way} {rate / 1e9:.1f}" for way, rate in rates.items()),
            )
        self._codec = codec
        self._weights = weights.take(self._vllm_config)
        logger.info(
            "KVTier: rank %d hashed %d MB of weights in %.2f s, and others in %.2f s while loading",
            self._rank,
            self._weights.hashed_bytes // 1_000_000,
            self._weights.seconds,
            weights.capture_seconds(),
        )
        if self._weights.reason:
            logger.warning(
                "KVTier: objects stay in the memory tier for the lifetime of this engine: rank %d: "
                "%s",
                self._rank,
                self._weights.reason,
            )
        shards = RankShards(codec.shard_bytes)
        self._thread = TransferThread(
            RankContext(
                engine,
                shards,
                self._completions,
                self._counters,
                time.monotonic,
                SlotGenerations(),
                max(0, self._planner.counted_group),
            ),
            partial(self._make_client, self._run_directory, self._hello),
            HostPoolMapper(
                lambda pool, cancelled: register_pool(pool, device, cancelled),
                unregister_pool,
                early_pool.take(),
                self._expected_span,
            ),
        )
        self._open_jobs = self._thread.open_jobs
        self._off_reason = ""
        weights.watch_sleep(self._vllm_config, self.suspend_copies, self.resume_copies)
        self._thread.start()
        logger.info(
            "KVTier: rank %d uses chunks of %d tokens, the %s copy engine and shards of %s bytes",
            self._rank,
            self._chunk_tokens,
            engine.kind,
            ", ".join(str(size) for size in codec.shard_bytes),
        )

    def _expected_span(self, pool_bytes: int) -> tuple[int, int]:
        return expected_span(pool_bytes, self._planner.shard_writers, self._rank)

    def _build_codec(self, kv_caches: Mapping[str, object]) -> tuple[Codec, torch.device]:
        config, chunk = self._kv_cache_config, self._chunk_tokens
        layers = [name for group in config.kv_cache_groups for name in group.layer_names]
        backends = layer_backends(self._vllm_config, layers)
        blocks = self._planner.all_object_blocks
        codec = build_codec(kv_caches, config, chunk, backends, blocks)
        device = cache_device(kv_caches, codec)
        if device.type == "cpu":
            backends = {name: f"{backends[name]} {cpu_capability()}".strip() for name in layers}
            codec = build_codec(kv_caches, config, chunk, backends, blocks)
        return codec, device

    def _hello(self) -> Hello:
        codec, thread, process = self._codec, self._thread, own_identity()
        return Hello(
            protocol=PROTOCOL,
            role="worker",
            engine=engine_name(self._vllm_config),
            rank=self._rank,
            pid=process.pid,
            pid_namespace=process.pid_namespace,
            process_start=process.start,
            drained_epoch=thread.drained_epoch if thread is not None else 0,
            codec=codec.text if codec is not None else "",
            weights=self._weights.text,
            ephemeral_reason=self._weights.reason,
            shard_bytes=codec.shard_bytes if codec is not None else (),
            lock=hold_peer_lock(self._run_directory),
        )

    def begin_step(self, metadata: object) -> None:
        """Before the step's kernels: drops stores whose blocks the kernels may overwrite, and
        begins to take the fingerprint of the weights if they may have changed.

        vLLM runs updates of weights on the same thread, so none is in progress, and one that comes
        before the fingerprint is known raises the number again. Loads of the step are submitted
        first. Idempotent.
        """
        if not isinstance(metadata, StepMetadata) or metadata is self._started_metadata:
            return
        self._started_metadata = metadata
        changed = metadata.identity > self._identity
        try:
            if self._thread is not None:
                self._thread.order_kernels()
                if changed or metadata.voided_stores:
                    self._thread.void_stores(None if changed else metadata.voided_stores)
        except Exception as error:
            # The kernels come next, so that no copy may run, and no store be delivered.
            logger.exception("KVTier: unexpected error before a step")
            self._turn_off(f"{type(error).__name__}: {error}")
        if not changed:
            return
        self._pending_weights, self._fingerprint_due = None, True
        self._identity = metadata.identity
        if not metadata.loads:
            self._begin_fingerprint()

    def _begin_fingerprint(self) -> None:
        if not self._fingerprint_due:
            return
        try:
            self._pending_weights = weights.begin(self._vllm_config)
        except Exception as error:  # the fingerprint of before must not be taken for this one
            self._counters.add("step_errors")
            logger.exception("KVTier: cannot take the fingerprint of the weights")
            unknown = weights.WeightsFingerprint("", f"{type(error).__name__}: {error}")
            self._pending_weights = weights.PendingFingerprint(unknown)
        self._fingerprint_due = False

    def _take_fingerprint(self) -> None:
        """Takes the fingerprint if the device has computed it."""
        self._begin_fingerprint()
        pending = self._pending_weights
        if pending is None or not pending.done:
            return
        fingerprint = pending.result()
        if self._thread is not None:
            # Loads may wait for it.
            self._thread.weights_known(fingerprint.text)
        self._weights, self._pending_weights = fingerprint, None
        self._counters.add("weights_hashed")
        logger.info(
            "KVTier: rank %d hashed %d MB of weights in %.2f s, because they may have changed%s",
            self._rank,
            self._weights.hashed_bytes // 1_000_000,
            self._weights.seconds,
            f": {self._weights.reason}" if self._weights.reason else "",
        )

    def suspend_copies(self) -> None:
        """Ends all copies before the memory of the KV cache is released. Blocks until none runs,
        and until the weights, whose memory may be released too, are not read."""
        if self._pending_weights is not None:
            self._pending_weights.result()
        if self._thread is not None:
            self._thread.suspend()

    def resume_copies(self) -> None:
        """The memory of the KV cache is there again, at the same addresses."""
        if self._thread is not None:
            self._thread.resume()

    def start_load_kv(self, metadata: object) -> None:
        """Submits the loads of a step, and ends those that are cancelled."""
        if not isinstance(metadata, StepMetadata):
            return
        self.enter_jobs(metadata)
        if not metadata.loads and not metadata.cancelled_loads and not metadata.arrived_keys:
            return
        fence = self._fence() if metadata.loads else None
        if self._thread is None:
            self._completions.reject_loads(metadata.loads, "off")
            return
        assumed = metadata.assumed_weights
        known = self._rank < len(assumed)
        self._thread.submit_loads(
            tuple(metadata.loads),
            tuple(metadata.cancelled_loads),
            fence,
            assumed[self._rank] if known else "unknown rank" if assumed else "",
            metadata.arrived_keys,
        )
        self._begin_fingerprint()

    def enter_jobs(self, metadata: object) -> None:
        """Enters the jobs of a step, each of which is reported from now on, whatever fails.

        Idempotent; ``start_load_kv`` begins with it.
        """
        if isinstance(metadata, StepMetadata) and metadata is not self._metadata:
            self._owed.enter(metadata.loads, metadata.stores)
            self._metadata = metadata

    def wait_for_save(self) -> None:
        """Submits the stores of a step. Despite vLLM's name it does not wait."""
        metadata = self._metadata
        if metadata is None or metadata is self._stores_submitted:
            return
        self._stores_submitted = metadata
        if not metadata.stores:
            return
        fence = self._fence()
        if self._thread is None:
            self._completions.add_stores(job.reservation for job in metadata.stores)
            return
        self._thread.submit_stores(tuple(metadata.stores), fence)

    def _fence(self) -> object | None:
        """Marks the end of the launched kernels. No copy may start without it, so a failure turns
        KVTier off."""
        if self._thread is None:
            return None
        try:
            return self._thread.fence()
        except Exception as error:  # noqa: BLE001 - it is logged
            self._turn_off(f"cannot record a fence on the compute stream: {error}")
            return None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Takes what has ended since the last step: (None, ids of requests whose load ended)."""
        self._guarded(self.wait_for_save)
        self._guarded(self._take_fingerprint)
        self._guarded(self._poll)
        lost = self._owed.fail_lost(self._open_jobs)
        if lost and self._thread is not None:
            self._guarded(partial(self._thread.abort_lost_stores, lost))
        completed = self._owed.take()
        self._owed.hand_over()
        return None, completed.recving or None

    def _poll(self) -> None:
        thread, metadata = self._thread, self._metadata
        if thread is None or metadata is None:
            return
        early_bytes = EARLY_BYTES if metadata.idle else 0
        thread.poll(early_bytes)
        if not metadata.idle or not thread.awaits_word(early_bytes):
            return
        until = time.monotonic() + IDLE_WAIT_SECONDS
        while thread.awaits_word(early_bytes) and time.monotonic() < until:
            time.sleep(IDLE_POLL_SECONDS)  # the session's thread needs the interpreter lock
            self._take_fingerprint()
            thread.poll(early_bytes)

    def _guarded(self, call: Callable[[], None]) -> None:
        """Calls ``call``. What has ended is reported whether or not it raises.

        What is expected to fail (a copy, the device, tierd, an invalid address) is a
        ``KVTierError`` that the transfers turn into a reason of the load or store. What arrives
        here is a fault of the code or of the device's library. vLLM would end the engine for it.
        """
        try:
            call()
        except Exception as error:  # it is counted, and each kind is logged once
            self._counters.add("step_errors")
            kind = type(error).__name__
            if kind not in self._logged_kinds and len(self._logged_kinds) < MAX_LOGGED_KINDS:
                self._logged_kinds.add(kind)
                logger.exception(
                    "KVTier: unexpected %s in a step; later ones are counted only", kind
                )

    def withhold_reports(self) -> None:
        """vLLM did not get the result of ``get_finished`` or ``get_transfer_results``. The next
        step's hooks return it."""
        self._owed.withhold()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """As ``get_finished``, with failures by request (vLLM 0.32)."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        _, recving = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(
            finished_recving=recving or set(), failed_recving=set(self._owed.current.failed)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks that this step's loads did not fill; none with several groups."""
        return set(self._owed.current.invalid_blocks)

    def build_connector_worker_meta(self) -> WorkerReport:
        """Returns the report for the scheduler side, of the same moment as ``get_finished``."""
        metadata, completed = self._metadata, self._owed.current
        report = WorkerReport(
            step=metadata.step if metadata is not None else 0,
            ranks=1,
            loads=completed.loads,
            stores_done=completed.stores_done,
            attached_epoch=self._completions.epoch,
            identity=self._identity,
            weights=((self._rank, self._weights.text, self._weights.reason),)
            if metadata is not None and metadata.report_weights and self._weights_settled
            else (),
        )
        self._owed.reported()
        return report

    @property
    def _weights_settled(self) -> bool:
        """Whether ``_weights`` are those of the identity number."""
        return self._pending_weights is None and not self._fingerprint_due

    def take_counts(self) -> dict[str, int]:
        """Returns the counts since the last call."""
        counts, previous = self._counters.snapshot(), self._reported_counts
        self._reported_counts = counts
        return {
            name: count - previous.get(name, 0)
            for name, count in counts.items()
            if count != previous.get(name, 0)
        }

    def shutdown(self) -> None:
        """Drains the copies and detaches from tierd, within ``SHUTDOWN_SECONDS``."""
        if self._thread is not None:
            self._off_reason = "shut down"
        self._close()

    def _turn_off(self, reason: str) -> None:
        self._close()
        early_pool.abandon()
        self._off_reason = reason
        self._counters.add("off")
        logger.warning("KVTier: serving without tiers: %s", reason)

    def _close(self) -> None:
        thread, self._thread = self._thread, None
        self._completions.epoch = 0
        if thread is not None:
            thread.close(SHUTDOWN_SECONDS)


def layer_backends(vllm_config: VllmConfig, layer_names: Sequence[str]) -> dict[str, str]:
    """Returns, by layer, what decides how its pages are filled beside shape and dtype.

    The CPU backend packs keys for the available instruction set (AMX or vectors) into tensors of
    the same shape; machines that differ in it must not share objects.
    """
    context: Mapping[str, object] = (
        getattr(vllm_config.compilation_config, "static_forward_context", {}) or {}
    )
    backends: dict[str, str] = {}
    for name in layer_names:
        layer = context.get(name)
        backend = getattr(layer, "attn_backend", None)
        parts = [str(getattr(backend, "__name__", "")), str(getattr(layer, "isa", ""))]
        backends[name] = " ".join(part for part in parts if part)
    return backends


def cpu_capability() -> str:
    """Returns the instruction set that torch uses on this machine, with AMX if it has that."""
    supports_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    amx = " AMX" if supports_amx is not None and supports_amx() else ""
    return f"{torch.backends.cpu.get_cpu_capability()}{amx}"


def reports_failed_requests() -> bool:
    """Returns whether this vLLM takes failed loads by request (0.32 does, 0.24 does not).

    Models with several groups need it.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")
