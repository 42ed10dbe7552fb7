"""vLLM's ``OffloadingConnector`` on the CPU engine, for tests: its scheduler side, managers and
worker protocol are vLLM's; only the copies, which vLLM offers for accelerators, are plain ones.

    {"spec_name": "CopyingSpec", "spec_module_path": "offloading_on_cpu",
     "cpu_bytes_to_use": ...}
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies blocks while the job is submitted."""

    def __init__(self, caches: Any, blocks_per_chunk: int, chunks: int) -> None:
        self.groups = caches.group_data_refs
        self.blocks_per_chunk = blocks_per_chunk
        self.results: list[TransferResult] = []
        pages = [each.page_size_bytes for each in caches.tensors]
        self.pages = pages
        self.engine = [
            each.tensor.view(torch.int8).view(-1, page)
            for each, page in zip(caches.tensors, pages, strict=True)
        ]
        self.host = [
            torch.zeros((chunks, page * blocks_per_chunk), dtype=torch.int8) for page in pages
        ]

    def _copy(self, job: Any, blocks: Any, chunks: Any, *, store: bool) -> bool:
        begin, moved = time.time(), 0
        block_offset = chunk_offset = 0
        for group, (size, first) in enumerate(
            zip(blocks.group_sizes, blocks.block_indices, strict=True)
        ):
            skipped = first % self.blocks_per_chunk
            for index in range(size):
                block = int(blocks.block_ids[block_offset + index])
                position, part = divmod(skipped + index, self.blocks_per_chunk)
                chunk = int(chunks.block_ids[chunk_offset + position])
                for reference in self.groups[group]:
                    length = reference.page_size_bytes
                    at = part * self.pages[reference.tensor_idx]
                    device = self.engine[reference.tensor_idx][block, :length]
                    host = self.host[reference.tensor_idx][chunk, at : at + length]
                    host.copy_(device) if store else device.copy_(host)
                    moved += length
            block_offset += size
            chunk_offset += -(-(size + skipped) // self.blocks_per_chunk) if size else 0
        self.results.append(TransferResult(job, True, moved, time.time() - begin))
        return True

    def submit_store(self, job_id: Any, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: Any, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        results, self.results = self.results, []
        return results

    def wait(self, job_ids: Any) -> None:
        pass

    def shutdown(self) -> None:
        self.engine.clear()
        self.host.clear()


class CopyingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> CopyingWorker:
        if not self._worker:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: Any) -> CopyingWorker:
        return CopyingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
