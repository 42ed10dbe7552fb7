"""vLLM's configuration of a tiny CPU engine, for tests of hooks in which no model runs."""

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
