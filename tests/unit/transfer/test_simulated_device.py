"""The CUDA copy engine's order of transfers, kernels and events, on a simulated device.

Every way to copy, random submissions, and a device that runs what is queued as late and in as
unusual an order as streams and events allow. Each rule that keeps the bytes right is left out once:
then the same schedules must find wrong bytes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.simulated_cuda import (
    InvalidAccess,
    SimulatedCudaEngine,
    SimulatedDevice,
    install,
)

from kvtier.transfer import cuda as engine_module
from kvtier.transfer.codec import build_codec
from kvtier.transfer.engine import Copy, CopyHandle, Direction
from kvtier.transfer.startup_check import pageable_scratch
from kvtier.transfer.strided_views import segment_views
from kvtier.transfer.synthetic_layouts import SyntheticGroup, make_every_cache

WAYS = {
    "staged": ("staged", "staged"),
    "batch": ("batch", "batch"),
    "direct": ("direct", "staged"),
}
"""How loads and stores are copied."""
SLOTS = 5
ACTIONS = 120


class WrongBytes(Exception):
    """Memory that does not hold what it must hold."""


@dataclass(slots=True)
class _InFlight:
    handle: CopyHandle
    slot: int
    first: int
    blocks: tuple[int, ...]
    content: Any


class _World:
    """An engine that writes, stores, loads and reads blocks; ``content`` is what must be where."""

    def __init__(
        self,
        seed: int,
        monkeypatch: pytest.MonkeyPatch,
        way: str,
        fault: str = "",
        layout: int = 0,
    ) -> None:
        waits = {"kernels do not wait": "kernels", "transfers do not wait": "dma"}
        forgotten = frozenset({waits[fault]}) if fault in waits else frozenset()
        self.random = random.Random(seed)
        self.fault = fault
        self.device = SimulatedDevice(seed, forgotten)
        engine_class = install(monkeypatch, self.device, table_rows=4, tables=16)
        monkeypatch.setattr(engine_module, "TABLES_PER_SUBMISSION", 4)
        if fault == "tables return at once":
            engine_class = _returning_tables(engine_class)
        cache = make_every_cache()[layout]
        self.codec = build_codec(cache.caches, cache, 64)
        self.group = self.codec.groups[0]
        for tensor in cache.caches.values():
            storage = tensor.untyped_storage()
            self.device.own(storage.data_ptr(), storage.nbytes())
        self.engine = engine_class(
            cache.caches, self.codec, staging_bytes=2 * self.group.block_bytes
        )
        for direction, chosen in zip(
            (Direction.TO_DEVICE, Direction.TO_HOST), WAYS[way], strict=True
        ):
            self.engine.choose(direction, chosen)
        pool = pageable_scratch(SLOTS * self.group.shard_bytes)
        self.device.own(int(pool.memory.ctypes.data), pool.nbytes)
        self.engine.attach(pool)
        self.pool = pool.memory.reshape(SLOTS, self.group.blocks_per_chunk, -1)
        self.views = segment_views(cache.caches, self.codec)[0]
        self.slots: dict[int, Any] = {}
        self.flying: list[_InFlight] = []

    def read_block(self, block: int) -> bytes:
        """Returns a block's bytes in the order of the object."""
        return b"".join(
            view.cache[block].contiguous().view(torch.uint8).numpy().tobytes()
            for view in self.views
        )

    def write_block(self, block: int, content: bytes) -> None:
        start = 0
        for view in self.views:
            target = view.cache[block]
            size = target.numel() * target.element_size()
            part = np.frombuffer(content[start : start + size], dtype=np.uint8).copy()
            target.copy_(torch.from_numpy(part).view(target.dtype).reshape(target.shape))
            start += size

    def kernel(self, blocks: tuple[int, ...], content: list[bytes]) -> None:
        """Queues a kernel of the engine that writes blocks."""

        def run() -> None:
            for block, part in zip(blocks, content, strict=True):
                self.write_block(block, part)

        self.device.compute.queue.append(run)

    def some(self, count: int) -> list[bytes]:
        return [self.random.randbytes(self.group.block_bytes) for _ in range(count)]

    def free_blocks(self, count: int) -> tuple[int, ...]:
        used = {block for each in self.flying for block in each.blocks}
        free = [block for block in range(1, self.codec.num_blocks) if block not in used]
        return tuple(self.random.sample(free, min(count, len(free))))

    def submit(self, direction: Direction, slot: int, load: list[bytes] | None) -> None:
        """Stores new content of some blocks, or loads ``load``."""
        wanted = len(load) if load else self.random.randint(1, self.group.blocks_per_chunk)
        blocks = self.free_blocks(wanted)
        if not blocks or not self.engine.has_room(direction, 1):
            return
        first = self.random.randint(0, wanted - len(blocks)) if load else 0
        before = self.some(len(blocks))
        self.kernel(blocks, before)
        fence = None if self.fault == "no fence" else self.engine.fence()
        copy = Copy(0, slot * self.group.shard_bytes, first, blocks)
        handle = self.engine.submit([copy], direction, fence)
        content = load[first : first + len(blocks)] if load else before
        self.flying.append(_InFlight(handle, slot, first, blocks, content))
        if load and self.random.random() < 0.3:
            self.read_in_order(handle, blocks, content)

    def read_in_order(self, handle: CopyHandle, blocks: tuple[int, ...], content: Any) -> None:
        """A kernel that uses a load that the host has not seen to be complete."""
        if self.fault != "kernels are not ordered":
            self.engine.order_kernels([handle])

        def run() -> None:
            if [self.read_block(block) for block in blocks] != content:
                raise WrongBytes("a kernel read blocks before they were loaded")

        self.device.compute.queue.append(run)

    def act(self) -> None:
        busy = {each.slot for each in self.flying}
        choice = self.random.random()
        empty = [slot for slot in range(SLOTS) if slot not in busy]
        full = [slot for slot in self.slots if slot not in busy]
        if choice < 0.35 and empty:
            slot = self.random.choice(empty)
            self.slots.pop(slot, None)
            self.submit(Direction.TO_HOST, slot, None)
        elif choice < 0.7 and full:
            slot = self.random.choice(full)
            self.submit(Direction.TO_DEVICE, slot, self.slots[slot])
        else:
            for each in list(self.flying):
                if self.engine.done(each.handle):
                    self.complete(each)

    def complete(self, each: _InFlight) -> None:
        self.flying.remove(each)
        if each.handle.direction is Direction.TO_HOST:
            there = [self.pool[each.slot, row].tobytes() for row in range(len(each.blocks))]
            self.slots[each.slot] = each.content
        else:
            there = [self.read_block(block) for block in each.blocks]
        if there != each.content:
            raise WrongBytes(f"{each.handle.direction.value} of {len(each.blocks)} blocks")

    def run(self) -> int:
        """Returns how many copies were compared."""
        compared = 0
        for _ in range(ACTIONS):
            before = len(self.flying)
            self.act()
            compared += max(0, before - len(self.flying))
        self.device.finish()
        for each in list(self.flying):
            if not self.engine.done(each.handle):
                raise WrongBytes("a copy that never ends")
            self.complete(each)
            compared += 1
        return compared


