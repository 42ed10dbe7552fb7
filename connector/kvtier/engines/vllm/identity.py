"""The engine's identity: everything that shapes the bytes of its KV, as canonical JSON.

Engines with equal identities share objects. The workers add the codec's layout and a fingerprint of
their weights (``weights.py``). If a part of the identity cannot be determined, it is not guessed:
the reason is recorded, and objects then stay in the memory tier for the lifetime of the engine.

docs/datapath.md describes how identities become namespaces.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kvtier.config.models import Structural
from kvtier.namespace import canonical_json
from kvtier.planner import Planner

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)
SEED_TIMEOUT_SECONDS = 60.0
"""vLLM initializes the seed of its block hashes a moment after it has created the scheduler."""
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "mrope", "proportional")
"""Rotary embeddings that do not depend on ``max_model_len``."""
IGNORED_CONFIG_KEYS = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "architectures_original",
        "_commit_hash",
        "torch_dtype",
        "dtype",
    }
)


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Canonical JSON of everything that shapes the KV.

    ``ephemeral_reason``: why objects must not outlive this engine; empty if they may.
    """

    text: str
    ephemeral_reason: str = ""


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

    reasons: list[str] = []
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    algorithm = str(cache.prefix_caching_hash_algo)
    seed_reason = unstable_seed(algorithm, none_hash)
    if seed_reason:
        reasons.append(seed_reason)
    identity: dict[str, object] = {
        "engine": {"name": "vllm", "version": str(vllm.__version__)},
        "model": model_source(model, structural.isolation.model_revision, reasons),
        "configuration": plain(_mapping(model.hf_config), "configuration", reasons),
        "text_configuration": plain(_mapping(model.hf_text_config), "text_configuration", reasons),
        "max_model_len": model.max_model_len
        if rope_depends_on_length(model.hf_text_config)
        else None,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization or ""),
        "kv_cache_dtype": str(cache.cache_dtype),
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
    }
    speculative = config.speculative_config
    if speculative is not None:
        identity["draft"] = _draft(speculative, reasons)
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


def model_source(model: Any, stated_revision: str, reasons: list[str]) -> dict[str, object]:
    """Returns what identifies the model's files other than its weights.

    The weights have a fingerprint of their own (``weights.py``), and a configuration's effective
    values are part of the identity. What remains is code and, for multimodal models, the
    configuration of the preprocessor, which decides how an image becomes tokens and embeddings.
    """
    name = str(model.model)
    source: dict[str, object] = {}
    if stated_revision:
        source["revision"] = stated_revision
    if is_multimodal(model):
        source["multimodal"] = _multimodal(model, reasons)
    directory = Path(name)
    if directory.is_dir():
        try:
            return {**source, "digest": model_digest(directory, is_multimodal(model))}
        except OSError as error:
            reasons.append(f"the model in {name} cannot be read: {error}")
            return {**source, "name": name}
    needs_revision = is_multimodal(model) or bool(getattr(model, "trust_remote_code", False))
    if not needs_revision:
        return source
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit and not stated_revision:
        reasons.append(
            f"the revision of {name}, which decides its code and preprocessor, is unknown; set "
            "isolation.modelRevision"
        )
    return {**source, "name": _short(name), "commit": str(commit or "")}


def is_multimodal(model: Any) -> bool:
    """Returns whether prompts may hold more than text."""
    return bool(
        getattr(model, "is_multimodal_model", False)
        or getattr(model, "multimodal_config", None) is not None
    )


def _multimodal(model: Any, reasons: list[str]) -> dict[str, object]:
    """Returns the settings that decide which embeddings stand for an image."""
    settings = getattr(model, "multimodal_config", None)
    values = {
        name: getattr(settings, name, getattr(model, name, None))
        for name in ("mm_processor_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype")
    }
    found: dict[str, object] = plain(values, "multimodal", reasons)
    return found


def _draft(speculative: Any, reasons: list[str]) -> dict[str, object]:
    """Returns what identifies a draft model, whose layers may share the KV cache groups."""
    draft: dict[str, object] = {"method": str(getattr(speculative, "method", ""))}
    model = getattr(speculative, "draft_model_config", None)
    if model is not None:
        draft["model"] = model_source(model, "", reasons)
        draft["configuration"] = plain(_mapping(model.hf_config), "draft.configuration", reasons)
        draft["dtype"] = str(getattr(model, "dtype", ""))
        draft["quantization"] = str(getattr(model, "quantization", "") or "")
    return draft


def _short(name: str) -> str:
    """Drops the directory of a local path: the stated revision identifies the model."""
    return Path(name).name if Path(name).is_absolute() else name


def rope_depends_on_length(text_config: Any) -> bool:
    """Returns whether rotary factors depend on ``max_model_len``. Unknown types count as yes."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(text_config, name, None)
        if isinstance(found, Mapping):
            nested = [value for value in found.values() if isinstance(value, Mapping)] or [found]
            for each in nested:
                if str(each.get("rope_type", each.get("type", "default"))) not in FIXED_ROPE_TYPES:
                    return True
    return False


def _mapping(configuration: Any) -> Mapping[str, object]:
    to_dict = getattr(configuration, "to_dict", None)
    found = to_dict() if callable(to_dict) else vars(configuration)
    return found if isinstance(found, Mapping) else {}


def plain(value: object, where: str, reasons: list[str]) -> Any:
    """Returns ``value`` in JSON's types; adds a reason for every part without a stable text."""
    if isinstance(value, Mapping):
        return {
            str(key): plain(each, f"{where}.{key}", reasons)
            for key, each in value.items()
            if str(key) not in IGNORED_CONFIG_KEYS
        }
    if isinstance(value, list | tuple):
        return [plain(each, where, reasons) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(str(each) for each in value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    text = str(value)
    if " at 0x" in text:
        reasons.append(f"{where} is a {type(value).__name__}, which has no stable representation")
        return type(value).__name__
    return text


MAX_CONFIG_FILE_BYTES = 64 << 20
CONFIG_SUFFIXES = (".json", ".py")
_IGNORED_FILES = re.compile(
    r"^(tokenizer|vocab|merges|special_tokens|added_tokens|generation_config|chat_template"
    r"|training|trainer|optimizer)|\.index\.json$"
)
"""Files that decide which tokens are computed, which the block hash covers, or how the weights are
divided into files, which their fingerprint does not depend on."""
_PREPROCESSOR_FILES = re.compile(r"^((video_|image_|audio_)?preprocessor|processor)")
"""Of a model for text alone they have no effect."""


def model_digest(directory: Path, multimodal: bool) -> str:
    """Returns a digest of the configuration and code files of a local model, and of its
    preprocessor's configuration if it is ``multimodal``. Blocks. Raises ``OSError``."""
    digest = blake3()
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        if any(part.startswith(".") for part in relative.parts) or not path.is_file():
            continue
        if path.suffix.lower() not in CONFIG_SUFFIXES or _IGNORED_FILES.search(path.name):
            continue
        if _PREPROCESSOR_FILES.match(path.name) and not multimodal:
            continue
        too_large = path.stat().st_size > MAX_CONFIG_FILE_BYTES
        _add(digest, str(relative), b"too large" if too_large else path.read_bytes())
    return str(digest.hexdigest())


def _add(digest: blake3, name: str, content: bytes) -> None:
    digest.update(f"{name}\0{len(content)}\0".encode())
    digest.update(content)
