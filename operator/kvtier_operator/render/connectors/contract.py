"""What is rendered for a connector, as a value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier_operator.api.settings import Isolation

TRANSFER_CONFIG_VARIABLE: Final = "KVTIER_TRANSFER_CONFIG"
"""The KV transfer configuration as JSON, in the engine's environment: KVTier's vLLM plugin sets it where the user
configured none, so that the engine's command stays as it is."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """``transfer_config``: vLLM's KV transfer configuration. ``environment``: further variables of the engine.
    ``shared_memory_bytes``: what the connector takes of ``/dev/shm``; ``engine_memory_bytes``: what it takes of the
    engine container's memory, shared memory included.
    """

    transfer_config: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    shared_memory_bytes: int = 0
    engine_memory_bytes: int = 0

    @property
    def transfer_config_text(self) -> str:
        """The configuration as ``--kv-transfer-config`` and ``TRANSFER_CONFIG_VARIABLE`` take it."""
        return json.dumps(self.transfer_config, separators=(",", ":"), sort_keys=True)

    def arguments(self) -> list[str]:
        """The command-line arguments that do the same for who runs vLLM by hand."""
        return ["--kv-transfer-config", self.transfer_config_text]


def isolated(path: str, isolation: Isolation) -> str:
    """The directory of a file tier: below it one of its own for salt and revision, which these connectors' own names of
    files know nothing of.
    """
    if not isolation.salt and not isolation.model_revision:
        return path
    text = json.dumps([isolation.salt, isolation.model_revision])
    return f"{path}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
