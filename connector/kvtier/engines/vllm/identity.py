"""The engine's identity: everything that shapes the bytes of its KV, as canonical JSON.

Engines with equal identities share objects. The codec's layout is not part of it: the workers add
that. If a part of the identity cannot be determined, it is not guessed: the reason is recorded, and
objects then stay in the memory tier for the lifetime of the engine.

A model in a local directory is identified by a digest that samples its weights. docs/datapath.md
describes how identities become namespaces.
"""

from __future__ import annotations

import logging
import os
import re
import struct
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

    ``none_hash``: the seed of the chain of block hashes. Blocks: it reads samples of the weights.
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
        "model": model_source(
            model, config.load_config, structural.isolation.model_revision, reasons
        ),
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
        identity["draft"] = _draft(speculative, config.load_config, reasons)
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


def model_source(
    model: Any, load_config: Any, stated_revision: str, reasons: list[str]
) -> dict[str, object]:
    """Returns what identifies the weights."""
    name = str(model.model)
    load_format = str(
        getattr(
            getattr(load_config, "load_format", ""),
            "value",
            getattr(load_config, "load_format", ""),
        )
    )
    source: dict[str, object] = {"load_format": load_format}
    if stated_revision:
        return {**source, "name": _short(name), "revision": stated_revision}
    if getattr(model, "model_weights", ""):
        reasons.append(
            f"the weights of {model.model_weights} are not local; set isolation.modelRevision"
        )
        return {**source, "name": str(model.model_weights)}
    directory = Path(name)
    if directory.is_dir():
        try:
            digest, weights = model_digest(directory)
        except OSError as error:
            reasons.append(f"the model in {name} cannot be read: {error}")
            return {**source, "name": name}
        if load_format == "dummy":
            return {**source, "digest": digest, "seed": int(model.seed or 0)}
        if not weights:
            reasons.append(f"no weight files in {name}; set isolation.modelRevision")
        return {**source, "digest": digest}
    if directory.is_file():
        reasons.append(f"{name} is a single file; set isolation.modelRevision")
        return {**source, "name": name}
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit:
        reasons.append(f"the revision of {name} is unknown; set isolation.modelRevision")
    return {**source, "name": name, "revision": str(commit or "")}


def _draft(speculative: Any, load_config: Any, reasons: list[str]) -> dict[str, object]:
    """Returns what identifies a draft model, whose layers may share the KV cache groups."""
    draft: dict[str, object] = {"method": str(getattr(speculative, "method", ""))}
    model = getattr(speculative, "draft_model_config", None)
    if model is not None:
        draft["model"] = model_source(model, load_config, "", reasons)
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


SAMPLE_BYTES = 64 << 10
SAMPLES = 16
"""1 MiB of each weight file."""
MAX_HEADER_BYTES = 100 << 20
"""The limit of the safetensors format."""
MAX_CONFIG_FILE_BYTES = 64 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIG_SUFFIXES = (".json", ".py")
_IGNORED_FILES = re.compile(
    r"^(tokenizer|vocab|merges|special_tokens|added_tokens|generation_config|chat_template"
    r"|preprocessor|processor|training|trainer|optimizer)"
)
"""Files that decide which tokens are computed, which the block hash covers, not their KV."""


def model_digest(directory: Path) -> tuple[str, int]:
    """Returns (hex digest, number of weight files) of a local model. Blocks. Raises ``OSError``.

    The digest covers all of the configuration and code files, and the name, size, safetensors
    header and samples of each weight file.
    """
    digest = blake3()
    weights = 0
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        if any(part.startswith(".") for part in relative.parts) or not path.is_file():
            continue
        suffix = path.suffix.lower()
        if suffix in WEIGHT_SUFFIXES and not _IGNORED_FILES.match(path.name):
            weights += 1
            _add_weights(digest, str(relative), path)
        elif suffix in CONFIG_SUFFIXES and not _IGNORED_FILES.match(path.name):
            content = (
                path.read_bytes() if path.stat().st_size <= MAX_CONFIG_FILE_BYTES else b"too large"
            )
            _add(digest, f"configuration {relative}", content)
    return digest.hexdigest(), weights


def _add(digest: blake3, name: str, content: bytes) -> None:
    digest.update(f"{name}\0{len(content)}\0".encode())
    digest.update(content)


def _add_weights(digest: blake3, name: str, path: Path) -> None:
    size = path.stat().st_size
    _add(digest, f"weights {name} {size}", b"")
    with path.open("rb") as file:
        if path.suffix.lower() == ".safetensors" and size >= 8:
            length = min(struct.unpack("<Q", file.read(8))[0], size - 8, MAX_HEADER_BYTES)
            _add(digest, "header", file.read(length))
        span = max(0, size - SAMPLE_BYTES)
        for number in range(SAMPLES):
            offset = span * number // (SAMPLES - 1)
            file.seek(offset)
            _add(digest, f"sample {offset}", file.read(SAMPLE_BYTES))
            if not span:
                break
