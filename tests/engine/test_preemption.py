"""A KV cache so small that requests are preempted while they store and load."""

from __future__ import annotations

from pathlib import Path

from kvtier.harness.engine_requests import ReferenceEngine
from kvtier.harness.engine_testbed import CHUNK_TOKENS, EngineTestbed
from kvtier.harness.tiny_model import prompt
from kvtier_operator.render.engine import transfer_config


def test_preempted_requests_give_the_same_tokens(
    model: Path, payload: Path, scratch: Path, plain: ReferenceEngine
) -> None:
    case = EngineTestbed(scratch / "preemption", model, payload)
    prefix = prompt(2 * CHUNK_TOKENS, 400)
    prompts = [prefix + prompt(150 + 17 * index, 401 + index) for index in range(6)]
    try:
        # 32 blocks of 32 tokens: room for two of the six requests at their full length.
        # Attached by configuration, as with --kv-transfer-config. Other tests use the environment.
        case.start(
            kv_cache_memory_bytes=2 << 20,
            max_model_len=768,
            kv_transfer_config=transfer_config(str(case.topology)),
        )
        case.wait_attached()
        requests = case.requests()
        for _ in range(3):
            assert requests.run_together(prompts, 150) == plain.together(prompts, 150)
            case.settle_stores()
            case.empty_gpu_cache()
        metrics = case.engine_metrics()
        assert metrics["vllm:num_preemptions_total"] > 0
        assert case.loaded("ram") > 0
    finally:
        case.close()
