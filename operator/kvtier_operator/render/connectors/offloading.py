"""vLLM's own offloading (``OffloadingConnector``): a CPU tier in ``/dev/shm``, and an ordered list
of file tiers below it. Field names are those of vLLM 0.22 and later.

It has no weights, timeouts, directory capacity, admission, breaker or live changes. Its region in
``/dev/shm`` ends with the engine; the plugin removes what a killed engine left there.
``cpu_bytes_to_use`` is for all ranks together, like ``memory.capacity``.
"""

from __future__ import annotations

from typing import Any

from kvtier_operator.api.policy import PolicySpec
from kvtier_operator.api.validation import FieldError
from kvtier_operator.render.connectors.base import (
    ANY,
    Rendered,
    SupportedFields,
    isolated_path,
    several_volumes,
)

NAME = "vLLM's offloading"
SUPPORTED: SupportedFields = {
    "chunkTokens": ANY,
    "tiers[].memory.capacity": ANY,
    "tiers[].memory.evictionPolicy": ANY,
    "tiers[].memory.persistence": "Process",
    "tiers[].storePolicy": "All",
    "tiers[].fileSystem.readThreads": ANY,
    "tiers[].fileSystem.writeThreads": ANY,
    "tiers[].fileSystem.directIO": "Auto",
    "tiers[].fileSystem.sync": "None",
    "isolation.salt": ANY,
    "isolation.modelRevision": ANY,
    "isolation.encryption": "None",
}


def policy_errors(spec: PolicySpec) -> list[FieldError]:
    """Tiers of kinds that it does not support, and several volumes."""
    return several_volumes(spec, NAME) + [
        FieldError.forbidden(
            f"spec.tiers[{index}].lmcache", f"{NAME} supports memory and fileSystem tiers only"
        )
        for index, tier in enumerate(spec.tiers)
        if tier.lmcache is not None
    ]


def render(spec: PolicySpec, tier_paths: dict[str, str], local_ranks: int) -> Rendered:
    """See ``kvtier_operator.render.connectors.render``.

    ``local_ranks`` has no effect: sizes are the pod's.
    """
    del local_ranks
    memory = spec.tiers[0].memory
    if memory is None:
        raise ValueError("the first tier must be a memory tier")
    capacity = memory.capacity.size_bytes
    extra: dict[str, Any] = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": capacity,
        "block_size": spec.tokens_per_chunk,
        "eviction_policy": memory.eviction_policy.value.lower(),
        "secondary_tiers": [
            {
                "type": "fs",
                "root_dir": isolated_path(tier_paths[tier.name], spec.isolation),
                "n_read_threads": tier.file_system.read_threads,
                "n_write_threads": tier.file_system.write_threads,
            }
            for tier in spec.tiers
            if tier.file_system is not None
        ],
    }
    return Rendered(
        transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        },
        shared_memory_bytes=capacity,
        engine_memory_bytes=capacity,
    )
