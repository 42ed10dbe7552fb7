"""A digest that stands for a model in a local directory, without reading all of it (DATAPATH 8)."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from blake3 import blake3

SAMPLE_BYTES = 64 << 10
SAMPLES = 16
"""1 MiB of each weight file."""
MAX_HEADER_BYTES = 100 << 20
"""The safetensors format's own limit."""
MAX_CONFIGURATION_BYTES = 64 << 20
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIGURATION = (".json", ".py")
_NOT_SHAPING = re.compile(
    r"^(tokenizer|vocab|merges|special_tokens|added_tokens|generation_config|chat_template|preprocessor|processor|training|trainer|optimizer)"
)
"""Files that decide which tokens are computed, not what their KV is: the tokens are in the block hash."""


def model_digest(directory: Path) -> tuple[str, int]:
    """(hex digest, number of weight files) of a local model. Blocks. Raises ``OSError``.

    Covered are configuration and code files wholly, and of each weight file name, size, safetensors header and samples.
    """
    digest = blake3()
    weights = 0
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        if any(part.startswith(".") for part in relative.parts) or not path.is_file():
            continue
        suffix = path.suffix.lower()
        if suffix in WEIGHTS and not _NOT_SHAPING.match(path.name):
            weights += 1
            _add_weights(digest, str(relative), path)
        elif suffix in CONFIGURATION and not _NOT_SHAPING.match(path.name):
            content = path.read_bytes() if path.stat().st_size <= MAX_CONFIGURATION_BYTES else b"too large"
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
