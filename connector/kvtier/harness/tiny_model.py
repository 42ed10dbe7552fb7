"""Writes tiny Llama checkpoints and LoRA adapters with seeded weights, so that a real engine runs
with no download.

The files are written by hand (``config.json`` and one safetensors file) from numpy's seeded
generator: the same shape and seed give the same bytes on every machine, and neither torch nor
transformers is needed.

The weights have a standard deviation of 0.2, ten times the usual: greedy output of a model with
smaller ones falls into a loop of two tokens, which hides wrong KV. With 0.2, wrong KV changes the
output.

    python -m kvtier.harness.tiny_model DIRECTORY [--device cuda] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

WEIGHT_SCALE = 0.2
"""Standard deviation of every weight (see the module's text)."""
Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """Shape of a Llama. ``dtype``: "float32" or "bfloat16"; ``head_dim`` in elements,
    ``max_tokens`` is the longest context.
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 256
    vocabulary: int = 512
    max_tokens: int = 4096
    dtype: str = "float32"

    def config(self) -> dict[str, object]:
        """The content of ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.max_tokens,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "initializer_range": WEIGHT_SCALE,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "torch_dtype": self.dtype,
        }

    def projections(self, layer: int) -> dict[str, tuple[int, int]]:
        """The linear modules of one layer: names and weight shapes (outputs, inputs)."""
        prefix = f"model.layers.{layer}."
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            prefix + "self_attn.q_proj": (query, self.hidden),
            prefix + "self_attn.k_proj": (key_value, self.hidden),
            prefix + "self_attn.v_proj": (key_value, self.hidden),
            prefix + "self_attn.o_proj": (self.hidden, query),
            prefix + "mlp.gate_proj": (self.intermediate, self.hidden),
            prefix + "mlp.up_proj": (self.intermediate, self.hidden),
            prefix + "mlp.down_proj": (self.hidden, self.intermediate),
        }


CPU_LLAMA = TinyLlama()
"""For CPU engines: float32, where greedy output is the same across processes, chunked or not."""
GPU_LLAMA = TinyLlama(
    hidden=512,
    heads=4,
    kv_heads=2,
    head_dim=128,
    intermediate=1024,
    dtype="bfloat16",
    max_tokens=8192,
)
"""For GPU engines: bfloat16 and a head size that FlashAttention takes."""


def write_llama(directory: Path, shape: TinyLlama = CPU_LLAMA, seed: int = 0) -> Path:
    """Writes a checkpoint of ``shape`` into ``directory`` (created if missing) and returns the
    directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
    generator = np.random.default_rng(seed)
    tensors = {name: _normal(generator, size) for name, size in _weights(shape)}
    for name in _norms(shape):
        tensors[name] = np.ones(shape.hidden, dtype=np.float32)
    write_tensors(directory / "model.safetensors", tensors, shape.dtype)
    return directory


def write_lora(directory: Path, shape: TinyLlama = CPU_LLAMA, seed: int = 0, rank: int = 8) -> Path:
    """Writes a LoRA adapter for ``shape`` on the query, key and value projections, strong enough to
    change the output.
    """
    directory.mkdir(parents=True, exist_ok=True)
    targets = ("q_proj", "k_proj", "v_proj")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    generator = np.random.default_rng(seed + 1_000_003)
    tensors: dict[str, Array] = {}
    for layer in range(shape.layers):
        for name, (outputs, inputs) in shape.projections(layer).items():
            if name.endswith(targets):
                tensors[f"base_model.model.{name}.lora_A.weight"] = _normal(
                    generator, (rank, inputs)
                )
                tensors[f"base_model.model.{name}.lora_B.weight"] = _normal(
                    generator, (outputs, rank)
                )
    write_tensors(directory / "adapter_model.safetensors", tensors, shape.dtype)
    return directory


def prompt(tokens: int, seed: int, vocabulary: int = CPU_LLAMA.vocabulary) -> list[int]:
    """``tokens`` seeded token ids, special ones left out."""
    return [
        int(token) for token in np.random.default_rng(seed).integers(3, vocabulary, size=tokens)
    ]


def _weights(shape: TinyLlama) -> Iterator[tuple[str, tuple[int, int]]]:
    yield "model.embed_tokens.weight", (shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        for name, size in shape.projections(layer).items():
            yield name + ".weight", size
    yield "lm_head.weight", (shape.vocabulary, shape.hidden)


def _norms(shape: TinyLlama) -> Iterator[str]:
    for layer in range(shape.layers):
        yield f"model.layers.{layer}.input_layernorm.weight"
        yield f"model.layers.{layer}.post_attention_layernorm.weight"
    yield "model.norm.weight"


def _normal(generator: np.random.Generator, size: tuple[int, int]) -> Array:
    return generator.standard_normal(size, dtype=np.float32) * np.float32(WEIGHT_SCALE)


def _encoded(values: Array, dtype: str) -> bytes:
    if dtype == "float32":
        return values.astype("<f4").tobytes()
    # bfloat16 is the upper half of a float32; adding just under half a unit first rounds to
    # nearest, ties to even.
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_tensors(path: Path, tensors: Mapping[str, Array], dtype: str) -> None:
    """Writes a safetensors file: the length of the header (8 bytes, little endian), the header as
    JSON, then the tensors' bytes.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    payload, offset = [], 0
    for name, values in tensors.items():
        data = _encoded(values, dtype)
        end = offset + len(data)
        kind = "BF16" if dtype == "bfloat16" else "F32"
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [offset, end]}
        payload.append(data)
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(payload)


def main() -> None:
    """Command line: see the module's text."""
    parser = argparse.ArgumentParser(description="Write a tiny seeded Llama checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_llama(
        options.directory, GPU_LLAMA if options.device == "cuda" else CPU_LLAMA, options.seed
    )


if __name__ == "__main__":
    main()
