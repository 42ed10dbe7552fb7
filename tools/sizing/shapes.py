"""Shapes of models, from their published ``config.json``, and of GPUs, from their data sheets."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
PEAK_SHARE = 0.5
"""Share of the peak that prefill reaches. Measured engines reach 0.4 to 0.6 for long prompts."""
MEMORY_SHARE = 0.9
"""vLLM's default ``--gpu-memory-utilization``."""
BYTES_16_BIT = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model with full attention in every layer.

    ``kv_heads`` and ``head_dim``: per layer; ``config.json`` calls them ``num_key_value_heads`` and
    ``head_dim``. ``billions``: parameters. ``active_billions``: those that one token uses, if it is
    a mixture of experts.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    billions: float
    active_billions: float | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value of every layer, in 16 bits."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES_16_BIT

    @property
    def weight_bytes(self) -> float:
        """In 16 bits."""
        return self.billions * 1e9 * BYTES_16_BIT

    @property
    def flops_per_token(self) -> float:
        """Of the weights; attention comes on top, so this favours recomputing."""
        return 2e9 * (self.active_billions or self.billions)


@dataclass(frozen=True, slots=True)
class Gpu:
    """``teraflops``: dense BF16 peak. ``gib``: memory. ``link_gb``: to the host in one direction,
    in GB/s (PCIe 4.0 x16 or 5.0 x16), of which about 85 % can be reached.
    """

    name: str
    teraflops: float
    gib: int
    link_gb: float


MODELS = (
    ModelShape("Qwen2.5 7B", 28, 4, 128, 7.6),
    ModelShape("Mistral 7B v0.3", 32, 8, 128, 7.2),
    ModelShape("Llama 3.1 8B", 32, 8, 128, 8.0),
    ModelShape("Qwen3 8B", 36, 8, 128, 8.2),
    ModelShape("Mistral Small 24B", 40, 8, 128, 23.6),
    ModelShape("Qwen3 30B-A3B", 48, 4, 128, 30.5, 3.3),
    ModelShape("Qwen3 32B", 64, 8, 128, 32.8),
    ModelShape("Mixtral 8x7B", 32, 8, 128, 46.7, 12.9),
    ModelShape("Llama 3.1 70B", 80, 8, 128, 70.6),
    ModelShape("Qwen2.5 72B", 80, 8, 128, 72.7),
)
GPUS = (
    Gpu("L4", 121, 24, 32),
    Gpu("A100 80GB", 312, 80, 32),
    Gpu("L40S", 362, 48, 32),
    Gpu("H100 SXM", 989, 80, 64),
    Gpu("H200", 989, 141, 64),
)


def gpus_needed(model: ModelShape, gpu: Gpu) -> int | None:
    """The smallest power of two of GPUs whose memory holds the weights and leaves a fifth of it to
    the KV cache; None above 8.
    """
    for count in (1, 2, 4, 8):
        if model.kv_heads % count == 0 or count % model.kv_heads == 0:
            usable = MEMORY_SHARE * gpu.gib * GIB * count
            if model.weight_bytes <= 0.8 * usable:
                return count
    return None


def gpu_tokens(model: ModelShape, gpu: Gpu, count: int) -> int:
    """Tokens that the KV cache in GPU memory holds."""
    free = MEMORY_SHARE * gpu.gib * GIB * count - model.weight_bytes
    return int(free // model.kv_bytes_per_token)


def prefill_tokens_per_second(model: ModelShape, gpu: Gpu, count: int) -> float:
    """An estimate: ``PEAK_SHARE`` of the GPUs' peak."""
    return PEAK_SHARE * gpu.teraflops * 1e12 * count / model.flops_per_token


def break_even_bytes_per_second(model: ModelShape, gpu: Gpu, count: int) -> float:
    """A tier that reads faster than this beats recomputing, apart from its latency."""
    return prefill_tokens_per_second(model, gpu, count) * model.kv_bytes_per_token
