"""The CacheEngine path's copies between LMCache's memory and a CUDA device, which is simulated.

Kernels of the engine are queued before each copy and run at any later point that streams and events
allow. A store must have what the kernels before it wrote, and a load must come after the kernels
that still read its blocks. Without the fence the same schedule finds wrong bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.support.cache_engine import BLOCKS, CHUNK, TOKENS, kv_tensors
from tests.support.simulated_cuda import SimulatedDevice, install

from kvtier.engines.atom.layout import byte_layout
from kvtier.engines.common.jobs import BlockRun
from kvtier.engines.lmcache.block_copier import BlockCopier
from kvtier.engines.lmcache.transfers import CopyGate
from kvtier.transfer import cuda as engine_module
from kvtier.transfer.engine import CopyError, Direction
from kvtier.transfer.host_pool import HostPool
from kvtier.transfer.startup_check import pageable_scratch

ROUNDS = 60
WAYS = ("staged", "batch")


class WrongBytes(Exception):
    """Memory that does not hold what it must hold."""


@dataclass(slots=True)
class Rank:
    """One rank's copier; ``rows``: its KV tensors as bytes by block."""

    device: SimulatedDevice
    copier: BlockCopier
    rows: list[torch.Tensor]

    def block(self, number: int) -> bytes:
        return b"".join(each[number].numpy().tobytes() for each in self.rows)

    def write(self, number: int, content: bytes) -> None:
        start = 0
        for each in self.rows:
            part = np.frombuffer(content[start : start + each.shape[1]], dtype=np.uint8)
            each[number] = torch.from_numpy(part.copy())
            start += each.shape[1]

    def launch(self, kernel: Callable[[], None]) -> None:
        self.device.compute.queue.append(kernel)


def make_rank(patch: pytest.MonkeyPatch, seed: int, way: str, forgotten: str = "") -> Rank:
    device = SimulatedDevice(seed, frozenset({forgotten} if forgotten else ()))
    engine_class = install(patch, device, table_rows=4, tables=16)
    patch.setattr(engine_module, "TABLES_PER_SUBMISSION", 4)
    patch.setattr(torch.cuda, "set_device", lambda _device: None)
    layout = byte_layout(dict(kv_tensors(seed=seed)), BLOCKS, TOKENS, CHUNK)
    for tensor in layout.tensors.values():
        storage = tensor.untyped_storage()
        device.own(storage.data_ptr(), storage.nbytes())
    block_bytes = layout.codec.groups[0].block_bytes
    engine = engine_class(layout.tensors, layout.codec, staging_bytes=2 * block_bytes)
    for direction in Direction:
        engine.choose(direction, way)

    def scratch(nbytes: int) -> HostPool:
        pool = pageable_scratch(nbytes)
        device.own(int(pool.memory.ctypes.data), pool.nbytes)
        return pool

    return Rank(device, BlockCopier(engine, scratch), list(layout.tensors.values()))


def run_schedule(rank: Rank, seed: int) -> None:
    """Stores and loads random chunks. Raises ``WrongBytes``."""
    chance, objects = random.Random(seed), []
    for _ in range(ROUNDS):
        blocks = tuple(chance.sample(range(BLOCKS), CHUNK // TOKENS))
        if not objects or chance.random() < 0.5:
            content = [chance.randbytes(len(rank.block(0))) for _ in blocks]

            def compute(blocks: tuple[int, ...] = blocks, content: list[bytes] = content) -> None:
                for block, part in zip(blocks, content, strict=True):
                    rank.write(block, part)

            rank.launch(compute)
            target = bytearray(rank.copier.shard_bytes)
            rank.copier.store(BlockRun(0, 0, blocks), memoryview(target), rank.copier.fence())
            objects.append((target, content))
            if bytes(target) != _object(rank, content):
                raise WrongBytes("a store was copied before it was computed")
            continue
        source, content = chance.choice(objects)
        first = chance.randrange(len(blocks))
        before, read = [rank.block(each) for each in range(BLOCKS)], []

        def attend(read: list[bytes] = read) -> None:
            read.extend(rank.block(each) for each in range(BLOCKS))

        rank.launch(attend)
        rank.device.progress()
        rank.copier.load(
            BlockRun(0, first, blocks[first:]), memoryview(source), rank.copier.fence()
        )
        rank.device.finish()
        if read != before:
            raise WrongBytes("a block was loaded while a kernel still read it")
        for number in range(BLOCKS):
            loaded = number in blocks[first:]
            wanted = content[blocks.index(number)] if loaded else before[number]
            if rank.block(number) != wanted:
                raise WrongBytes(f"block {number}, loaded: {loaded}")


def _object(rank: Rank, content: list[bytes]) -> bytes:
    """The bytes of a chunk in the order of the object, by a copy that needs no order."""
    saved = [rank.block(each) for each in range(len(content))]
    for number, part in enumerate(content):
        rank.write(number, part)
    target = bytearray(rank.copier.shard_bytes)
    rank.copier.store(BlockRun(0, 0, tuple(range(len(content)))), memoryview(target), None)
    for number, part in enumerate(saved):
        rank.write(number, part)
    return bytes(target)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_identical_bytes_in_any_order_of_the_device(
    monkeypatch: pytest.MonkeyPatch, seed: int, way: str
) -> None:
    run_schedule(make_rank(monkeypatch, seed, way), seed)


@pytest.mark.parametrize(("way", "forgotten"), [("staged", "kernels"), ("batch", "dma")])
def test_without_the_fence_the_schedule_finds_wrong_bytes(
    monkeypatch: pytest.MonkeyPatch, way: str, forgotten: str
) -> None:
    with pytest.raises(WrongBytes):
        run_schedule(make_rank(monkeypatch, 1, way, forgotten), 1)


def test_a_failing_device_costs_the_copy_and_the_gate_stays_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = make_rank(monkeypatch, 1, "staged")
    engine = rank.copier._engine

    def fail(*_arguments: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(engine, "_transfer", fail)
        target = memoryview(bytearray(rank.copier.shard_bytes))
        gate = CopyGate()
        with pytest.raises(CopyError, match="illegal memory access"):
            gate.run(lambda: rank.copier.store(BlockRun(0, 0, (0, 1)), target, None))
    gate.close()
    run_schedule(rank, 2)
