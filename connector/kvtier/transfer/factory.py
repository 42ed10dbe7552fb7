"""Chooses the copy engine for where the KV cache lies, and prepares a pool for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from kvtier.transfer.codec import Codec, CodecError, layer_tensors
from kvtier.transfer.cpu import CpuCopyEngine
from kvtier.transfer.cuda import CudaCopyEngine, cut, register, unregister
from kvtier.transfer.engine import CopyEngine
from kvtier.transfer.host_pool import HostPool


def cache_device(kv_caches: Mapping[str, object], codec: Codec) -> torch.device:
    """The one device that all layers lie on. Raises ``CodecError`` if there are several."""
    devices = {tensor.device for tensor in layer_tensors(kv_caches, codec).values()}
    if len(devices) != 1:
        raise CodecError(f"the KV cache is spread over {sorted(map(str, devices))}")
    return devices.pop()


def make_engine(kv_caches: Mapping[str, object], codec: Codec) -> CopyEngine:
    """The copy engine for the caches' device. Raises ``CodecError`` for a kind of device that has none."""
    device = cache_device(kv_caches, codec)
    if device.type == "cpu":
        return CpuCopyEngine(kv_caches, codec)
    if device.type == "cuda":
        return CudaCopyEngine(kv_caches, codec)
    raise CodecError(f"there is no copy engine for {device.type} devices")


def pin(
    pool: HostPool, device: torch.device, cancelled: Callable[[], bool] = lambda: False
) -> tuple[HostPool, tuple[int, ...]]:
    """Makes ``pool`` fit for asynchronous copies with ``device``: registers it where the device needs that. May take
    seconds.

    Returns the pool with its seams, and what ``unpin`` needs. Raises ``RegistrationError``. Any thread.
    """
    if device.type != "cuda":
        return pool, ()
    ranges = cut(pool.nbytes)
    register(pool.memory.ctypes.data, ranges, device, cancelled)
    begins = tuple(begin for begin, _ in ranges)
    return replace(pool, seams=begins[1:]), begins


def unpin(pool: HostPool, begins: tuple[int, ...]) -> None:
    """Undoes ``pin``. Nothing may be copied any more."""
    if begins:
        unregister(pool.memory.ctypes.data, begins)
