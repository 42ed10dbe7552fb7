"""The configuration of the CacheEngine path, in ATOM's ``kv_transfer_config``.

    {"kv_connector": "kvtier-lmcache", "kv_role": "offload", "lmcache_config": "/etc/lmcache.yaml"}

There is no topology: LMCache's file says what is stored where.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.config.models import (
    IsolationSettings,
    Live,
    LiveTier,
    MemoryTierDocument,
    PolicyIdentity,
    Structural,
    Topology,
)
from kvtier.engines.atom.config import transfer_config
from kvtier.engines.lmcache.config import LMCacheFile, read_file, reject_unknown, require_lmcache
from kvtier.errors import ConfigurationError
from kvtier.planner import Planner

TIER_NAME = "lmcache"
DEFAULT_MIN_LOAD_TOKENS = 512
DEFAULT_LOOKUP_SECONDS = 0.02
DEFAULT_LOAD_SECONDS = 5.0
MAX_LOOKUP_SECONDS = 1.0
MAX_LOAD_SECONDS = 600.0
OPTIONS = frozenset(
    {
        "kv_connector",
        "kv_role",
        "engine_id",
        "lmcache_config",
        "run_directory",
        "model_revision",
        "salt",
        "lookup_seconds",
        "load_seconds",
    }
)


@dataclass(frozen=True, slots=True)
class CacheEngineOptions:
    """``lookup_seconds``: how long the scheduler waits for an answer. ``load_seconds``: how long a
    parked sequence waits for LMCache. ``run_directory``: of the lookup socket."""

    file: LMCacheFile
    run_directory: Path
    model_revision: str
    salt: str
    lookup_seconds: float
    load_seconds: float

    def topology(self) -> Topology:
        """The settings in the form in which the scheduler side reads them: one tier, LMCache."""
        live = Live(min_load_tokens=DEFAULT_MIN_LOAD_TOKENS, tiers={TIER_NAME: LiveTier()})
        structural = Structural(
            policy=PolicyIdentity(namespace="", name="lmcache"),
            content_hash="",
            engine_type="ATOM",
            run_directory=str(self.run_directory),
            chunk_tokens=self.file.chunk_tokens,
            tiers=[MemoryTierDocument(name=TIER_NAME, capacity_bytes=1)],
            isolation=IsolationSettings(salt=self.salt, model_revision=self.model_revision),
            live=live,
        )
        return Topology(structural=structural, live=live)


def options_of(config: Any) -> CacheEngineOptions:
    """Reads ATOM's configuration. Raises ``KVTierError`` with what is wrong."""
    require_lmcache()
    found = transfer_config(config)
    reject_unknown("kv_transfer_config", found, OPTIONS)
    path = str(found.get("lmcache_config") or "").strip()
    if not path:
        raise ConfigurationError(
            "kv_transfer_config.lmcache_config", path, "must be the path of LMCache's configuration"
        )
    options = CacheEngineOptions(
        file=read_file(Path(path)),
        run_directory=Path(str(found.get("run_directory") or default_run_directory())),
        model_revision=str(found.get("model_revision") or ""),
        salt=str(found.get("salt") or ""),
        lookup_seconds=_seconds(
            found, "lookup_seconds", DEFAULT_LOOKUP_SECONDS, MAX_LOOKUP_SECONDS
        ),
        load_seconds=_seconds(found, "load_seconds", DEFAULT_LOAD_SECONDS, MAX_LOAD_SECONDS),
    )
    if options.file.persistent and not options.model_revision:
        raise ConfigurationError(
            "kv_transfer_config.model_revision",
            "",
            "must name the weights, because lmcache_config.remote_url keeps objects beyond this "
            "engine, and ATOM shows its weights to no connector",
        )
    if not options.run_directory.is_absolute():
        raise ConfigurationError(
            "kv_transfer_config.run_directory", str(options.run_directory), "must be absolute"
        )
    return options


def default_run_directory() -> str:
    """A memory-backed directory of this user."""
    return f"/dev/shm/kvtier-lookup-{os.geteuid()}"  # noqa: S108


def _seconds(found: Mapping[str, Any], name: str, default: float, most: float) -> float:
    value = found.get(name, default)
    # Not written as ``value > most``, which is false for a number that is none.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise ConfigurationError(
            f"kv_transfer_config.{name}", str(value), f"must be above 0 and at most {most:g}"
        )
    return float(value)


def check_chunk(planner: Planner, options: CacheEngineOptions) -> None:
    """Raises ``ConfigurationError`` unless LMCache's chunks are those of the planner."""
    if planner.chunk_tokens != options.file.chunk_tokens:
        raise ConfigurationError(
            "lmcache_config.chunk_size",
            str(options.file.chunk_tokens),
            f"must be a multiple of ATOM's block; {planner.chunk_tokens} is the next one",
        )
