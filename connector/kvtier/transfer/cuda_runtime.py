"""What torch does not offer of the CUDA runtime: registering foreign host memory in pieces, and this thread's capture
mode.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kvtier.errors import KVTierError

cuda: Any = torch.cuda
"""torch types few of its CUDA calls."""

REGISTER_THREADS = 8
"""Registering 16 GiB of touched tmpfs: 5 GiB/s in one call, 21 to 24 GiB/s in pieces by 8 threads."""
PIECE_BYTES = 1 << 30
"""One GiB: large enough that seams are rare, small enough that 8 threads have work from 8 GiB on."""
_PAGE_BYTES = 4096
_REGISTER_PORTABLE = 1
_CAPTURE_RELAXED = 2


class RegistrationError(KVTierError):
    """The driver refused to register the pool (locked-memory limit, no such range); copies would not be
    asynchronous.
    """


def relax_capture(maps: Path = Path("/proc/self/maps")) -> bool:
    """Lets the calling thread use the device while another one captures a CUDA graph; ``False`` where that cannot be
    set.

    A capture in CUDA's default mode forbids many calls to every other thread of the process and is spoiled by them. A
    thread in relaxed mode is exempt, and it takes no part in any capture.
    """
    path = _runtime_path(maps)
    if path is None:
        return False
    try:
        exchange = ctypes.CDLL(path).cudaThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return False
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    return int(exchange(ctypes.byref(mode))) == 0


def _runtime_path(maps: Path) -> str | None:
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.split(maxsplit=5)[-1]
        if "libcudart" in path.rsplit("/", 1)[-1]:
            return path
    return None


def cut(nbytes: int, piece_bytes: int = PIECE_BYTES, threads: int = REGISTER_THREADS) -> tuple[tuple[int, int], ...]:
    """Ranges (begin, end) to register one by one: page-aligned, of at most ``piece_bytes``, two per thread where there
    is enough.
    """
    share = -(-nbytes // (2 * threads))
    step = min(piece_bytes, max(share, 64 << 20))
    step = -(-step // _PAGE_BYTES) * _PAGE_BYTES
    return tuple((begin, min(begin + step, nbytes)) for begin in range(0, nbytes, step))


def register(
    address: int,
    ranges: tuple[tuple[int, int], ...],
    device: torch.device,
    cancelled: Callable[[], bool] = lambda: False,
    threads: int = REGISTER_THREADS,
) -> None:
    """Page-locks ``ranges`` (relative to ``address``) for the device; blocks until all are done.

    Raises ``RegistrationError``; what was registered before is given back. ``cancelled`` is asked before each range.
    """
    runtime = cuda.cudart()
    index = torch.cuda.current_device() if device.index is None else device.index
    done: list[int] = []
    lock = threading.Lock()

    def one(span: tuple[int, int]) -> str:
        if cancelled():
            return "cancelled"
        torch.cuda.set_device(index)
        relax_capture()
        begin, end = span
        code = int(runtime.cudaHostRegister(address + begin, end - begin, _REGISTER_PORTABLE))
        if code:
            return f"cudaHostRegister of {end - begin} bytes at offset {begin}: error {code}"
        with lock:
            done.append(begin)
        return ""

    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="kvtier-register") as executor:
        problems = [problem for problem in executor.map(one, ranges) if problem]
    if problems:
        unregister(address, tuple(done))
        raise RegistrationError(problems[0])


def unregister(address: int, begins: tuple[int, ...]) -> None:
    """Gives registered ranges back. Nothing may be copied from or to them any more; a refusal has no consequence that
    could be acted on.
    """
    relax_capture()
    runtime = cuda.cudart()
    for begin in begins:
        runtime.cudaHostUnregister(address + begin)
