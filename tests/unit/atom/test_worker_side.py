"""The worker side of the ATOM adapter on real tensors, with a scripted tierd."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.cache_engine import BLOCKS, CHUNK, TOKENS, CacheTensor
from tests.support.stub_tierd import FIRST_GENERATION, StubTierd

from kvtier.config.models import Daemon
from kvtier.engines.atom.layout import byte_layout, rows_of
from kvtier.engines.atom.metadata import AtomCancel, AtomLoad, AtomSave, AtomStepMetadata
from kvtier.engines.atom.rank import RankIdentity
from kvtier.engines.atom.types import KVConnectorOutput, LoadOperationId, SaveOperationId
from kvtier.engines.atom.worker import AtomWorker
from kvtier.engines.common.jobs import BlockRun, LoadJob, StoreJob
from kvtier.tierd.wire import Deliver
from kvtier.transfer.codec import CodecError
from kvtier.transfer.cpu import CpuCopyEngine
from kvtier.transfer.engine import Copy
from kvtier.transfer.startup_check import pageable_scratch


def caches(latent: bool = False) -> dict[int, CacheTensor]:
    """Two layers; ``latent``: one tensor per layer with a row per token, as for MLA."""
    torch.manual_seed(3)
    if latent:
        return {
            layer: CacheTensor(torch.randn(BLOCKS * TOKENS, 1, 24), torch.tensor([]))
            for layer in range(2)
        }
    return {
        layer: CacheTensor(
            torch.randn(BLOCKS, 2, 3, TOKENS, 8).to(torch.bfloat16),
            torch.randn(BLOCKS, 2, 24, TOKENS).to(torch.bfloat16),
            torch.randn(BLOCKS, 2, TOKENS),
        )
        for layer in range(2)
    }


@dataclass
class WorkerBench:
    """One rank's worker side."""

    caches: dict[int, CacheTensor]
    worker: AtomWorker
    tierd: StubTierd
    directory: Path
    ended: KVConnectorOutput = field(default_factory=KVConnectorOutput)

    def start(self, *jobs: Any) -> None:
        self.worker.start_load_kv(pickle.loads(pickle.dumps(AtomStepMetadata(list(jobs)))))

    def wait(self, condition: Callable[[KVConnectorOutput], object]) -> KVConnectorOutput:
        """Polls as ATOM does, and collects what has ended."""
        deadline = time.monotonic() + 60
        while not condition(self.ended):
            output = self.worker.get_finished()
            for name in ("finished_loading", "failed_loading", "finished_saving"):
                getattr(self.ended, name).update(getattr(output, name))
            if time.monotonic() > deadline:
                raise TimeoutError(str(self.ended))
            time.sleep(0.002)
        return self.ended

    def block(self, number: int) -> list[bytes]:
        """The bytes of a block, tensor by tensor."""
        found = []
        for cache in self.caches.values():
            for tensor in (cache.k_cache, cache.v_cache, cache.k_scale):
                if tensor is not None and tensor.numel():
                    rows = rows_of("", tensor, BLOCKS)
                    found.append(bytes(rows[number].numpy()))
        return found


