"""The tiny checkpoints that real engines run."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from kvtier.harness.tiny_model import (
    CPU_LLAMA,
    GPU_LLAMA,
    _encoded,
    prompt,
    write_llama,
    write_lora,
)


def _header(path: Path) -> dict[str, dict[str, object]]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header: dict[str, dict[str, object]] = json.loads(content[8 : 8 + length])
    assert len(content) == 8 + length + max(
        int(entry["data_offsets"][1]) for entry in header.values() if "dtype" in entry
    )  # type: ignore[index]
    return header


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    contents = [
        (write_llama(tmp_path / str(i), seed=s) / "model.safetensors").read_bytes()
        for i, s in enumerate((0, 0, 1))
    ]
    assert contents[0] == contents[1] != contents[2]


def test_a_checkpoint_has_every_tensor_in_its_configured_shape(
    tmp_path: Path,
) -> None:
    directory = write_llama(tmp_path, GPU_LLAMA)
    header = _header(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    assert len(header) - 1 == 3 + 9 * config["num_hidden_layers"]
    assert header["model.layers.0.self_attn.k_proj.weight"]["shape"] == [
        config["num_key_value_heads"] * config["head_dim"],
        config["hidden_size"],
    ]
    assert header["lm_head.weight"]["dtype"] == "BF16"


def test_an_adapter_targets_the_attention_projections(tmp_path: Path) -> None:
    directory = write_lora(tmp_path, CPU_LLAMA, rank=4)
    header = _header(directory / "adapter_model.safetensors")
    assert header["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]["shape"] == [
        4,
        CPU_LLAMA.hidden,
    ]
    assert json.loads((directory / "adapter_config.json").read_text())["r"] == 4


def test_bfloat16_rounds_to_nearest_even() -> None:
    # 1 + 1/256 lies exactly between two bfloat16 values; the even one is 1. 1 + 3/256 goes up to 1 + 4/256.
    values = np.array([1.0, 1.0 + 1 / 256, 1.0 + 3 / 256, -2.5], dtype=np.float32)
    decoded = np.frombuffer(_encoded(values, "bfloat16"), dtype="<u2").astype("<u4") << 16
    assert decoded.view("<f4").tolist() == [1.0, 1.0, 1.0 + 4 / 256, -2.5]


def test_prompts_contain_no_special_tokens() -> None:
    tokens = prompt(1000, 5)
    assert min(tokens) >= 3
    assert max(tokens) < CPU_LLAMA.vocabulary
    assert tokens == prompt(1000, 5) != prompt(1000, 6)
