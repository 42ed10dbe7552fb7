"""The configuration file of LMCache, as far as the CacheEngine path can keep its promises with it.

Options that this path does not honor, or that would change bytes, are rejected by name.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvtier.config.lmcache_url import printable, requirement
from kvtier.errors import ConfigurationError, KVTierError
from kvtier.tiers.lmcache.wire import LMCACHE_VERSION

DEFAULT_CHUNK_TOKENS = 256
OPTIONS = frozenset(
    {
        "chunk_size",
        "local_cpu",
        "max_local_cpu_size",
        "local_disk",
        "max_local_disk_size",
        "remote_url",
        "remote_serde",
        "cache_policy",
        "blocking_timeout_secs",
        "numa_mode",
        "py_enable_gc",
    }
)


def require_lmcache(version: Callable[[str], str] = importlib.metadata.version) -> None:
    """Raises ``KVTierError`` unless LMCache is installed in the version that this path is made for.

    Does not import it.
    """
    try:
        found = version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        raise KVTierError("the package lmcache is not installed") from None
    if found != LMCACHE_VERSION:
        raise KVTierError(f"the package lmcache is {found}: must be {LMCACHE_VERSION}")


@dataclass(frozen=True, slots=True)
class LMCacheFile:
    """``options``: of the file. ``chunk_tokens``: LMCache's chunk size. ``persistent``: whether
    objects outlive the process."""

    path: Path
    options: Mapping[str, Any]
    chunk_tokens: int
    persistent: bool


def reject_unknown(field: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises ``ConfigurationError`` for the first of the ``options`` of ``field`` that is not
    known. Its value is not shown unless it is a number: some options of LMCache hold passwords."""
    for name in options:
        if name not in known:
            raise ConfigurationError(
                f"{field}.{name}",
                _printable_option(options[name]),
                f"is not supported: supported are {', '.join(sorted(known))}",
            )


def _printable_option(value: object) -> str:
    return str(value) if value is None or isinstance(value, int | float) else "***"


def read_file(path: Path) -> LMCacheFile:
    """Reads and checks LMCache's configuration. Raises ``ConfigurationError``."""
    try:
        options = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError("lmcache_config", str(path), f"cannot be read: {error}") from error
    if not isinstance(options, dict):
        raise ConfigurationError("lmcache_config", str(path), "must be a mapping")
    reject_unknown("lmcache_config", options, OPTIONS)
    chunk = options.get("chunk_size", DEFAULT_CHUNK_TOKENS)
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise ConfigurationError(
            "lmcache_config.chunk_size", str(chunk), "must be a number above 0"
        )
    if options.get("remote_serde") not in (None, "naive"):
        raise ConfigurationError(
            "lmcache_config.remote_serde",
            str(options["remote_serde"]),
            "must be naive: KVTier's bytes must come back as they were",
        )
    url = options.get("remote_url")
    problem = "" if url is None else requirement(str(url))
    if problem:
        raise ConfigurationError("lmcache_config.remote_url", printable(str(url)), problem)
    return LMCacheFile(path, options, chunk, url is not None)
