"""A scheduler side without an engine.

vLLM's requests, block pool and step outputs are plain objects; tierd is a list of messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from kvtier.config.models import (
    FileSystemTierDocument,
    Live,
    LiveTier,
    MemoryTierDocument,
    PolicyIdentity,
    Selection,
    Structural,
    Topology,
)
from kvtier.engines.common.jobs import LoadJob, LoadResult, StoreJob
from kvtier.engines.common.lora import AdapterDigests
from kvtier.engines.common.model_identity import EngineIdentity
from kvtier.engines.common.tierd_session import TierdSession
from kvtier.engines.vllm.metadata import StepMetadata, WorkerReport
from kvtier.engines.vllm.scheduler import KVTierConnectorScheduler
from kvtier.planner import GroupKind, KVCacheGroup, Planner
from kvtier.store.generations import pack_location
from kvtier.tierd.wire import (
    PROTOCOL,
    Credits,
    Delta,
    EvictionNotice,
    Heartbeat,
    Hello,
    Message,
    Promote,
    Promoted,
    Ready,
    Welcome,
)

BLOCK = 32
CHUNK = 64
SLOT_BYTES = 1 << 20
RAM, DISK, NFS = 1, 2, 4
M = TypeVar("M", bound=Message)


def topology(
    min_load_tokens: int = CHUNK, selection: Selection = Selection.WEIGHTED, **weights: int
) -> Topology:
    """Tiers ram, disk (limit 4 s) and nfs (limit 9 s)."""
    tiers = {
        "ram": LiveTier(load_weight=weights.get("ram", 100)),
        "disk": LiveTier(
            capacity_bytes=1 << 30, load_timeout_seconds=4, load_weight=weights.get("disk", 100)
        ),
        "nfs": LiveTier(
            capacity_bytes=1 << 30, load_timeout_seconds=9, load_weight=weights.get("nfs", 100)
        ),
    }
    live = Live(selection=selection, min_load_tokens=min_load_tokens, tiers=tiers)
    structural = Structural(
        policy=PolicyIdentity(namespace="test", name="test"),
        content_hash="test",
        run_directory="/dev/shm/kvtier-unit-test",
        chunk_tokens=CHUNK,
        tiers=[
            MemoryTierDocument(name="ram", capacity_bytes=1 << 30),
            FileSystemTierDocument(name="disk", path="/var/kv", sharing="Node"),
            FileSystemTierDocument(name="nfs", path="/mnt/kv", sharing="Cluster"),
        ],
        live=live,
    )
    return Topology(structural=structural, live=live)


class FakeClient:
    """tierd's client; the test speaks for tierd. Everything happens at once, on one thread."""

    def __init__(
        self,
        hello: Callable[[], Hello],
        sink: Callable[[Message], None],
        on_lost: Callable[[str], None],
        heartbeat: Callable[[], Heartbeat],
    ) -> None:
        self.heartbeat = heartbeat
        self.hello = hello
        self.sink = sink
        self.on_lost = on_lost
        self.attached = False
        self.epoch = 0
        self.accepts = True
        self.closed = False
        self.sent: list[Message] = []
        self._sequence = 0
        self.weights: tuple[str, ...] = ("w",)
        """Fingerprints that tierd derives the next namespace from."""

    def start(self) -> None:
        """Nothing attaches by itself."""

    def send(self, message: Message) -> bool:
        if not self.attached or not self.accepts:
            return False
        self.sent.append(message)
        return True

    def close(self, timeout_seconds: float) -> None:
        self.closed = True

    def take(self, kind: type[M]) -> list[M]:
        """Messages of one kind sent so far, taken out of ``sent``."""
        found = [message for message in self.sent if isinstance(message, kind)]
        self.sent = [message for message in self.sent if not isinstance(message, kind)]
        return found

    # Messages from tierd.

    def welcome(self, epoch: int = 1, settings: str = "") -> None:
        self.attached, self.epoch, self._sequence = True, epoch, 0
        self.sink(
            Welcome(
                protocol=PROTOCOL,
                epoch=epoch,
                session=epoch,
                pool_path="/pool",
                pool_bytes=1 << 30,
                tiers=("ram", "disk", "nfs"),
                settings=settings,
            )
        )

    def ready(self, namespace: str = "a" * 32, snapshot: bool = True, identity: int = 0) -> None:
        self.sink(
            Ready(
                namespace=namespace,
                slot_bytes=(SLOT_BYTES,),
                persistent=not identity,
                weights=self.weights,
                identity=identity,
            )
        )
        if snapshot:
            self.delta(snapshot=True)

    def delta(
        self,
        added: dict[bytes, int] | None = None,
        removed: dict[bytes, int] | None = None,
        snapshot: bool = False,
    ) -> None:
        self._sequence += 1
        self.sink(
            Delta(
                sequence=self._sequence,
                added=tuple(
                    (key, bits, location_of(key) if bits & RAM else 0)
                    for key, bits in (added or {}).items()
                ),
                removed=tuple((removed or {}).items()),
                snapshot=snapshot,
            )
        )

    def leaving(self, keys: Iterable[bytes], token: int = 7) -> None:
        self.sink(EvictionNotice(token=token, keys=tuple(keys)))

    def credit(self, count: int, first: int = 0) -> None:
        self.sink(
            Credits(group=0, slots=tuple((first + number) * SLOT_BYTES for number in range(count)))
        )

    def promoted(
        self, promotion: int, usable: int, outcome: str = "whole", tiers: tuple[int, ...] = ()
    ) -> None:
        self.sink(
            Promoted(
                promotion=promotion,
                usable=usable,
                outcome=outcome,
                tiers=tiers or (1,) * usable,
                locations=tuple(pack_location(i * SLOT_BYTES, 6) for i in range(usable)),
            )
        )

    def lose(self) -> None:
        self.attached, self.epoch = False, 0
        self.on_lost("the test says so")


