"""vLLM's configuration of a tiny CPU engine, and its requests, for tests of hooks in which no model
runs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from kvtier.harness.tiny_model import write_llama


@functools.cache
def tiny_engine_config(directory: Path, block_tokens: int) -> Any:
    """One configuration for all engines; take a copy. ``directory``: for the model."""
    from vllm.engine.arg_utils import EngineArgs

    write_llama(directory)
    return EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=block_tokens,
        enable_prefix_caching=True,
        disable_hybrid_kv_cache_manager=False,
    ).create_engine_config()


def tiny_request(name: str, tokens: list[int], new_tokens: int, hash_tokens: int) -> Any:
    """A request of vLLM. ``hash_tokens``: of one block hash."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        name,
        tokens,
        SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True),
        None,
        block_hasher=get_request_block_hasher(hash_tokens, sha256),
    )
