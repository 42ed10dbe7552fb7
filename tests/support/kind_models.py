"""Writes the tiny models of the request kinds: one that takes images, one of text with a tokenizer,
and the head of an EAGLE draft. Weights are seeded and random, as in ``kvtier.harness.tiny_model``.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.harness.tiny_model import CPU_LLAMA, WEIGHT_SCALE, write_llama, write_tensors

IMAGE_TOKEN = 3
IMAGE_TOKENS = 64
IMAGE_PIXELS = 112
PATCH_PIXELS = 14
FIRST_TEXT_TOKEN, TEXT_TOKENS = 4, 256
"""The tokens that stand for one byte each."""


def _tokenizer() -> Any:
    """A token for each byte, so that a grammar can allow any text; the rest is unused."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<image>": IMAGE_TOKEN}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    while len(vocabulary) < CPU_LLAMA.vocabulary:
        vocabulary[f"<unused{len(vocabulary)}>"] = len(vocabulary)
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<image>"],
    )


def write_text_model(directory: Path) -> Path:
    """A Llama of text with a tokenizer."""
    write_llama(directory, seed=0)
    _tokenizer().save_pretrained(directory)
    return directory


def write_eagle_head(directory: Path) -> Path:
    """A draft for ``write_text_model``: one layer, which sees the hidden state of the model."""
    directory.mkdir(parents=True)
    shape = replace(CPU_LLAMA, layers=1)
    config = {**shape.config(), "architectures": ["EagleLlamaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(9)
    sizes = {
        f"{name.removeprefix('model.')}.weight": size for name, size in shape.projections(0).items()
    }
    sizes["fc.weight"] = (shape.hidden, 2 * shape.hidden)
    tensors = {
        name: generator.standard_normal(size, dtype=np.float32) * np.float32(WEIGHT_SCALE)
        for name, size in sizes.items()
    }
    tensors["layers.0.post_attention_layernorm.weight"] = np.ones(shape.hidden, dtype=np.float32)
    write_tensors(directory / "model.safetensors", tensors, shape.dtype)
    return directory


def write_image_model(directory: Path) -> Path:
    """A LLaVA: a small image encoder before a Llama; an image becomes ``IMAGE_TOKENS`` tokens."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    text = LlamaConfig(**{**CPU_LLAMA.config(), "initializer_range": WEIGHT_SCALE})
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_PIXELS,
        patch_size=PATCH_PIXELS,
        projection_dim=64,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        image_seq_length=IMAGE_TOKENS,
        architectures=["LlavaForConditionalGeneration"],
    )
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(0)
        made = LlavaForConditionalGeneration(config).to(torch.float32).state_dict()
    finally:
        torch.random.set_rng_state(state)
    config.save_pretrained(directory)
    tensors = {_checkpoint_name(name): value.numpy() for name, value in made.items()}
    write_tensors(directory / "model.safetensors", tensors, "float32")
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": IMAGE_PIXELS},
            crop_size={"height": IMAGE_PIXELS, "width": IMAGE_PIXELS},
        ),
        tokenizer=_tokenizer(),
        patch_size=PATCH_PIXELS,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(directory)
    return directory


def _checkpoint_name(name: str) -> str:
    """The name in published checkpoints, which vLLM reads, of a parameter of ``transformers``."""
    name = name.removeprefix("model.")
    if name.startswith("vision_tower."):
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    if name.startswith("language_model."):
        return name.replace("language_model.", "language_model.model.", 1)
    return f"language_model.{name}" if name.startswith("lm_head.") else name