class FakeRequest:
    """vLLM's Request as far as the connector looks at it. Block hashes are chained, like vLLM's."""

    def __init__(
        self, request_id: str, tokens: Sequence[int], lora: Any = None, **more: Any
    ) -> None:
        self.request_id = request_id
        self.all_tokens = list(tokens)
        self.num_prompt_tokens = len(self.all_tokens)
        self.num_computed_tokens = 0
        self.lora_request = lora
        self.status = SimpleNamespace(name="RUNNING")
        self.prompt_embeds = None
        self.skip_reading_prefix_cache = False
        self.resumable = False
        self.block_hashes: list[bytes] = []
        self.__dict__.update(more)
        self._hash()

    @property
    def num_tokens(self) -> int:
        return len(self.all_tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.all_tokens

    def append(self, *tokens: int) -> None:
        """Sampled tokens."""
        self.all_tokens += tokens
        self._hash()

    def _hash(self) -> None:
        while (len(self.block_hashes) + 1) * BLOCK <= len(self.all_tokens):
            start = len(self.block_hashes) * BLOCK
            parent = self.block_hashes[-1] if self.block_hashes else b"seed"
            content = repr(self.all_tokens[start : start + BLOCK]).encode()
            self.block_hashes.append(hashlib.sha256(parent + content).digest())

    def key(self, chunk: int) -> bytes:
        """The key of a chunk of a request without an adapter."""
        return b"\0" + self.block_hashes[(chunk + 1) * CHUNK // BLOCK - 1]

    def keys(self, first: int, count: int) -> list[bytes]:
        return [self.key(chunk) for chunk in range(first, first + count)]


class FakePool:
    """vLLM's block pool: reference counts by block."""

    def __init__(self, count: int = 4096) -> None:
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=0) for number in range(count)]
        self.freed: list[int] = []
        self.cached_block_hash_to_block: object = object()

    def reset_prefix_cache(self) -> bool:
        """As vLLM: refused while a block is referenced; else the map is replaced."""
        if self.referenced():
            return False
        self.cached_block_hash_to_block = object()
        return True

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            self.freed.append(block.block_id)

    def referenced(self) -> list[int]:
        """Blocks that are referenced."""
        return [block.block_id for block in self.blocks if block.ref_cnt]


