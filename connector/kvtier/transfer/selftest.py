"""KV caches in the layouts that engines use, for the self-test and for tests: tensors, and the specification that goes
with them.

``python -m kvtier.transfer.selftest [--device cuda]``: bit-exact round trips through a shared pool, for every known
layout.

Prints one JSON object; exit status 1 if anything came back wrong. ``--bytes`` also measures both directions with caches
of that size.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kvtier.transfer.codec import Codec, CodecError, build_codec, word_dtype
from kvtier.transfer.cuda import CudaCopyEngine, cuda
from kvtier.transfer.engine import Copy, CopyEngine, CopyError, CopyHandle, Direction
from kvtier.transfer.factory import make_engine, pin, unpin
from kvtier.transfer.host_pool import HostPool, open_pool
from kvtier.transfer.startup_check import pinned_scratch, plain_scratch, prove


@dataclass(frozen=True, slots=True)
class Spec:
    """Stands for a KV cache specification: ``block_size`` in tokens."""

    block_size: int
    page_size_bytes: int
    page_size_padded: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Stands for a KV cache group."""

    layer_names: tuple[str, ...]
    kv_cache_spec: Spec


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """``caches``: layer name to tensor. Also serves as the KV cache configuration."""

    name: str
    caches: dict[str, torch.Tensor]
    num_blocks: int
    kv_cache_groups: tuple[Group, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a made-up model."""

    layers: int = 3
    blocks: int = 12
    block: int = 16
    heads: int = 2
    head_dim: int = 8
    dtype: torch.dtype = torch.bfloat16

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return 2 * self.heads * self.block * self.head_dim * self.dtype.itemsize

    @property
    def page_elements(self) -> int:
        """Elements of one block of one layer."""
        return 2 * self.heads * self.block * self.head_dim


def _noise(elements: int, geometry: Geometry, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(elements)
    nbytes = elements * geometry.dtype.itemsize
    noise = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator, device=device)
    return noise.view(geometry.dtype)


def _layout(
    name: str, geometry: Geometry, tensors: list[torch.Tensor], padded: int | None = None
) -> Layout:
    caches = {f"model.layers.{index}.attn": tensor for index, tensor in enumerate(tensors)}
    spec = Spec(geometry.block, padded or geometry.page_bytes, padded)
    return Layout(name, caches, geometry.blocks, (Group(tuple(caches), spec),))


Build = Callable[[Geometry, str], list[torch.Tensor]]


def _each(g: Geometry, device: str, *shape: int) -> list[torch.Tensor]:
    """One storage per layer."""
    return [_noise(g.blocks * g.page_elements, g, device).view(shape) for _ in range(g.layers)]


def _one_storage(g: Geometry, device: str) -> list[torch.Tensor]:
    shape = g.layers, g.blocks, g.heads, g.block, 2 * g.head_dim
    return list(_noise(g.layers * g.blocks * g.page_elements, g, device).view(shape))


def _interleaved(g: Geometry, device: str) -> list[torch.Tensor]:
    shape = g.blocks, g.layers, g.heads, g.block, 2 * g.head_dim
    return list(_noise(g.layers * g.blocks * g.page_elements, g, device).view(shape).unbind(1))


def _crossed(g: Geometry, device: str) -> list[torch.Tensor]:
    shape = g.blocks, g.heads, g.layers, 2, g.block, g.head_dim
    storage = _noise(g.layers * g.blocks * g.page_elements, g, device).view(shape)
    return [layer.permute(0, 2, 3, 1, 4) for layer in storage.unbind(2)]


def _padded(g: Geometry, device: str) -> list[torch.Tensor]:
    row = g.heads * g.head_dim
    step = g.page_elements + _PADDING
    storages = [_noise(g.blocks * step, g, device) for _ in range(g.layers)]
    return [
        x.as_strided((g.blocks, 2, g.block, row), (step, g.page_elements // 2, row, 1))
        for x in storages
    ]


def _heads_first(g: Geometry, device: str, *outer: int) -> list[torch.Tensor]:
    return [
        x.permute(0, 1, 3, 2, 4) for x in _each(g, device, *outer, g.heads, g.block, g.head_dim)
    ]


_PADDING = 64
_BUILDERS: dict[str, Build] = {
    "cpu: blocks, heads, tokens, keys and values; one storage": _one_storage,
    "layers interleaved inside each block": _interleaved,
    "blocks first, tokens before heads": lambda g, d: _each(
        g, d, g.blocks, 2, g.block, g.heads, g.head_dim
    ),
    "keys and values first": lambda g, d: _each(g, d, 2, g.blocks, g.block, g.heads, g.head_dim),
    "blocks first, heads before tokens by strides": lambda g, d: _heads_first(g, d, g.blocks, 2),
    "keys and values first, heads before tokens by strides": lambda g, d: _heads_first(
        g, d, 2, g.blocks
    ),
    "heads outside layers, in pieces": _crossed,
    "two kernel blocks a block": lambda g, d: _each(
        g, d, 2 * g.blocks, 2, g.block // 2, g.heads, g.head_dim
    ),
    "padded pages": _padded,
    "latent vectors, no heads": lambda g, d: _each(
        g, d, g.blocks, g.block, g.page_elements // g.block
    ),
}
LAYOUT_NAMES = tuple(_BUILDERS)


def make_layout(name: str, geometry: Geometry | None = None, device: str = "cpu") -> Layout:
    """The cache of one known layout, filled with noise."""
    geometry = geometry or Geometry()
    padded = (
        geometry.page_bytes + _PADDING * geometry.dtype.itemsize
        if _BUILDERS[name] is _padded
        else None
    )
    return _layout(name, geometry, _BUILDERS[name](geometry, device), padded)


def every_layout(geometry: Geometry | None = None, device: str = "cpu") -> list[Layout]:
    """One cache per known layout."""
    return [make_layout(name, geometry, device) for name in LAYOUT_NAMES]


_CHUNK_BLOCKS = 4
_WAIT_SECONDS = 60.0
_SLEEP_CYCLES = 50_000_000
"""About 30 ms on a card of 1.7 GHz: far longer than the copies of these small caches."""
_POOL_DIRECTORY = "/dev/shm"  # noqa: S108  memory is meant: this is where pools live
_MEASURED = tuple(LAYOUT_NAMES[index] for index in (0, 1, 2, 5))


@dataclass(frozen=True, slots=True)
class _Bench:
    layout: Layout
    codec: Codec
    engine: CopyEngine
    pool: HostPool


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pool-dir", default=_POOL_DIRECTORY, help="a memory-backed directory")
    parser.add_argument(
        "--bytes", type=int, default=0, help="measure with a cache of about this many bytes"
    )
    options = parser.parse_args(arguments)
    geometries = (Geometry(), Geometry(layers=2, block=32, heads=1, head_dim=3, dtype=torch.uint8))
    layouts = [
        layout for geometry in geometries for layout in every_layout(geometry, options.device)
    ]
    results = [_check(layout, options.device, Path(options.pool_dir)) for layout in layouts]
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "layouts": results,
        "ok": all(result["ok"] for result in results),
    }
    if options.bytes:
        report["rates"] = [
            _measure(
                make_layout(name, _large(options.bytes), options.device),
                options.device,
                Path(options.pool_dir),
            )
            for name in _MEASURED
        ]
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0 if report["ok"] else 1


def _check(layout: Layout, device: str, directory: Path) -> dict[str, object]:
    result: dict[str, object] = {"layout": layout.name, "ok": False}
    try:
        bench, release = _bench(layout, device, directory, slots=3)
        try:
            prove(
                layout.caches,
                bench.codec,
                bench.engine,
                pinned_scratch if device != "cpu" else plain_scratch,
            )
            bench.engine.attach(bench.pool)
            wrong = _whole_and_parts(bench)
            if device != "cpu":
                wrong += [f"cut up: {name}" for name in _whole_and_parts(_cut_up(bench))]
                wrong += _out_of_order(bench)
            result["wrong"] = wrong
            result["ok"] = not result["wrong"]
            result["bands"] = len(bench.codec.groups[0].bands)
        finally:
            release()
    except (CodecError, CopyError) as error:
        result["error"] = str(error)
    return result


def _whole_and_parts(bench: _Bench) -> list[str]:
    """Stores a chunk, then loads the whole and every sub-range of it elsewhere; returns what differed."""
    wrong: list[str] = []
    source, target = (1, 9, 3, 7), (2, 8, 10, 5)
    shard = bench.codec.groups[0].shard_bytes
    offset = -(-shard // 4096) * 4096
    original = _snapshot(bench.layout)
    _run(bench.engine, [Copy(0, offset, 0, source)], Direction.TO_HOST)
    for first in range(_CHUNK_BLOCKS):
        for end in range(first + 1, _CHUNK_BLOCKS + 1):
            _run(bench.engine, [Copy(0, offset, first, target[first:end])], Direction.TO_DEVICE)
            moved = dict(zip(target[first:end], source[first:end], strict=True))
            wrong += [
                f"blocks {first}..{end}: {name}"
                for name in _differences(bench.layout, original, moved)
            ]
            _restore(bench.layout, original)
    return wrong


def _cut_up(bench: _Bench) -> _Bench:
    """The same with a staging buffer for one block, so that it is used again and again, and with seams at odd places."""
    engine = CudaCopyEngine(bench.layout.caches, bench.codec, staging_bytes=1)
    shard = bench.codec.groups[0].shard_bytes
    pool = replace(bench.pool, seams=tuple(range(333, 3 * shard, 777)))
    engine.attach(pool)
    return replace(bench, engine=engine, pool=pool)


def _out_of_order(bench: _Bench) -> list[str]:
    """Kernels that are still queued when a copy is submitted: a store must see what they write, a load must not spoil what they read."""
    wrong: list[str] = []
    layout, engine = bench.layout, bench.engine
    original = _snapshot(layout)
    blocks = (1, 2, 3, 4)
    cuda.current_stream().synchronize()
    cuda._sleep(_SLEEP_CYCLES)
    for tensor in layout.caches.values():
        tensor.view(word_dtype(tensor.element_size())).bitwise_not_()
    fence: Any = engine.fence()
    handle = engine.submit([Copy(0, 0, 0, blocks)], Direction.TO_HOST, fence)
    if engine.done(handle) and not fence.query():
        wrong.append("a store was done before the kernels that it waits for")
    _wait(engine, handle)
    cuda._sleep(_SLEEP_CYCLES)
    seen = _snapshot(layout)
    _restore(layout, original)
    handle = engine.submit([Copy(0, 0, 0, blocks)], Direction.TO_DEVICE, engine.fence())
    _wait(engine, handle)
    for name, tensor in layout.caches.items():
        bits = word_dtype(tensor.element_size())
        inverted = original[name].view(bits).bitwise_not()
        if not torch.equal(seen[name].view(bits), inverted):
            wrong.append(f"{name}: a load overtook a kernel that reads")
        dim = 0 if tensor.shape[0] >= layout.num_blocks else 1
        ratio = tensor.shape[dim] // layout.num_blocks
        ours = (dim, ratio, len(blocks) * ratio)
        if not torch.equal(tensor.view(bits).narrow(*ours), inverted.narrow(*ours)):
            wrong.append(
                f"{name}: a store overtook a kernel that writes, or a load one that writes"
            )
    _restore(layout, original)
    cuda.current_stream().synchronize()
    return wrong


def _snapshot(layout: Layout) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in layout.caches.items()}


def _restore(layout: Layout, original: dict[str, torch.Tensor]) -> None:
    for name, tensor in layout.caches.items():
        tensor.copy_(original[name])


def _differences(
    layout: Layout, original: dict[str, torch.Tensor], moved: dict[int, int]
) -> list[str]:
    wrong = []
    for name, tensor in layout.caches.items():
        expected = original[name].clone()
        dim = 0 if tensor.shape[0] >= layout.num_blocks else 1
        ratio = tensor.shape[dim] // layout.num_blocks
        for target, source in moved.items():
            expected.narrow(dim, target * ratio, ratio).copy_(
                original[name].narrow(dim, source * ratio, ratio)
            )
        bits = torch.uint8 if tensor.element_size() == 1 else torch.int16
        if not torch.equal(expected.view(bits), tensor.view(bits)):
            wrong.append(name)
    return wrong


def _run(engine: CopyEngine, copies: list[Copy], direction: Direction) -> float:
    begin = time.perf_counter()
    _wait(engine, engine.submit(copies, direction, engine.fence()))
    return time.perf_counter() - begin


def _wait(engine: CopyEngine, handle: CopyHandle) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not engine.done(handle):
        if time.monotonic() > deadline:
            raise CopyError(
                f"a copy of {handle.total_bytes} bytes did not end within {_WAIT_SECONDS:.0f} s"
            )
        time.sleep(0.0001)


def _large(nbytes: int) -> Geometry:
    """An 8B model with grouped queries, with as many blocks as fit."""
    geometry = Geometry(layers=32, blocks=0, block=16, heads=8, head_dim=128)
    return replace(geometry, blocks=max(64, nbytes // (geometry.layers * geometry.page_bytes)))


def _measure(layout: Layout, device: str, directory: Path) -> dict[str, object]:
    """GB/s of 16-block chunks, 8 to a submission, best of 5."""
    bench, release = _bench(layout, device, directory, slots=8, chunk_blocks=16)
    try:
        bench.engine.attach(bench.pool)
        shard = -(-bench.codec.groups[0].shard_bytes // 4096) * 4096
        per = min(8, (layout.num_blocks - 1) // 16)
        copies = [Copy(0, i * shard, 0, tuple(range(1 + 16 * i, 17 + 16 * i))) for i in range(per)]
        total = sum(bench.engine.copy_bytes(copy) for copy in copies)
        rates = {
            d.value: total / min(_run(bench.engine, copies, d) for _ in range(5)) / 1e9
            for d in Direction
        }
        return {
            "layout": layout.name,
            "bytes": total,
            **{name: round(rate, 1) for name, rate in rates.items()},
        }
    finally:
        release()


def _bench(  # type: ignore[no-untyped-def]
    layout: Layout, device: str, directory: Path, slots: int, chunk_blocks: int = _CHUNK_BLOCKS
):
    block = layout.kv_cache_groups[0].kv_cache_spec.block_size
    codec = build_codec(layout.caches, layout, block * chunk_blocks)
    engine = make_engine(layout.caches, codec)
    shard = -(-codec.groups[0].shard_bytes // 4096) * 4096
    with tempfile.NamedTemporaryFile(dir=directory, prefix="kvtier-selftest-") as file:
        file.truncate(shard * slots)
        pool = open_pool(Path(file.name), shard * slots)
    pool, begins = pin(pool, torch.device(device))

    def release() -> None:
        engine.close()
        unpin(pool, begins)

    return _Bench(layout, codec, engine, pool), release


if __name__ == "__main__":
    sys.exit(main())
