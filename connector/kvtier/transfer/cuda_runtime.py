"""What torch does not offer of the CUDA runtime and driver.

Registering host memory that torch did not allocate, the capture mode of a thread, and copies of
many ranges in one call (``cuMemcpyBatchAsync``, from driver 12.8 on).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvtier.errors import KVTierError
from kvtier.transfer.copy_ranges import Addresses
from kvtier.transfer.driver_calls import DriverCalls, wait_for_calls

cuda: Any = torch.cuda
"""torch has types for few of its CUDA calls."""
REGISTER_THREADS = 8
"""Registering 16 GiB of tmpfs: 5 GiB/s in one call, 21 to 24 GiB/s in pieces by 8 threads."""
PIECE_BYTES = 1 << 30
"""Large enough that boundaries are rare, and small enough to occupy 8 threads from 8 GiB on."""
_PAGE_BYTES = 4096
_REGISTER_PORTABLE = 1
_CAPTURE_RELAXED = 2
_BATCH_VERSION = 12080
"""The version of the driver whose signature of ``cuMemcpyBatchAsync`` is called."""
_SINGLE_VERSION = 12000
"""The same for ``cuMemcpyAsync``."""
LARGE_RANGE_BYTES = 8 << 20
"""Larger ranges are copied by one call each, which reaches the same rate and costs less."""
_ACCESS_IN_STREAM_ORDER = 1


class RegistrationError(KVTierError):
    """The driver did not register the pool (for example, because of the locked-memory limit).

    Copies would not be asynchronous.
    """


def relax_capture(maps: Path = Path("/proc/self/maps")) -> bool:
    """Lets the calling thread use the device while another thread captures a CUDA graph.

    In CUDA's default mode many calls of other threads fail during a capture and invalidate it.
    Calls of a thread in relaxed mode do not. Returns False if the mode cannot be set.
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


def registration_ranges(
    nbytes: int, piece_bytes: int = PIECE_BYTES, threads: int = REGISTER_THREADS
) -> tuple[tuple[int, int], ...]:
    """Returns the ranges (begin, end) of a pool that are registered separately.

    They are page-aligned, have at most ``piece_bytes``, and give each thread two if there are
    enough.
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
    """Page-locks ``ranges`` (relative to ``address``) for the device, and waits for all of them.

    On failure it unregisters what was registered and raises ``RegistrationError``. ``cancelled`` is
    called before each range. Raises ``DriverHangsError`` if the driver hangs: then the memory must
    stay where it is.
    """
    # Threads start with the first device as the current one.
    device = torch.device("cuda", current_device(device))
    done: list[int] = []
    lock = threading.Lock()

    def one(span: tuple[int, int]) -> str:
        if cancelled():
            return "cancelled"
        try:
            register_range(address, span, device)
        except RegistrationError as error:
            return str(error)
        with lock:
            done.append(span[0])
        return ""

    calls = DriverCalls(threads, "kvtier-register")
    try:
        answers = [calls.submit(one, span) for span in ranges]
        wait_for_calls(answers)
    finally:
        calls.close(cancel=True)
    problems = [problem for answer in answers if (problem := answer.result())]
    if problems:
        unregister(address, tuple(done))
        raise RegistrationError(problems[0])


def current_device(device: torch.device) -> int:
    """Returns the index of a device, which for one without an index is the thread's."""
    return int(torch.cuda.current_device() if device.index is None else device.index)


def register_range(address: int, span: tuple[int, int], device: torch.device) -> None:
    """Page-locks one range, relative to ``address``, for a device that has an index. Any thread.

    Raises ``RegistrationError``.
    """
    torch.cuda.set_device(device)
    relax_capture()
    begin, end = span
    code = int(cuda.cudart().cudaHostRegister(address + begin, end - begin, _REGISTER_PORTABLE))
    if code:
        raise RegistrationError(
            f"cudaHostRegister of {end - begin} bytes at offset {begin}: error {code}"
        )


def unregister(address: int, begins: tuple[int, ...]) -> None:
    """Unregisters ranges, to and from which no copy runs.

    Errors are ignored, because nothing could be done about them.
    """
    relax_capture()
    runtime = cuda.cudart()
    for begin in begins:
        runtime.cudaHostUnregister(address + begin)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


def _entry_point(lookup: Any, name: bytes, version: int) -> int:
    """Returns the address of a function of the driver. Raises ``OSError``."""
    pointer = ctypes.c_void_p()
    status = ctypes.c_int()
    code = lookup(
        name,
        ctypes.byref(pointer),
        ctypes.c_int(version),
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    if code or not pointer.value:
        raise OSError(f"{name.decode()}: error {code}, status {status.value}")
    return pointer.value


class BatchCopy:
    """``cuMemcpyBatchAsync``: any number of ranges in one call, in stream order.

    Raises ``OSError`` if the driver does not have it.
    """

    def __init__(self) -> None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            lookup = driver.cuGetProcAddress_v2
        except AttributeError as error:
            raise OSError(f"libcuda.so.1: {error}") from error
        arguments = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] + [ctypes.c_void_p] * 2
        arguments += [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        batch = _entry_point(lookup, b"cuMemcpyBatchAsync", _BATCH_VERSION)
        self._call = ctypes.CFUNCTYPE(ctypes.c_uint, *arguments)(batch)
        single = _entry_point(lookup, b"cuMemcpyAsync", _SINGLE_VERSION)
        self._call_one = ctypes.CFUNCTYPE(
            ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        )(single)
        self._attributes = _Attributes(source_access_order=_ACCESS_IN_STREAM_ORDER)
        self._index = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)

    def __call__(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int
    ) -> None:
        """Queues the copies on ``stream`` (a handle, not the default stream).

        The arrays may be reused at once; the memory that they name must stay valid until the copies
        have run. Raises ``RuntimeError``.
        """
        if len(sizes) and int(sizes.min()) >= LARGE_RANGE_BYTES:
            # In a batch, a range costs the calling thread 60 microseconds per 32 MiB.
            for target, source, size in zip(
                targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
            ):
                code = self._call_one(target, source, size, stream)
                if code:
                    raise RuntimeError(f"cuMemcpyAsync of {size} bytes: error {code}")
            return
        code = self._call(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._index),
            1,
            ctypes.addressof(self._failed),
            stream,
        )
        if code:
            raise RuntimeError(f"cuMemcpyBatchAsync of {len(sizes)} ranges: error {code}")
