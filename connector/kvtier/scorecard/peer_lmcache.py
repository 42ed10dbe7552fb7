"""LMCache's local disk without an engine: ``LocalDiskBackend`` below its CPU allocator, called as
its storage manager calls it.

    python -m kvtier.scorecard.peer_lmcache

Its RAM tier holds nothing, so loads come from files. See ``peer_protocol`` for the protocol. A load
blocks its caller, as it blocks the worker of an engine; a store does not.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.harness.stub_worker import block_hash
from kvtier.scorecard.peer_protocol import OBJECT_BYTES, Answer, expected, is_right, serve

STAGING_BYTES = 64 << 20
CAPACITY_BYTES = 24 << 20


class LMCacheDisk:
    """Its disk tier. One event loop thread serves all directories, as in its storage manager."""

    def __init__(self) -> None:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        self._torch, self._key_type, self._format = torch, CacheEngineKey, MemoryFormat.KV_T2D
        self._config_type, self._allocator_type = LMCacheEngineConfig, HostMemoryAllocator
        self._cpu_type, self._disk_type = LocalCPUBackend, LocalDiskBackend
        self.version = importlib.metadata.version("lmcache")
        self.setting = "LocalDiskBackend, 4 threads, max_local_disk_size 24 MiB"
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._cpu: Any = None
        self._disk: Any = None
        self._stores: list[tuple[int, Any, float]] = []
        self._answers: list[Answer] = []

    def open(self, directory: Path) -> None:
        """A new disk tier for the directory."""
        if self._disk is not None:
            self._disk.close()
        config = self._config_type.from_defaults(
            local_cpu=False,
            max_local_cpu_size=STAGING_BYTES / 2**30,
            local_disk=str(directory),
            max_local_disk_size=CAPACITY_BYTES / 2**30,
        )
        allocator = self._allocator_type(STAGING_BYTES)
        self._cpu = self._cpu_type(config, memory_allocator=allocator, dst_device="cpu")
        self._disk = self._disk_type(config, self._loop, self._cpu, dst_device="cpu")
        self._stores, self._answers = [], []

    def _key(self, number: int) -> Any:
        chunk = int.from_bytes(block_hash(number)[:7], "big")
        return self._key_type("peer", 1, 0, chunk, self._torch.bfloat16)

    def store(self, call: int, number: int) -> None:
        """Submits the store; ``poll`` sees when it is written."""
        started, key = time.monotonic(), self._key(number)
        shape = self._torch.Size([OBJECT_BYTES // 2])
        memory = self._cpu.allocate(shape, self._torch.bfloat16, self._format, busy_loop=False)
        if memory is None:
            self._answers.append(
                {"id": call, "outcome": "dropped", "seconds": time.monotonic() - started}
            )
            return
        np.frombuffer(memory.byte_array, dtype=np.uint8)[:] = expected(number)
        self._disk.batched_submit_put_task([key], [memory])
        memory.ref_count_down()
        self._stores.append((call, key, started))

    def load(self, call: int, numbers: list[int]) -> None:
        """Reads the hits of one request in one call."""
        started = time.monotonic()
        keys: list[Any] = []
        for number in numbers:
            if not self._disk.contains(self._key(number)):
                break
            keys.append(self._key(number))
        found = self._disk.batched_get_blocking(keys) if keys else []
        hits = wrong = 0
        for number, memory in zip(numbers, found, strict=False):
            if memory is None:
                break
            hits += 1
            wrong += not is_right(number, np.frombuffer(memory.byte_array, dtype=np.uint8))
        for memory in found:
            if memory is not None:
                memory.ref_count_down()
        seconds = time.monotonic() - started
        self._answers.append(
            {"id": call, "outcome": "loaded", "hits": hits, "wrong": wrong, "seconds": seconds}
        )

    def poll(self) -> list[Answer]:
        """Completed stores. LMCache keeps a store whose write failed in its list of running tasks,
        so it is never answered.
        """
        answers, self._answers = self._answers, []
        for store in list(self._stores):
            call, key, started = store
            if self._disk.exists_in_put_tasks(key):
                continue
            self._stores.remove(store)
            outcome = "stored" if self._disk.contains(key) else "dropped"
            answers.append({"id": call, "outcome": outcome, "seconds": time.monotonic() - started})
        return answers


if __name__ == "__main__":
    sys.exit(serve(LMCacheDisk))
