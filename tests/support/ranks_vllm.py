"""What tests of engines with several ranks change in vLLM's CPU engine before it starts.

None of it changes what is computed or what a connector sees: how a rank's process starts, and how
it waits for another.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import time
from typing import Any

WAIT_SECONDS = 0.001


USED_MODULES = (
    "compressed_tensors.quantization",
    "kvtier.engines.vllm.connector",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.gpt_oss",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
"""What an engine and its ranks import by and by: most of the time that their start takes."""


def prepare() -> None:
    """Call it once, before the processes of engines are forked.

    ``TORCH_COMPILE_DISABLE`` must be set before torch is imported: vLLM compiles some functions
    of ``torch`` in each rank also where it is to compile nothing.
    """
    for name in USED_MODULES:
        importlib.import_module(name)
    fork_ranks()
    sleep_while_waiting()
    replace_kernels()
    # What is there is not looked at again, so that forked processes share its memory.
    gc.collect()
    gc.freeze()


def fork_ranks() -> None:
    """vLLM's CPU engine spawns the processes of its ranks, which import everything again."""
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def sleep_while_waiting() -> None:
    """Ranks that wait for each other sleep.

    vLLM's ranks spin: those of the CPU's own communicator without an end, and those that wait for a
    message for one second. With more ranks than cores each of them takes the core of the one that
    it waits for, and a step takes a second.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    # vLLM's ranks that do not share memory use torch's communicator, which sleeps.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    shm_broadcast.sched_yield = lambda: time.sleep(WAIT_SECONDS)


def replace_kernels() -> None:
    """vLLM replaces the kernels that CPUs do not have, which takes each rank 0.3 s."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = staticmethod(lambda: None)


def repair_pipelines() -> None:
    """The CPU runner of vLLM 0.32 does not allocate the tensors that a later stage receives."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors
    if getattr(gather, "repaired", False):
        return

    def gather_allocated(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens,
                dtype=self.model_config.dtype,
                device=self.device,
            )
        return gather(self, *arguments, **named)

    gather_allocated.repaired = True  # type: ignore[attr-defined]
    GPUModelRunner.sync_and_gather_intermediate_tensors = gather_allocated