class SchedulerTestbed:
    """One scheduler side with everything around it.

    ``offers_tables``: the output has block tables, as on vLLM 0.32; otherwise the connector tracks
    them, as on 0.24. ``planner``: of the engine, by default one group of full attention.
    """

    def __init__(
        self,
        document: Topology | None = None,
        offers_tables: bool = True,
        ranks: int = 1,
        adapters: AdapterDigests | None = None,
        attach: bool = True,
        planner: Planner | None = None,
    ) -> None:
        self.now = 100.0
        self.offers_tables = offers_tables
        self.tables: dict[str, list[int]] = {}
        self.requests: dict[str, FakeRequest] = {}
        self.pool = FakePool()
        self.step = 0
        self._next_block = 1
        self._seen: set[str] = set()
        self.clients: list[FakeClient] = []
        if planner is None:
            planner = Planner.build([KVCacheGroup(GroupKind.FULL, BLOCK)], CHUNK, BLOCK, ranks)
        self.scheduler = KVTierConnectorScheduler(
            TierdSession(
                document or topology(),
                planner,
                "engine/dp0",
                lambda: EngineIdentity("{}"),
                self._client,
            ),
            planner,
            adapters=adapters,
            clock=lambda: self.now,
        )
        self.built = StepMetadata()
        self.weights = ("w",) * ranks
        self.unknown_weights = ""
        self.scheduler.bind_gpu_block_pool(self.pool)
        self.scheduler.start()
        self.client = self.clients[0]
        if attach:
            self.client.welcome()
            self.client.ready()

    def _client(
        self,
        directory: object,
        hello: Callable[[], Hello],
        sink: Callable[[Message], None],
        on_lost: Callable[[str], None],
        heartbeat: Callable[[], Heartbeat],
    ) -> FakeClient:
        client = FakeClient(hello, sink, on_lost, heartbeat)
        self.clients.append(client)
        return client

    # What vLLM's scheduler does.

    def request(
        self, tokens: int, request_id: str = "r", seed: int = 0, **more: Any
    ) -> FakeRequest:
        """A request with a prompt of ``tokens`` tokens; equal seeds share prefixes."""
        request = FakeRequest(
            request_id, [seed * 10_000 + number for number in range(tokens)], **more
        )
        self.requests[request_id] = request
        return request

    def ask(self, request: FakeRequest, computed: int = 0) -> int | None:
        """The scheduler asks what can be loaded."""
        tokens, asynchronous = self.scheduler.get_num_new_matched_tokens(request, computed)  # type: ignore[arg-type]
        assert asynchronous == bool(tokens)
        return tokens

    def allocate(self, request: FakeRequest, tokens: int) -> list[int]:
        """Gives the request blocks for ``tokens`` tokens in all; returns its table."""
        table = self.tables.setdefault(request.request_id, [])
        while len(table) * BLOCK < tokens:
            table.append(self._next_block)
            self._next_block += 1
        return table

    def admit(self, request: FakeRequest, computed: int, loaded: int) -> None:
        """An answer was taken: blocks are allocated, and vLLM waits for the load."""
        table = self.allocate(request, computed + loaded)
        self.scheduler.update_state_after_alloc(request, (table,), loaded)  # type: ignore[arg-type]
        request.num_computed_tokens = computed + loaded

    def build(
        self,
        scheduled: dict[str, int] | None = None,
        preempted: Iterable[str] = (),
        resumed: Iterable[str] = (),
    ) -> StepMetadata:
        """Builds a step in which ``scheduled[id]`` tokens are computed."""
        scheduled = scheduled or {}
        self.step += 1
        new, cached, fresh_blocks = [], [], []
        for request_id, count in scheduled.items():
            request = self.requests[request_id]
            before = len(self.tables.get(request_id, ()))
            table = self.allocate(request, request.num_computed_tokens + count)
            if request_id not in self._seen:
                self._seen.add(request_id)
                new.append(SimpleNamespace(req_id=request_id, block_ids=(list(table),)))
            else:
                cached.append(request_id)
                fresh = table if request_id in resumed else table[before:]
                fresh_blocks.append((list(fresh),) if fresh else None)
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached, new_block_ids=fresh_blocks, resumed_req_ids=set(resumed)
            ),
            num_scheduled_tokens=scheduled,
            preempted_req_ids=set(preempted),
        )
        if self.offers_tables:
            output.kv_connector_block_state = SimpleNamespace(
                get_block_ids=lambda request_id: (
                    (self.tables[request_id],) if request_id in scheduled else None
                )
            )
        metadata = self.scheduler.build_connector_meta(output)  # type: ignore[arg-type]
        self.built = metadata
        for request_id, count in scheduled.items():
            self.requests[request_id].num_computed_tokens += count
        return metadata

    def report(
        self,
        step: int | None = None,
        loads: Iterable[LoadResult] = (),
        done: dict[int, int] | None = None,
        epoch: int | None = None,
        recomputes: bool = False,
    ) -> None:
        """The workers have executed ``step`` (default: all that was built)."""
        self.scheduler.update_connector_output(
            WorkerReport(
                step=self.step if step is None else step,
                loads=list(loads),
                stores_done=done or {},
                attached_epoch=self.client.epoch if epoch is None else epoch,
                identity=self.built.identity,
                weights=self.fingerprints() if self.built.report_weights else (),
            ),
            recomputes=recomputes,
        )

    def fingerprints(self) -> tuple[tuple[int, str, str], ...]:
        """What the ranks report: the weights that the engine has."""
        unknown = self.unknown_weights
        return tuple(
            (rank, "" if unknown else text, unknown) for rank, text in enumerate(self.weights)
        )

    def run(self, scheduled: dict[str, int] | None = None) -> StepMetadata:
        """Builds a step and reports it."""
        metadata = self.build(scheduled)
        self.report()
        return metadata

    def finish(self, request: FakeRequest, status: str = "FINISHED_STOPPED") -> None:
        """The request ends; its own references to blocks are gone afterwards."""
        request.status = SimpleNamespace(name=status)
        table = self.tables.pop(request.request_id, [])
        self.scheduler.request_finished(request, (table,))  # type: ignore[arg-type]
        self.requests.pop(request.request_id, None)
        self._seen.discard(request.request_id)

    def preempt(self, request: FakeRequest) -> None:
        """Its blocks go, and nothing of it is computed."""
        self.tables.pop(request.request_id, None)
        request.num_computed_tokens = 0

    # Shorthands.

    def hold(self, keys: Iterable[bytes], bits: int = RAM) -> None:
        """Adds keys to the replica."""
        self.client.delta(added=dict.fromkeys(keys, bits))

    def promoted_load(
        self, request: FakeRequest, tiers: tuple[int, ...], computed: int = 0
    ) -> LoadJob:
        """Starts a load of chunks that tierd has brought from ``tiers``."""
        self.hold(request.keys(0, len(tiers)), DISK)
        assert self.ask(request, computed) is None
        (promote,) = self.client.take(Promote)
        self.client.promoted(promote.promotion, len(tiers), tiers=tiers)
        self.admit(request, computed, self.ask(request, computed) or 0)
        (job,) = self.build().loads
        return job

    def result(
        self,
        load: int,
        keys_loaded: int,
        request_id: str = "r",
        reason: str = "",
    ) -> LoadResult:
        return LoadResult(load, request_id, keys_loaded, reason)


def location_of(key: bytes) -> int:
    """Where the stub's tierd has ``key`` in RAM: some slot, in its fourth generation."""
    return pack_location(key[-1] * SLOT_BYTES, 8)


def chunks_of(
    testbed: SchedulerTestbed, stores: Iterable[StoreJob], request_id: str = "r"
) -> list[int]:
    """Which chunks of a request's table these jobs store."""
    table, length = testbed.tables[request_id], CHUNK // BLOCK
    return [table.index(store.run.blocks[0]) // length for store in stores]


def hinted(
    testbed: SchedulerTestbed, name: str = "r", seed: int = 0, tokens: int = 300, **hints: Any
) -> FakeRequest:
    """A request with these hints."""
    parameters = {f"kvtier.{hint}": value for hint, value in hints.items()}
    return testbed.request(tokens, name, seed, kv_transfer_params=parameters)


def computed(testbed: SchedulerTestbed, name: str, seed: int, **hints: Any) -> FakeRequest:
    """A request that finishes at once. What it stores is planned by the next step."""
    request = hinted(testbed, name, seed, **hints)
    testbed.ask(request)
    testbed.run({name: 300})
    testbed.finish(request)
    return request
