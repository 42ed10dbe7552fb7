"""What identifies a model apart from its weights, as values of JSON's types.

The identity of each engine is composed of these in the engine's own package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

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
"""In a model's configuration and its parts: how it was written, and the type of the weights, which
is part of the identity in its effective form."""
QUANTIZATION_KEYS = frozenset({"quantization_config", "compression_config"})
"""In these, ``dtype`` is the type of activations and cannot be left out."""
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


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Canonical JSON of everything that shapes the KV.

    ``ephemeral_reason``: why objects must not outlive this engine; empty if they may.
    """

    text: str
    ephemeral_reason: str = ""


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
    if bool(getattr(model, "trust_remote_code", False)) and not stated_revision:
        reasons.extend(_code_of_others(model))
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


def _code_of_others(model: Any) -> list[str]:
    """Returns a reason for code that comes from another repository, whose revision is unknown."""
    mapped = getattr(model.hf_config, "auto_map", None)
    if not isinstance(mapped, Mapping) or getattr(model, "code_revision", None):
        return []
    named = {str(each).partition("--")[0] for each in mapped.values() if "--" in str(each)}
    # The commit of the model's own repository is known.
    named.discard(str(model.model))
    if not named:
        return []
    return [
        f"the revision of the code in {', '.join(sorted(named))} is unknown; set "
        "isolation.modelRevision"
    ]


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


def as_mapping(configuration: Any) -> Mapping[str, object]:
    to_dict = getattr(configuration, "to_dict", None)
    found = to_dict() if callable(to_dict) else vars(configuration)
    return found if isinstance(found, Mapping) else {}


def plain_configuration(
    configuration: Mapping[str, object], where: str, reasons: list[str]
) -> dict[str, object]:
    """Returns the configuration of a model in JSON's types, without ``IGNORED_CONFIG_KEYS``, as
    ``plain`` does."""
    found: dict[str, object] = {}
    for key, each in configuration.items():
        name = str(key)
        if name in IGNORED_CONFIG_KEYS:
            continue
        is_part = name.endswith("_config") and name not in QUANTIZATION_KEYS
        if is_part and isinstance(each, Mapping):
            found[name] = plain_configuration(each, f"{where}.{name}", reasons)
        else:
            found[name] = plain(each, f"{where}.{name}", reasons)
    return found


def plain(value: object, where: str, reasons: list[str]) -> Any:
    """Returns ``value`` in JSON's types; adds a reason for every part without a stable text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each, f"{where}.{key}", reasons) for key, each in value.items()}
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