@pytest.fixture(params=[False, True], ids=["packed", "latent"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WorkerBench]:
    made: list[StubTierd] = []

    def client(*arguments: Any) -> StubTierd:
        made.append(StubTierd(*arguments))
        return made[-1]

    structural: Any = SimpleNamespace(run_directory=str(tmp_path), daemon=Daemon.SIDECAR)
    worker = AtomWorker(structural, RankIdentity("engine/dp0", 0, TOKENS, CHUNK), client)
    tensors = caches(request.param)
    worker.register_kv_caches(tensors, BLOCKS)
    assert worker.off_reason == ""
    (tmp_path / "pool").write_bytes(bytes(1 << 20))
    made[0].welcome(1)
    bench = WorkerBench(tensors, worker, made[0], tmp_path)
    deadline = time.monotonic() + 60
    while worker._completions.epoch != 1:
        if time.monotonic() > deadline:
            raise TimeoutError("the worker does not attach")
        time.sleep(0.002)
    yield bench
    worker.shutdown()


def save(number: int, slot: int, *blocks: int, epoch: int = 1) -> AtomSave:
    job = StoreJob(number, slot, epoch, BlockRun(0, 0, blocks))
    return AtomSave(SaveOperationId("kvtier", number), job)


def load(number: int, *blocks: int, slots: tuple[int, ...] = (0,), epoch: int = 1) -> AtomLoad:
    runs = (BlockRun(0, 0, blocks),)
    generations = (FIRST_GENERATION,) * len(slots)
    job = LoadJob(number, f"5#{number}", runs, 30.0, epoch, slots, generations)
    return AtomLoad(LoadOperationId(5, number), job)


def test_opaque_bytes_come_back_as_they_were_block_zero_included(bench: WorkerBench) -> None:
    before = [bench.block(0), bench.block(7)]
    bench.start(save(1, 0, 0, 7))
    ended = bench.wait(lambda e: e.finished_saving)
    assert ended.finished_saving == {SaveOperationId("kvtier", 1)}
    assert bench.tierd.wait(lambda tierd: tierd.of(Deliver))
    for cache in bench.caches.values():
        cache.k_cache.zero_()
        cache.v_cache.zero_()
    bench.start(load(2, 7, 0))
    ended = bench.wait(lambda e: e.finished_loading | e.failed_loading)
    assert ended.finished_loading == {LoadOperationId(5, 2)}
    keys = [index for index in range(len(before[0])) if index % 3 != 2 or len(before[0]) == 2]
    for source, target in zip(before, (7, 0), strict=True):
        restored = bench.block(target)
        assert [restored[index] for index in keys] == [source[index] for index in keys]


def test_a_load_without_its_objects_is_reported_as_failed(bench: WorkerBench) -> None:
    bench.start(load(3, 1, 2, slots=()))
    assert bench.wait(lambda e: e.failed_loading).failed_loading == {LoadOperationId(5, 3)}


def test_a_load_of_another_epoch_fails(bench: WorkerBench) -> None:
    bench.start(load(4, 1, 2, epoch=7))
    assert bench.wait(lambda e: e.failed_loading).failed_loading == {LoadOperationId(5, 4)}


def test_a_cancelled_load_is_reported_once(bench: WorkerBench) -> None:
    bench.start(load(5, 1, 2), AtomCancel(5))
    bench.wait(lambda e: e.failed_loading | e.finished_loading)
    bench.start(AtomCancel(5))
    assert bench.worker.get_finished() == KVConnectorOutput()


def test_a_save_of_another_epoch_is_dropped_and_reported(bench: WorkerBench) -> None:
    bench.start(save(6, 0, 1, 2, epoch=9))
    assert bench.wait(lambda e: e.finished_saving).finished_saving
    assert not bench.tierd.of(Deliver)
    assert bench.worker.counts()["stores_stale"] == 1


def test_after_shutdown_every_job_is_still_reported(bench: WorkerBench) -> None:
    bench.worker.shutdown()
    bench.start(load(7, 1, 2), save(8, 0, 1, 2))
    ended = bench.wait(lambda e: e.failed_loading and e.finished_saving)
    assert ended.failed_loading == {LoadOperationId(5, 7)}
    assert ended.finished_saving == {SaveOperationId("kvtier", 8)}


def test_a_cache_that_cannot_be_sliced_turns_kvtier_off_with_a_reason() -> None:
    structural: Any = SimpleNamespace(run_directory="/nowhere", daemon=Daemon.SIDECAR)
    worker = AtomWorker(structural, RankIdentity("engine/dp0", 0, TOKENS, CHUNK))
    worker.register_kv_caches(
        {0: CacheTensor(torch.randn(BLOCKS, 8, 4).transpose(1, 2), torch.tensor([]))}, BLOCKS
    )
    assert "not contiguous" in worker.off_reason
    worker.start_load_kv(AtomStepMetadata([load(1, 1, 2), save(2, 0, 1, 2)]))
    output = worker.get_finished()
    assert output.failed_loading
    assert output.finished_saving


def test_rows_must_divide_the_tensor() -> None:
    with pytest.raises(CodecError, match="must be a multiple of 7 blocks"):
        rows_of("layer.0.k_cache", torch.zeros(12, 4, dtype=torch.uint8), 7)


def test_only_block_zero_is_added_to_what_the_address_check_accepts() -> None:
    layout = byte_layout(dict(caches()), BLOCKS, TOKENS, CHUNK)
    engine = CpuCopyEngine(layout.tensors, layout.codec)
    engine.attach(pageable_scratch(layout.codec.shard_bytes[0]))
    valid = Copy(0, 0, 0, (0, 3))
    assert engine.check(valid) == ""
    assert engine.first_invalid([valid]) is None
    assert "twice" in engine.check(Copy(0, 0, 0, (0, 0)))
    assert "outside" in engine.check(Copy(0, 0, 0, (0, BLOCKS)))
    assert "outside 0..11" in engine.check(Copy(0, 0, 0, (-1, 0)))
    assert engine.first_invalid([valid, Copy(0, 0, 0, (-1, 4))]) is not None
    assert "within a chunk" in engine.check(Copy(0, 0, 1, (0, 1)))


def test_the_layout_tells_quantized_from_other_caches() -> None:
    plain = byte_layout(dict(caches()), BLOCKS, TOKENS, CHUNK).codec.text
    other = caches()
    for cache in other.values():
        cache.k_scale = None
    assert plain != byte_layout(dict(other), BLOCKS, TOKENS, CHUNK).codec.text
    assert "bfloat16" in plain