def _returning_tables(base: type[SimulatedCudaEngine]) -> type[SimulatedCudaEngine]:
    class Careless(base):  # type: ignore[misc, valid-type]
        """Uses a table again while its launch has not run."""

        def _fill_table(self, *arguments: Any) -> Any:
            table = super()._fill_table(*arguments)
            self._tables.append(table)
            return table

        def _finish(self, handle: CopyHandle) -> None:
            if handle.state is not None:
                handle.state.tables = []
            super()._finish(handle)

    return Careless


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", range(len(make_every_cache())))
def test_bytes_are_right_in_every_order_that_events_allow(
    way: str, layout: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(6):
        with monkeypatch.context() as patch:
            world = _World(seed, patch, way, layout=layout)
            assert world.run() > 10
            assert len(world.engine._tables) == 16


@pytest.mark.parametrize(
    ("fault", "way"),
    [
        ("tables return at once", "staged"),
        ("tables return at once", "direct"),
        ("kernels do not wait", "staged"),
        ("kernels do not wait", "direct"),
        ("transfers do not wait", "staged"),
        ("transfers do not wait", "batch"),
        ("no fence", "staged"),
        ("no fence", "batch"),
        ("no fence", "direct"),
        ("kernels are not ordered", "staged"),
    ],
)
def test_without_any_one_rule_bytes_are_wrong(
    fault: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = 0
    for seed in range(10):
        with monkeypatch.context() as patch:
            try:
                _World(seed, patch, way, fault).run()
            except (WrongBytes, InvalidAccess):
                found += 1
    assert found > 0


def test_a_stage_without_a_layer_of_the_first_group_copies_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimulatedDevice(1, frozenset())
    engine_class = install(monkeypatch, device, table_rows=4, tables=16)
    monkeypatch.setattr(engine_module, "TABLES_PER_SUBMISSION", 4)
    cache = make_every_cache()[0]
    groups = (SyntheticGroup((), cache.kv_cache_groups[0].kv_cache_spec), *cache.kv_cache_groups)
    codec = build_codec(cache.caches, replace(cache, kv_cache_groups=groups), 64)
    for tensor in cache.caches.values():
        storage = tensor.untyped_storage()
        device.own(storage.data_ptr(), storage.nbytes())
        tensor.view(torch.uint8).random_(1, 250)
    block_bytes = codec.groups[1].block_bytes
    engine = engine_class(cache.caches, codec, staging_bytes=2 * block_bytes)
    assert engine.batch_bytes == 4 * block_bytes
    pool = pageable_scratch(codec.shard_bytes[1])
    device.own(int(pool.memory.ctypes.data), pool.nbytes)
    engine.attach(pool)
    nothing = engine.submit([Copy(0, 0, 0, (1, 2))], Direction.TO_HOST, engine.fence())
    assert engine.done(nothing)
    both = [Copy(0, 0, 0, (1, 2)), Copy(1, 0, 0, (1, 2))]
    handle = engine.submit(both, Direction.TO_HOST, engine.fence())
    assert handle.total_bytes == 2 * block_bytes
    engine.wait_idle()
    assert engine.done(handle)
    expected = b"".join(
        view.cache[block].contiguous().view(torch.uint8).numpy().tobytes()
        for block in (1, 2)
        for view in segment_views(cache.caches, codec)[1]
    )
    assert any(expected)
    assert pool.memory[: len(expected)].tobytes() == expected
