"""When a killed process's lock is free and its GPU has stopped, on a machine with an NVIDIA GPU.

    python -m tests.support.device_release

A process registers a shared file with the GPU, copies into it continuously, and is killed. Once the
lock that proves its end (``kvtier.tierd.liveness``) is free, the whole file is marked: a mark that
changes later was overwritten by the GPU after the process exited. Measured with and without a
descriptor that is reserved before the device is opened. One line per round.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

from kvtier.processes import Liveness, ProcessIdentity, liveness_of, pid_namespace, process_start
from kvtier.tierd import liveness

POOL_BYTES = 2 << 30
PIECE_BYTES = 256 << 20
MARK_EVERY_BYTES = 1 << 20
MARK = 0xFF
ROUNDS = 5
WATCH_SECONDS = 1.0
_ENDLESS_SECONDS = 60.0


def copy_endlessly(directory: Path, reserved: bool) -> None:
    """The process that is killed: only the driver's library, no CUDA toolkit."""
    if reserved:
        liveness.reserve_descriptor()
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        status = getattr(driver, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: {status}")

    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
    with (directory / "pool").open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), POOL_BYTES, mmap.MAP_SHARED)
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    call("cuMemHostRegister_v2", ctypes.c_void_p(base), ctypes.c_size_t(POOL_BYTES), 1)
    sources = []
    for value in (0x11, 0x22):
        source = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(source), ctypes.c_size_t(PIECE_BYTES))
        call("cuMemsetD8_v2", source, ctypes.c_ubyte(value), ctypes.c_size_t(PIECE_BYTES))
        sources.append(source)
    print(liveness.hold_peer_lock(directory), flush=True)
    while True:
        for source in sources:
            for offset in range(0, POOL_BYTES, PIECE_BYTES):
                target = ctypes.c_void_p(base + offset)
                call("cuMemcpyDtoHAsync_v2", target, source, ctypes.c_size_t(PIECE_BYTES), None)
        call("cuCtxSynchronize")


def measure(directory: Path, reserved: bool) -> dict[str, object]:
    """One round. Times in milliseconds after the kill."""
    pool = directory / "pool"
    with pool.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, POOL_BYTES)
    command = [
        sys.executable,
        "-m",
        "tests.support.device_release",
        str(directory),
        str(int(reserved)),
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    identity = ProcessIdentity(child.pid, process_start(child.pid), pid_namespace())
    time.sleep(1.0)
    with pool.open("r+b") as file:
        view = mmap.mmap(file.fileno(), POOL_BYTES, mmap.MAP_SHARED)
    marks = range(0, POOL_BYTES, MARK_EVERY_BYTES)
    started = time.monotonic()
    child.kill()
    free = gone = late = 0.0
    end = started + _ENDLESS_SECONDS
    while time.monotonic() < end:
        if not free and liveness.is_lock_held(directory / liveness.PEERS_NAME, name) is False:
            free = time.monotonic() - started
            for offset in marks:
                view[offset] = MARK
        if free:
            for offset in marks:
                if view[offset] != MARK:
                    view[offset] = MARK
                    late = time.monotonic() - started
        if not gone and liveness_of(identity) is Liveness.GONE:
            gone = time.monotonic() - started
        if free and gone:
            end = min(end, started + max(free, gone) + WATCH_SECONDS)
    child.wait()
    child.stdout.close()
    view.close()
    pool.unlink()
    found = {"lock_free": free, "process_gone": gone, "last_write_after_lock": late}
    return {"reserved": reserved} | {
        key: round(1000 * seconds, 1) for key, seconds in found.items()
    }


def main() -> int:
    """The program."""
    if len(sys.argv) == 3:
        copy_endlessly(Path(sys.argv[1]), sys.argv[2] == "1")
    directory = Path(f"/dev/shm/kvtier-device-release-{os.getpid()}")
    directory.mkdir()
    try:
        for _ in range(ROUNDS):
            for reserved in (True, False):
                print(json.dumps(measure(directory, reserved)), flush=True)
    finally:
        for path in sorted(directory.rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()
        directory.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main())
