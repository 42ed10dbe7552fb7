"""Ranks with shards of unequal size: pipeline stages with different numbers of layers.

The ranks are spawned, as vLLM's CPU engine does by itself. In ``test_ranks`` they are forked, and
the first stage is the larger one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config.models import Daemon
from kvtier.harness.engine_testbed import CHUNK_TOKENS, EngineOptions, EngineTestbed
from kvtier.harness.tiny_model import TinyLlama, prompt, write_llama

CHUNKS = 4
PROMPTS = [prompt(CHUNKS * CHUNK_TOKENS + 5, 950 + number) for number in range(3)]
SHARED_MEMORY, SEGMENTS = Path("/dev/shm"), "vllm_dist_*-pp:*"
"""Where vLLM's CPU stages exchange tensors. It leaves the segments behind."""
ATTEMPTS = 5
"""A load that a busy machine delays beyond its time limit is computed instead."""
REPAIR = '''\
"""The CPU runner of vLLM 0.32 does not allocate the tensors that a later stage receives."""


def register():
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors
    if getattr(gather, "repaired", False):
        return

    def gather_allocated(self, *arguments, **named):
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens,
                dtype=self.model_config.dtype,
                device=self.device,
            )
        return gather(self, *arguments, **named)

    gather_allocated.repaired = True
    GPUModelRunner.sync_and_gather_intermediate_tensors = gather_allocated
'''


@pytest.fixture(scope="module")
def pipeline_payload(payload: Path, scratch: Path) -> Path:
    """The payload, with a plugin that lets pipeline parallelism run on CPUs."""
    directory = shutil.copytree(payload, scratch / "pipeline-payload")
    (directory / "pipeline_repair.py").write_text(REPAIR)
    information = directory / "pipeline_repair-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: repair\nVersion: 0\n")
    (information / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nrepair = pipeline_repair:register\n"
    )
    return directory


@pytest.fixture(scope="module", params=["1,2"])
def case(
    request: pytest.FixtureRequest, pipeline_payload: Path, scratch: Path
) -> Iterator[EngineTestbed]:
    """Two stages with the layers of ``request.param``."""
    name = f"stages-{request.param.replace(',', '-')}"
    model = write_llama(scratch / f"{name}-model", TinyLlama(layers=3), seed=0)
    options = EngineOptions(daemon=Daemon.SIDECAR)
    case = EngineTestbed(scratch / name, model, pipeline_payload, options)
    before = set(SHARED_MEMORY.glob(SEGMENTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PP_LAYER_PARTITION", request.param)
        try:
            case.start_daemon()
            case.start(pipeline_parallel_size=2)
            case.wait_attached()
            yield case
        finally:
            case.close()
            for segment in set(SHARED_MEMORY.glob(SEGMENTS)) - before:
                segment.unlink(missing_ok=True)


def test_what_stages_of_unequal_size_stored_gives_the_same_tokens(case: EngineTestbed) -> None:
    with case.loads() as loads:
        computed = [case.requests().run(each) for each in PROMPTS]
    assert loads.tokens == 0
    case.settle_stores()
    for prompt_tokens, expected in zip(PROMPTS, computed, strict=True):
        for _ in range(ATTEMPTS):
            case.empty_gpu_cache()
            with case.loads("ram") as loads:
                assert case.requests().run(prompt_tokens) == expected
            if loads.tokens == CHUNKS * CHUNK_TOKENS:
                break
        else:
            pytest.fail("the prompt was not loaded")
