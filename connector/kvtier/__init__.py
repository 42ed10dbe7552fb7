"""KVTier: KV cache tiers for LLM engines that cannot hurt the engine."""

__version__ = "0.1.0"
