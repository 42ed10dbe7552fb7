"""What the scheduler side of an engine's process knows of the tiers, for ``drive("call")``.

``install`` is a hook of ``kvtier.harness.engine_driver``: it notes the session while it is created,
and every key that tierd announces to it.
"""

from __future__ import annotations

from typing import Any

_sessions: list[Any] = []
_keys: set[bytes] = set()


def install() -> None:
    """Call it before the engine is created."""
    from kvtier.engines.common.tierd_session import TierdSession

    original, receive = TierdSession.__init__, TierdSession.receive

    def noted(self: Any, *arguments: Any, **named: Any) -> None:
        _sessions.append(self)
        original(self, *arguments, **named)

    def noting(self: Any, message: Any) -> None:
        _keys.update(added[0] for added in getattr(message, "added", ()))
        receive(self, message)

    TierdSession.__init__ = noted  # type: ignore[method-assign]
    TierdSession.receive = noting  # type: ignore[method-assign]


def held() -> dict[str, list[Any]]:
    """Hashes of the last block of each chunk, as vLLM names them in events, by tier: ram, disk."""
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    (session,) = _sessions
    found: dict[str, list[Any]] = {"ram": [], "disk": []}
    for key in set(_keys):
        name = maybe_convert_block_hash(BlockHash(key[1:]))
        for index, tier in enumerate(("ram", "disk")):
            if session.replica.get(key) >> index & 1:
                found[tier].append(name)
    return found
