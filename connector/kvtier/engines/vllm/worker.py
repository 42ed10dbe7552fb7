"""What a worker finds out once, when the engine registers its KV caches: effective chunk, attention backends, who this
process is.

The worker side of the vLLM connector: one object per rank, whose methods vLLM's hooks call on the engine's thread.

Nothing here blocks and nothing raises into vLLM. A hook either hands something to the transfer thread or takes what
that thread has finished. The order of a step, in both supported versions:

    handle_preemptions, [forward pass], start_load_kv, wait_for_save, get_transfer_results or get_finished,
    get_block_ids_with_load_errors, get_kv_connector_stats, build_connector_worker_meta

vLLM 0.24 calls ``start_load_kv`` before the forward pass and leaves ``wait_for_save`` out of steps without one; 0.32
calls both after it, always. So stores are handed on by whichever of ``wait_for_save`` and ``get_finished`` comes first,
behind the step's kernels.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvtier.config.models import Daemon
from kvtier.engines.vllm.config import engine_name
from kvtier.engines.vllm.metadata import LoadResult, StepMetadata, WorkerReport
from kvtier.engines.vllm.worker_pool import HostPoolMapper
from kvtier.engines.vllm.worker_state import (
    Clock,
    CompletionQueue,
    Counters,
    WorkerClient,
    WorkerSnapshot,
)
from kvtier.engines.vllm.worker_thread import TransferThread
from kvtier.errors import KVTierError
from kvtier.processes import own_identity
from kvtier.tierd.liveness import own_lock
from kvtier.tierd.wire import PROTOCOL, Hello, Message
from kvtier.tiers.base import aligned
from kvtier.transfer.codec import Codec, CodecError, build_codec
from kvtier.transfer.engine import CopyEngine
from kvtier.transfer.factory import cache_device, make_engine, pin, unpin
from kvtier.transfer.startup_check import pinned_scratch, plain_scratch, prove

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvtier.config.models import Topology


def effective_chunk_tokens(kv_cache_config: KVCacheConfig, chunk_tokens: int) -> int:
    """Smallest common multiple of the groups' block sizes that is at least ``chunk_tokens`` (DATAPATH 6).

    Raises ``CodecError`` for a group without a block size.
    """
    sizes = [
        int(getattr(group.kv_cache_spec, "block_size", 0))
        for group in kv_cache_config.kv_cache_groups
    ]
    if not sizes or min(sizes) <= 0:
        raise CodecError(f"the KV cache groups have block sizes {sizes}; each must be positive")
    common = math.lcm(*sizes)
    return -(-chunk_tokens // common) * common


def backend_texts(vllm_config: VllmConfig, layer_names: Sequence[str]) -> dict[str, str]:
    """By layer: everything beside shape and dtype that decides how its pages are filled.

    The CPU backend packs keys for the instruction set it finds (AMX or vectors) into tensors of one shape; two machines
    that differ in it must not share. Unknown parts are left out rather than guessed.
    """
    context: Mapping[str, object] = (
        getattr(vllm_config.compilation_config, "static_forward_context", {}) or {}
    )
    texts: dict[str, str] = {}
    for name in layer_names:
        layer = context.get(name)
        backend = getattr(layer, "attn_backend", None)
        parts = [str(getattr(backend, "__name__", "")), str(getattr(layer, "isa", ""))]
        texts[name] = " ".join(part for part in parts if part)
    return texts


def cpu_text() -> str:
    """The instruction set that torch uses on this machine, and whether it has tile multiplication."""
    tiles = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return f"{torch.backends.cpu.get_cpu_capability()}{' AMX' if tiles is not None and tiles() else ''}"


def reports_failed_requests() -> bool:
    """Whether this vLLM takes a failed load by request (0.32 does, 0.24 does not); needed for models with several
    groups.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")


logger = logging.getLogger(__name__)
SHUTDOWN_SECONDS = 2.0
ClientFactory = Callable[
    [Path, Callable[[], Hello], Callable[[Message], None], Callable[[str], None]], WorkerClient
]
"""run directory, hello, sink, on_lost -> client."""
EngineFactory = Callable[[Mapping[str, object], Codec], CopyEngine]


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """What happened since the last call: ``counters`` are differences, ``loads`` the loads that ended. ``off``: why
    this rank cannot copy at all.
    """

    counters: dict[str, int] = field(default_factory=dict)
    loads: list[LoadResult] = field(default_factory=list)
    off: str = ""


