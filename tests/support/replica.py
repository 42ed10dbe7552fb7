"""What the scheduler side of an engine's process knows of the tiers, for ``drive("call")``."""

from __future__ import annotations

import gc
from typing import Any


def held() -> dict[str, list[Any]]:
    """Hashes of the last block of each chunk, as vLLM names them in events, by tier: ram, disk."""
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    from kvtier.engines.common.tierd_session import TierdSession

    (session,) = [each for each in gc.get_objects() if isinstance(each, TierdSession)]
    found: dict[str, list[Any]] = {"ram": [], "disk": []}
    for key in list(session.replica._values):
        name = maybe_convert_block_hash(BlockHash(key[1:]))
        for index, tier in enumerate(("ram", "disk")):
            if session.replica.get(key) >> index & 1:
                found[tier].append(name)
    return found
