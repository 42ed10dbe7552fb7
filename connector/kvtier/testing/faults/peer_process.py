"""Another project's file back end in a process of its own, driven one store or load at a time.

    python -m kvtier.testing.faults.peer_process NAME DIRECTORY

``NAME``: "vllm" (``FileSystemTierManager`` of vLLM's own offloading) or "lmcache" (``LocalDiskBackend`` of LMCache). Both are their projects' classes as they
are, over ordinary memory, without an engine: what is asked is what the storage level does. Standard input takes lines ``store N`` and ``load N``; each is
answered by one line: ``stored``, ``dropped``, ``right``, ``wrong``, ``miss``, or ``error`` with what was raised.
"""

from __future__ import annotations

import asyncio
import mmap
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from kvtier.testing.fake_engine import Bytes, block_hash, content

OBJECT_BYTES = 64 << 10
SLOTS = 8
MEMORY_BYTES = 64 << 20
STORE_SECONDS = 5.0
"""A store that has not ended by then counts as dropped: neither peer's engine waits for stores. For a load both wait without a limit."""
_POLL_SECONDS = 0.002


class Peer(Protocol):
    """Blocks for as long as the peer does."""

    def store(self, number: int) -> bool:
        """False: it was not stored, and no error was raised."""

    def load(self, number: int) -> Bytes | None:
        """The bytes that are said to be the object's; None: a miss."""


class VllmFiles:
    """vLLM's tier. Its scheduler asks until an answer comes and polls for finished jobs; so does this."""

    def __init__(self, directory: Path) -> None:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self._results, self._context, self._make_key, self._job = (
            LookupResult,
            ReqContext,
            make_offload_key,
            TransferJob,
        )
        parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=False)
        config = SimpleNamespace(
            groups=(), parallel=parallel, canonical_layout=False, kv_cache_layout=None, replicated_layout=False,
            model=SimpleNamespace(name="peer", dtype="bfloat16"), cache=SimpleNamespace(tokens_per_hash=16),
        )  # fmt: skip
        # Page-aligned, as its own pinned memory is: direct I/O wants that.
        mapped = mmap.mmap(-1, SLOTS * OBJECT_BYTES)
        self._memory = np.frombuffer(mapped, dtype=np.int8).reshape(SLOTS, OBJECT_BYTES)
        spec: Any = SimpleNamespace(config=config, blocks_per_chunk=1)
        self._tier: Any = FileSystemTierManager(
            spec, memoryview(mapped).cast("b", (SLOTS, OBJECT_BYTES)), "fs", str(directory)
        )
        self._jobs = 0

    def _run(self, submit: Callable[[Any], None], key: bytes, promotion: bool, seconds: float = float("inf")) -> bool:
        deadline = time.monotonic() + seconds
        self._jobs += 1
        context = self._context(req_id=f"r{self._jobs}")
        submit(
            self._job(
                job_id=self._jobs, keys=[key], chunk_ids=np.array([0]), is_promotion=promotion, req_context=context
            )
        )
        while time.monotonic() < deadline:
            for result in self._tier.get_finished_jobs():
                if result.job_id == self._jobs:
                    return bool(result.success)
            time.sleep(_POLL_SECONDS)
        return False

    def store(self, number: int) -> bool:
        """Through the first chunk of its memory."""
        self._memory[0] = content(b"\0" + block_hash(number), OBJECT_BYTES).view(np.int8)
        return self._run(self._tier.submit_store, self._make_key(block_hash(number), 0), False, STORE_SECONDS)

    def load(self, number: int) -> Bytes | None:
        """Lookup, then a promotion."""
        key = self._make_key(block_hash(number), 0)
        context = self._context(req_id=f"look{self._jobs}-{time.monotonic_ns()}")
        while (found := self._tier.lookup(key, context)) is self._results.RETRY:
            self._tier.on_schedule_end(None)
            time.sleep(_POLL_SECONDS)
        self._tier.on_request_finished(context)
        if found is not self._results.HIT:
            return None
        self._memory[0] = 0
        return self._memory[0].view(np.uint8) if self._run(self._tier.submit_load, key, True) else None


class LMCacheFiles:
    """LMCache's local disk below its own allocator."""

    def __init__(self, directory: Path) -> None:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        self._torch, self._key_type, self._format = torch, CacheEngineKey, MemoryFormat.KV_T2D
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False, max_local_cpu_size=0.1, local_disk=str(directory), max_local_disk_size=0.1
        )
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self._cpu: Any = LocalCPUBackend(config, memory_allocator=HostMemoryAllocator(MEMORY_BYTES), dst_device="cpu")
        self._disk: Any = LocalDiskBackend(config, loop, self._cpu, dst_device="cpu")

    def _key(self, number: int) -> Any:
        return self._key_type("peer", 1, 0, int.from_bytes(block_hash(number)[:7], "big"), self._torch.bfloat16)

    def store(self, number: int) -> bool:
        """Until the disk has it, its writing has ended without, or it takes too long."""
        key = self._key(number)
        shape = self._torch.Size([OBJECT_BYTES // 2])
        memory = self._cpu.allocate(shape, self._torch.bfloat16, self._format)
        np.frombuffer(memory.byte_array, dtype=np.uint8)[:] = content(b"\0" + block_hash(number), OBJECT_BYTES)
        self._disk.submit_put_task(key, memory)
        memory.ref_count_down()  # the task holds its own
        deadline = time.monotonic() + STORE_SECONDS
        while self._disk.exists_in_put_tasks(key) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return bool(self._disk.contains(key))

    def load(self, number: int) -> Bytes | None:
        """The blocking read that its engine uses."""
        key = self._key(number)
        if not self._disk.contains(key):
            return None
        memory = self._disk.get_blocking(key)
        if memory is None:
            return None
        found = np.frombuffer(memory.byte_array, dtype=np.uint8).copy()
        memory.ref_count_down()
        return found


PEERS: dict[str, Callable[[Path], Peer]] = {"vllm": VllmFiles, "lmcache": LMCacheFiles}


def _answer(peer: Peer, command: str, number: int) -> str:
    try:
        if command == "store":
            return "stored" if peer.store(number) else "dropped"
        found = peer.load(number)
        if found is None:
            return "miss"
        right = content(b"\0" + block_hash(number), OBJECT_BYTES)
        return "right" if np.array_equal(found[:OBJECT_BYTES], right) else "wrong"
    except Exception as error:  # noqa: BLE001 - whatever a foreign library raises is what is to be reported
        return f"error {type(error).__name__}: {error}".replace("\n", " ")


def main() -> int:
    """Serves until standard input ends."""
    out = sys.stdout
    # What the libraries print must not be taken for an answer.
    sys.stdout = sys.stderr
    peer = PEERS[sys.argv[1]](Path(sys.argv[2]))
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        command, number = line.split()
        print(_answer(peer, command, int(number)), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