def tierd_client(
    run_directory: Path,
    hello: Callable[[], Hello],
    sink: Callable[[Message], None],
    on_lost: Callable[[str], None],
    *,
    private: bool = False,
) -> WorkerClient:
    """The real client."""
    from kvtier.tierd.client import TierdClient

    return TierdClient(
        run_directory=run_directory, hello=hello, sink=sink, on_lost=on_lost, private=private
    )


class WorkerSide:
    """One rank. Every method is called by the engine's thread.

    ``engine``: name of the EngineCore this rank belongs to; the scheduler side must use the same (default:
    ``naming.engine_name``). ``chunk_tokens``: the effective chunk (default: derived from the topology and the groups).
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        topology: Topology,
        *,
        engine: str | None = None,
        chunk_tokens: int | None = None,
        client: ClientFactory | None = None,
        copy_engine: EngineFactory = make_engine,
        clock: Clock = time.monotonic,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._topology = topology
        self._engine_name = engine or engine_name(vllm_config)
        self._chunk_tokens = chunk_tokens
        self._make_client = client or partial(
            tierd_client, private=topology.structural.daemon is Daemon.ENGINE
        )
        self._make_engine = copy_engine
        self._clock = clock
        self._rank = int(getattr(vllm_config.parallel_config, "rank", 0))
        self._single_group = len(kv_cache_config.kv_cache_groups) == 1
        self._counters = Counters()
        self._reports = CompletionQueue(self._single_group)
        self._thread: TransferThread | None = None
        self._client: WorkerClient | None = None
        self._codec: Codec | None = None
        self._off = "no KV cache is registered"
        self._metadata: StepMetadata | None = None
        self._stores_of: StepMetadata | None = None
        self._snapshot = WorkerSnapshot()
        self._loads_for_stats: list[LoadResult] = []
        self._counted: dict[str, int] = {}

    @property
    def off(self) -> str:
        """Why this rank takes no part; empty if it does."""
        return self._off

    @property
    def codec(self) -> Codec | None:
        """The byte layout, once caches are registered and proven."""
        return self._codec

    def register_kv_caches(self, kv_caches: Mapping[str, object]) -> None:
        """Derives the layout, proves it by a round trip, and attaches to tierd in the background.

        ``kv_caches``: layer name to tensor. Whatever does not work turns KVTier off for this engine, with one log line.
        """
        if self._thread is not None:
            self._turn_off("KV caches were registered a second time")
            return
        try:
            self._begin(kv_caches)
        except KVTierError as error:
            self._turn_off(str(error))
        except Exception as error:  # a cache never stops an engine
            logger.exception("KVTier: unexpected failure at start")
            self._turn_off(f"{type(error).__name__}: {error}")

    def _begin(self, kv_caches: Mapping[str, object]) -> None:
        if not self._single_group and not reports_failed_requests():
            raise KVTierError(
                "this vLLM cannot take a failed load of a model with several KV cache groups"
            )
        chunk = self._chunk_tokens
        if chunk is None:
            chunk = effective_chunk_tokens(
                self._kv_cache_config, self._topology.structural.chunk_tokens
            )
        names = [
            name for group in self._kv_cache_config.kv_cache_groups for name in group.layer_names
        ]
        backends = backend_texts(self._vllm_config, names)
        codec = build_codec(kv_caches, self._kv_cache_config, chunk, backends)
        device = cache_device(kv_caches, codec)
        if device.type == "cpu":
            backends = {name: f"{backends.get(name, '')} {cpu_text()}".strip() for name in names}
            codec = build_codec(kv_caches, self._kv_cache_config, chunk, backends)
        engine = self._make_engine(kv_caches, codec)
        prove(kv_caches, codec, engine, plain_scratch if device.type == "cpu" else pinned_scratch)
        client = self._make_client(
            Path(self._topology.structural.run_directory), self._hello, self._received, self._lost
        )
        keeper = HostPoolMapper(lambda pool, cancelled: pin(pool, device, cancelled), unpin)
        offsets = tuple(self._rank * aligned(size) for size in codec.shard_bytes)
        self._codec = codec
        self._client = client
        self._thread = TransferThread(
            engine, offsets, client, self._reports, self._counters, keeper, self._clock
        )
        self._off = ""
        self._thread.start()
        client.start()
        logger.info(
            "KVTier: rank %d copies chunks of %d tokens by the %s engine, shards of %s bytes",
            self._rank,
            chunk,
            engine.kind,
            ", ".join(str(size) for size in codec.shard_bytes),
        )

    def _turn_off(self, reason: str) -> None:
        self._leave()
        self._off = reason
        self._counters.add("off")
        logger.warning("KVTier: this engine serves without tiers: %s", reason)

    def _hello(self) -> Hello:
        codec, thread, identity = self._codec, self._thread, own_identity()
        return Hello(
            protocol=PROTOCOL,
            role="worker",
            engine=self._engine_name,
            rank=self._rank,
            pid=identity.pid,
            pid_namespace=identity.pid_namespace,
            process_start=identity.start,
            drained_epoch=thread.drained_epoch if thread is not None else 0,
            codec=codec.text if codec is not None else "",
            shard_bytes=codec.shard_bytes if codec is not None else (),
            lock=own_lock(Path(self._topology.structural.run_directory)),
        )

    def _received(self, message: Message) -> None:
        if self._thread is not None:
            self._thread.message(message)

    def _lost(self, reason: str) -> None:
        if self._thread is not None:
            self._thread.lost(reason)

    def handle_preemptions(self, metadata: object) -> None:
        """Nothing to do. A preempted request's blocks that a store still reads are referenced by the scheduler side and
        cannot be given to anyone; a load's request cannot be preempted while it waits for the load; aborted loads come
        as ``cancelled_loads``.
        """

    def start_load_kv(self, metadata: object) -> None:
        """Hands on the loads and cancellations of a step. ``metadata``: what the scheduler side built for it."""
        if not isinstance(metadata, StepMetadata):
            return
        self._metadata = metadata
        if not metadata.loads and not metadata.cancelled_loads:
            return
        fence = self._fence() if metadata.loads else None
        if self._thread is None:
            for job in metadata.loads:
                self._reports.load_refused(job, "off")
            return
        self._thread.put_loads(tuple(metadata.loads), tuple(metadata.cancelled_loads), fence)

    def wait_for_save(self) -> None:
        """Hands on the stores of the step; despite its name in vLLM it waits for nothing."""
        metadata = self._metadata
        if metadata is None or metadata is self._stores_of:
            return
        self._stores_of = metadata
        if not metadata.stores:
            return
        fence = self._fence()
        if self._thread is None:
            self._reports.stores_done(job.reservation for job in metadata.stores)
            return
        self._thread.put_stores(tuple(metadata.stores), fence)

    def _fence(self) -> object | None:
        """Marks the end of what is launched so far. Without such a mark no copy may start: KVTier goes off."""
        if self._thread is None:
            return None
        try:
            return self._thread.fence()
        except RuntimeError as error:
            self._turn_off(f"the compute stream cannot be marked: {error}")
            return None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Takes what has ended since the last step: (None, ids of requests whose load has ended)."""
        self.wait_for_save()
        self._snapshot = self._reports.take()
        self._loads_for_stats += self._snapshot.loads
        return None, self._snapshot.recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """As ``get_finished``, with failures by request (vLLM 0.32)."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        _, recving = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(
            finished_recving=recving or set(), failed_recving=set(self._snapshot.failed)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that the loads of this step's report did not fill; empty for models with several groups."""
        return set(self._snapshot.invalid_blocks)

    def build_connector_worker_meta(self) -> WorkerReport:
        """The report for the scheduler side; belongs to the same moment as ``get_finished`` of this step."""
        metadata, snapshot = self._metadata, self._snapshot
        self._snapshot = WorkerSnapshot()
        return WorkerReport(
            step=metadata.step if metadata is not None else 0,
            ranks=1,
            loads=snapshot.loads,
            stores_done=snapshot.stores_done,
            attached_epoch=self._reports.epoch,
        )

    def take_stats(self) -> WorkerStats:
        """Counters and loads since the last call."""
        counters = self._counters.snapshot()
        changed = {name: count - self._counted.get(name, 0) for name, count in counters.items()}
        self._counted = counters
        loads, self._loads_for_stats = self._loads_for_stats, []
        return WorkerStats(
            {name: count for name, count in changed.items() if count}, loads, self._off
        )

    def shutdown(self) -> None:
        """Drains the copies and leaves tierd in order, within ``SHUTDOWN_SECONDS``. Without a proven end of the copies
        no ``Bye`` is sent: tierd then waits until this process is gone.
        """
        if self._thread is not None:
            self._off = "shut down"
        self._leave()

    def _leave(self) -> None:
        thread, client = self._thread, self._client
        self._thread, self._client = None, None
        if thread is None:
            return
        begun = time.monotonic()
        drained = thread.close(SHUTDOWN_SECONDS * 0.75)
        if client is not None and drained:
            client.close(max(0.1, SHUTDOWN_SECONDS - (time.monotonic() - begun)))
