"""The engine's identity: everything that shapes the bytes of its KV, as canonical JSON.

Engines with equal identities share objects. The workers add the codec's layout and a fingerprint of
their weights (``weights.py``). If a part of the identity cannot be determined, it is not guessed:
the reason is recorded, and objects then stay in the memory tier for the lifetime of the engine.

docs/datapath.md describes how identities become namespaces.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtier.config.models import Structural
from kvtier.engines.common.model_identity import (
    EngineIdentity,
    as_mapping,
    model_source,
    plain_configuration,
    rope_depends_on_length,
)
from kvtier.engines.vllm.identity_environment import environment_settings, installed_plugins
from kvtier.engines.vllm.identity_fields import draft_settings, encoder_scales, settings_of
from kvtier.namespace import canonical_json
from kvtier.planner import Planner

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)
SEED_TIMEOUT_SECONDS = 60.0
"""vLLM initializes the seed of its block hashes a moment after it has created the scheduler."""


class IdentityBuilder:
    """Computes the identity on the first call, and caches it."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        planner: Planner,
        structural: Structural,
        seed: Callable[[], str | None] | None = None,
    ) -> None:
        self._config = vllm_config
        self._planner = planner
        self._structural = structural
        self._seed = seed or _none_hash
        self._identity: EngineIdentity | None = None

    def __call__(self) -> EngineIdentity:
        if self._identity is None:
            try:
                self._identity = self._build()
            except Exception as error:
                # A model's configuration may hold anything. The memory tier works without it.
                logger.exception(
                    "KVTier: objects stay in the memory tier for the lifetime of this engine: "
                    "cannot determine the identity"
                )
                self._identity = EngineIdentity(
                    "{}", f"cannot determine the identity: {type(error).__name__}: {error}"
                )
        return self._identity

    def _build(self) -> EngineIdentity:
        mapping, reasons = describe(
            self._config, self._planner, self._structural, self._wait_for_seed()
        )
        reason = "; ".join(reasons)
        if reason:
            logger.warning(
                "KVTier: objects stay in the memory tier for the lifetime of this engine: %s",
                reason,
            )
        return EngineIdentity(canonical_json(mapping), reason)

    def _wait_for_seed(self) -> str | None:
        deadline = time.monotonic() + SEED_TIMEOUT_SECONDS
        while (seed := self._seed()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return seed


def _none_hash() -> str | None:
    from vllm.v1.core import kv_cache_utils

    value = getattr(kv_cache_utils, "NONE_HASH", None)
    return value.hex() if isinstance(value, bytes) else None


def describe(
    config: VllmConfig, planner: Planner, structural: Structural, none_hash: str | None
) -> tuple[dict[str, object], list[str]]:
    """Returns the identity, and the reasons why it is valid for this engine only.

    ``none_hash``: the seed of the chain of block hashes. Blocks: it reads the model's small files.
    """
    import vllm
    from vllm.platforms import current_platform

    reasons: list[str] = []
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    algorithm, kv_cache_dtype = str(cache.prefix_caching_hash_algo), str(cache.cache_dtype)
    seed_reason = unstable_seed(algorithm, none_hash)
    if seed_reason:
        reasons.append(seed_reason)
    identity: dict[str, object] = {
        "engine": {"name": "vllm", "version": str(vllm.__version__)},
        "model": model_source(model, structural.isolation.model_revision, reasons),
        "configuration": plain_configuration(as_mapping(model.hf_config), "configuration", reasons),
        "text_configuration": plain_configuration(
            as_mapping(model.hf_text_config), "text_configuration", reasons
        ),
        "max_model_len": _rope_length(model),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization or ""),
        "kv_cache_dtype": kv_cache_dtype,
        "kv_cache_dtype_skip_layers": [
            str(layer) for layer in getattr(cache, "kv_cache_dtype_skip_layers", ())
        ],
        "sliding_window_disabled": bool(getattr(model, "disable_sliding_window", False)),
        "groups": [str(group) for group in planner.groups],
        "effective_chunk_tokens": planner.chunk_tokens,
        "parallel": {
            "tensor": int(parallel.tensor_parallel_size),
            "pipeline": int(parallel.pipeline_parallel_size),
            "ranks": "pipeline-major: rank = pipeline rank x tensor size + tensor rank",
        },
        "block_hash": {
            "algorithm": algorithm,
            "tokens": planner.hash_tokens,
            "seed": none_hash or "",
        },
        "salt": structural.isolation.salt,
        "implementation": str(getattr(model, "architecture", "")),
        "settings": settings_of(config, reasons)
        | encoder_scales(getattr(model, "multimodal_config", None), reasons),
        "environment": environment_settings(model, reasons),
        "plugins": installed_plugins(reasons),
    }
    if "fp8" in kv_cache_dtype:
        # Tensors of bytes, which some devices read as another format of 8 bits.
        identity["kv_cache_fp8"] = str(current_platform.fp8_dtype())
    speculative = config.speculative_config
    if speculative is not None and (settings := draft_settings(speculative, reasons)) is not None:
        identity["draft"] = _draft(speculative, reasons) | {"settings": settings}
    return identity, reasons


def unstable_seed(algorithm: str, none_hash: str | None) -> str:
    """Returns why block hashes differ after a restart; empty if they do not."""
    if none_hash is None:
        return "the seed of vLLM's block hashes cannot be read"
    if os.environ.get("PYTHONHASHSEED") is not None:
        return ""
    from vllm.v1.core import kv_cache_utils

    if (
        getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None) is not None
        and "xxhash" not in algorithm
    ):
        return ""
    return (
        f"block hashes ({algorithm}) have a random seed; set PYTHONHASHSEED to the same value on "
        "every engine, for example 0"
    )


def _draft(speculative: Any, reasons: list[str]) -> dict[str, object]:
    """Returns what identifies a draft model, whose layers may share the KV cache groups."""
    draft: dict[str, object] = {}
    model = getattr(speculative, "draft_model_config", None)
    if model is not None:
        draft["model"] = model_source(model, "", reasons)
        draft["configuration"] = plain_configuration(
            as_mapping(model.hf_config), "draft.configuration", reasons
        )
        draft["dtype"] = str(getattr(model, "dtype", ""))
        draft["quantization"] = str(getattr(model, "quantization", "") or "")
        draft["max_model_len"] = _rope_length(model)
    return draft


def _rope_length(model: Any) -> int | None:
    """Returns the length of the context if rotary factors depend on it."""
    text = getattr(model, "hf_text_config", model.hf_config)
    return int(model.max_model_len) if rope_depends_on_length(text) else None
