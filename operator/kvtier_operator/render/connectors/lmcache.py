"""LMCache inside the engine (``LMCacheConnectorV1``), configured by its environment variables.

Its sizes are decimal numbers in GiB per worker rank; a policy's are per pod, and are converted. It
has one local disk, which no other process shares, and one remote store. A directory that nodes
share is its remote ``fs://`` store.
"""

from __future__ import annotations

from fractions import Fraction

from kvtier_operator.api.file_tier import Sharing
from kvtier_operator.api.policy import PolicySpec
from kvtier_operator.api.tiers import TierSpec
from kvtier_operator.api.validation import FieldError
from kvtier_operator.render.connectors.base import (
    ANY,
    Rendered,
    SupportedFields,
    isolated_path,
    several_volumes,
)

NAME = "LMCache"
GIB = 1 << 30
SUPPORTED: SupportedFields = {
    "chunkTokens": ANY,
    "minLoadTokens": ANY,
    "tiers[].memory.capacity": ANY,
    "tiers[].memory.evictionPolicy": "LRU",
    "tiers[].memory.persistence": "Process",
    "tiers[].storePolicy": "All",
    "tiers[].lookupTimeoutMilliseconds": ANY,
    "tiers[].loadTimeoutSeconds": ANY,
    "tiers[].fileSystem.capacity": ANY,
    "tiers[].fileSystem.sync": "None",
    "tiers[].lmcache.url": ANY,
    "isolation.salt": ANY,
    "isolation.modelRevision": ANY,
    "isolation.encryption": "None",
}


def policy_errors(spec: PolicySpec) -> list[FieldError]:
    """Several volumes, a second local disk, a second remote store."""
    found = several_volumes(spec, NAME)
    for what, tiers in (("local disk", _local(spec)), ("remote store", _remote(spec))):
        for index, tier in tiers[1:]:
            found.append(
                FieldError.invalid(
                    f"spec.tiers[{index}]",
                    tier.name,
                    f"must not be a second {what} (the first is {tiers[0][1].name}): {NAME} has "
                    "one",
                )
            )
    return found


def render(spec: PolicySpec, tier_paths: dict[str, str], local_ranks: int) -> Rendered:
    """See ``kvtier_operator.render.connectors.render``."""
    memory = spec.tiers[0].memory
    if memory is None:
        raise ValueError("the first tier must be a memory tier")
    variables = {
        "LMCACHE_CHUNK_SIZE": str(spec.tokens_per_chunk),
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": _gib(memory.capacity.size_bytes, local_ranks),
        "LMCACHE_MIN_RETRIEVE_TOKENS": str(spec.min_load_tokens),
    }
    for _, tier in _local(spec):
        if tier.file_system is not None:
            variables["LMCACHE_LOCAL_DISK"] = (
                f"file://{isolated_path(tier_paths[tier.name], spec.isolation)}/"
            )
            variables["LMCACHE_MAX_LOCAL_DISK_SIZE"] = _gib(
                tier.file_system.total_bytes, local_ranks
            )
    for _, tier in _remote(spec):
        if tier.lmcache is not None:
            variables["LMCACHE_REMOTE_URL"] = tier.lmcache.url
        else:
            # The host part is not used, and has to be there.
            variables["LMCACHE_REMOTE_URL"] = (
                f"fs://localhost:0{isolated_path(tier_paths[tier.name], spec.isolation)}"
            )
    lower = [tier for tier in spec.tiers if tier.memory is None]
    if lower:
        # One limit for all: the largest, as a plan over several tiers has it.
        variables["LMCACHE_BLOCKING_TIMEOUT_SECS"] = str(
            max(tier.load_timeout_seconds for tier in lower)
        )
        variables["LMCACHE_LOOKUP_TIMEOUT_MS"] = str(
            max(tier.lookup_timeout_milliseconds for tier in lower)
        )
    return Rendered(
        transfer_config={
            "kv_connector": "LMCacheConnectorV1",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        },
        environment=variables,
        engine_memory_bytes=memory.capacity.size_bytes,
    )


def _local(spec: PolicySpec) -> list[tuple[int, TierSpec]]:
    return [
        (index, tier)
        for index, tier in enumerate(spec.tiers)
        if tier.file_system is not None and tier.file_system.sharing is not Sharing.CLUSTER
    ]


def _remote(spec: PolicySpec) -> list[tuple[int, TierSpec]]:
    return [
        (index, tier)
        for index, tier in enumerate(spec.tiers)
        if tier.lmcache is not None
        or (tier.file_system is not None and tier.file_system.sharing is Sharing.CLUSTER)
    ]


def _gib(size_bytes: int, ranks: int) -> str:
    """A rank's share in GiB as a decimal number, rounded down: never above the budget."""
    share = Fraction(size_bytes, ranks * GIB)
    return f"{int(share * 1_000_000) / 1_000_000:.6f}".rstrip("0").rstrip(".") or "0"
