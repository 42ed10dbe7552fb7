"""Bit-exact round trips through a shared pool, for every known layout, on a CPU or GPU.

    python -m kvtier.transfer.selftest [--device cuda] [--bytes N]

Prints one JSON object; the exit status is 1 if any byte differs. ``--bytes`` also measures the copy
rates in both directions, with caches of about that size.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvtier.transfer.calibration import SCRATCH_BYTES, calibrate
from kvtier.transfer.codec import Codec, CodecError, build_codec
from kvtier.transfer.cuda import CudaCopyEngine
from kvtier.transfer.cuda_runtime import cuda
from kvtier.transfer.engine import Copy, CopyEngine, CopyError, CopyHandle, Direction
from kvtier.transfer.factory import make_engine, register_pool, unregister_pool
from kvtier.transfer.host_pool import HostPool, open_pool
from kvtier.transfer.startup_check import pageable_scratch, pinned_scratch, verify_round_trip
from kvtier.transfer.strided_views import word_dtype
from kvtier.transfer.synthetic_layouts import (
    LAYOUT_NAMES,
    CacheGeometry,
    SyntheticCache,
    make_cache,
    make_every_cache,
)

_CHUNK_BLOCKS = 4
_WAIT_SECONDS = 60.0
_SLEEP_CYCLES = 50_000_000
"""About 30 ms on a card of 1.7 GHz: far longer than the copies of these small caches."""
_POOL_DIRECTORY = "/dev/shm"  # noqa: S108  memory is meant: this is where pools live
_MEASURED = tuple(LAYOUT_NAMES[index] for index in (0, 1, 2, 5))


@dataclass(frozen=True, slots=True)
class _Bench:
    layout: SyntheticCache
    codec: Codec
    engine: CopyEngine
    pool: HostPool


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--pool-dir", default=_POOL_DIRECTORY, help="memory-backed directory for the pool"
    )
    parser.add_argument(
        "--bytes",
        type=int,
        default=0,
        help="also measure copy rates, with a cache of about this many bytes",
    )
    options = parser.parse_args(arguments)
    geometries = (
        CacheGeometry(),
        CacheGeometry(layers=2, block=32, heads=1, head_dim=3, dtype=torch.uint8),
    )
    layouts = [
        layout for geometry in geometries for layout in make_every_cache(geometry, options.device)
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
                make_cache(name, _large(options.bytes), options.device),
                options.device,
                Path(options.pool_dir),
            )
            for name in _MEASURED
        ]
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0 if report["ok"] else 1


def _check(layout: SyntheticCache, device: str, directory: Path) -> dict[str, object]:
    result: dict[str, object] = {"layout": layout.name, "ok": False}
    try:
        bench, release = _bench(layout, device, directory, slots=3)
        try:
            verify_round_trip(
                layout.caches,
                bench.codec,
                bench.engine,
                pinned_scratch if device != "cpu" else pageable_scratch,
            )
            bench.engine.attach(bench.pool)
            wrong = _whole_and_parts(bench)
            if isinstance(bench.engine, CudaCopyEngine):
                wrong += _every_way(bench, bench.engine)
                wrong += [f"split up: {name}" for name in _whole_and_parts(_split_up(bench))]
                wrong += _out_of_order(bench)
            result["wrong"] = wrong
            result["ok"] = not result["wrong"]
            result["segments"] = len(bench.codec.groups[0].segments)
        finally:
            release()
    except (CodecError, CopyError) as error:
        result["error"] = str(error)
    return result


def _whole_and_parts(bench: _Bench) -> list[str]:
    """Stores a chunk and loads every sub-range of it elsewhere; returns what differs."""
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


def _every_way(bench: _Bench, engine: CudaCopyEngine) -> list[str]:
    wrong = []
    for load in engine.ways(Direction.TO_DEVICE):
        for store in engine.ways(Direction.TO_HOST):
            engine.choose(Direction.TO_DEVICE, load)
            engine.choose(Direction.TO_HOST, store)
            wrong += [f"{load}, {store}: {name}" for name in _whole_and_parts(bench)]
    return wrong


def _split_up(bench: _Bench) -> _Bench:
    """The same with a staging buffer of one block, and with boundaries at odd places."""
    engine = CudaCopyEngine(bench.layout.caches, bench.codec, staging_bytes=1)
    shard = bench.codec.groups[0].shard_bytes
    pool = replace(bench.pool, boundaries=tuple(range(333, 3 * shard, 777)))
    engine.attach(pool)
    return replace(bench, engine=engine, pool=pool)


def _out_of_order(bench: _Bench) -> list[str]:
    """Submits copies while kernels are queued.

    A store must see what they write, and a load must not change what they read.
    """
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


def _snapshot(layout: SyntheticCache) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in layout.caches.items()}


def _restore(layout: SyntheticCache, original: dict[str, torch.Tensor]) -> None:
    for name, tensor in layout.caches.items():
        tensor.copy_(original[name])


def _differences(
    layout: SyntheticCache, original: dict[str, torch.Tensor], moved: dict[int, int]
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


def _large(nbytes: int) -> CacheGeometry:
    """An 8B model with grouped queries, with as many blocks as fit."""
    geometry = CacheGeometry(layers=32, blocks=0, block=16, heads=8, head_dim=128)
    return replace(geometry, blocks=max(64, nbytes // (geometry.layers * geometry.page_bytes)))


def _measure(layout: SyntheticCache, device: str, directory: Path) -> dict[str, object]:
    """GB/s of 16-block chunks, 8 to a submission, best of 5."""
    bench, release = _bench(layout, device, directory, slots=8, chunk_blocks=16)
    try:
        scratch = pinned_scratch if device != "cpu" else pageable_scratch
        calibration = calibrate(bench.engine, scratch(SCRATCH_BYTES))
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
            "engine": bench.engine.kind,
            "calibration": {name: round(rate / 1e9, 1) for name, rate in calibration.items()},
            **{name: round(rate, 1) for name, rate in rates.items()},
        }
    finally:
        release()


def _bench(  # type: ignore[no-untyped-def]
    layout: SyntheticCache,
    device: str,
    directory: Path,
    slots: int,
    chunk_blocks: int = _CHUNK_BLOCKS,
):
    block = layout.kv_cache_groups[0].kv_cache_spec.block_size
    codec = build_codec(layout.caches, layout, block * chunk_blocks)
    engine = make_engine(layout.caches, codec)
    shard = -(-codec.groups[0].shard_bytes // 4096) * 4096
    with tempfile.NamedTemporaryFile(dir=directory, prefix="kvtier-selftest-") as file:
        file.truncate(shard * slots)
        pool = open_pool(Path(file.name), shard * slots)
    pool, begins = register_pool(pool, torch.device(device))

    def release() -> None:
        engine.close()
        unregister_pool(pool, begins)

    return _Bench(layout, codec, engine, pool), release


if __name__ == "__main__":
    sys.exit(main())
