"""Selects the copy engine for the device of the KV cache, and registers pools with that device.

Separate from ``engine`` because it imports every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from kvtier.transfer.codec import Codec, CodecError, layer_tensors
from kvtier.transfer.cpu import CpuCopyEngine
from kvtier.transfer.cuda import CudaCopyEngine
from kvtier.transfer.cuda_runtime import (
    register,
    register_range,
    registration_ranges,
    unregister,
)
from kvtier.transfer.driver_calls import DriverHangsError, keep_for_driver
from kvtier.transfer.engine import CopyEngine
from kvtier.transfer.host_pool import HostPool


def cache_device(kv_caches: Mapping[str, object], codec: Codec) -> torch.device:
    """Returns the device of all layers. Raises ``CodecError`` if there are several."""
    devices = {tensor.device for tensor in layer_tensors(kv_caches, codec).values()}
    if len(devices) != 1:
        raise CodecError(f"the KV cache is on several devices: {sorted(map(str, devices))}")
    return devices.pop()


def make_engine(kv_caches: Mapping[str, object], codec: Codec) -> CopyEngine:
    """Returns the copy engine for the device of the caches.

    Raises ``CodecError`` if there is none.
    """
    device = cache_device(kv_caches, codec)
    if device.type == "cpu":
        return CpuCopyEngine(kv_caches, codec)
    if device.type == "cuda":
        return CudaCopyEngine(kv_caches, codec)
    raise CodecError(f"no copy engine for {device.type} devices")


def register_pool(
    pool: HostPool, device: torch.device, cancelled: Callable[[], bool] = lambda: False
) -> tuple[HostPool, tuple[int, ...]]:
    """Registers ``pool`` with the device, if the device needs that for asynchronous copies.

    Returns the pool with its boundaries, and what ``unregister_pool`` needs. May take seconds.
    Raises ``RegistrationError``, or ``DriverHangsError``. Any thread.
    """
    if device.type != "cuda":
        return pool, ()
    ranges = registration_ranges(pool.nbytes)
    try:
        register(pool.memory.ctypes.data, ranges, device, cancelled)
    except DriverHangsError:
        keep_for_driver(pool)
        raise
    begins = tuple(begin for begin, _ in ranges)
    return replace(pool, boundaries=begins[1:]), begins


def unregister_pool(pool: HostPool, begins: tuple[int, ...]) -> None:
    """Undoes ``register_pool``. No copy may run."""
    if begins:
        unregister(pool.memory.ctypes.data, begins)


def pool_registration(
    index: int,
) -> tuple[
    Callable[[int], tuple[tuple[int, int], ...]],
    Callable[[HostPool, tuple[int, int]], None],
    Callable[[HostPool, tuple[int, ...]], None],
]:
    """Returns how a pool is registered with the CUDA device ``index`` range by range: the ranges of
    so many bytes, the call for one of them, which raises ``RegistrationError``, and
    ``unregister_pool``."""
    device = torch.device("cuda", index)

    def register_one(pool: HostPool, span: tuple[int, int]) -> None:
        register_range(pool.memory.ctypes.data, span, device)

    return registration_ranges, register_one, unregister_pool
