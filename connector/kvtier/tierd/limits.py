"""What tierd may allocate beside the pool.

The sidecar's memory limit is the pool and a fixed sum. Running into it makes the kernel kill the container; running into a limit of the
process's own makes one allocation fail, and at worst tierd is restarted over the same pool.
"""

from __future__ import annotations

import logging
import resource
import threading

from kvtier.topology.models import FileSystemTierDocument, Structural

DATA_BYTES = 640 << 20
"""Of the 512 MiB for tierd and 256 MiB for indexes that the container's limit has beside the pool: what is left for the supervisor, code and
the kernel's own use is 128 MiB."""
STACK_BYTES = 1 << 20
"""Of each thread; the kernel counts address space, so the usual 8 MiB would be most of the limit."""
_OTHER_THREADS = 64

_log = logging.getLogger("kvtier.tierd")


def data_limit(structural: Structural, data_bytes: int) -> int:
    """``RLIMIT_DATA`` for a topology: ``data_bytes``, and the address space of the stacks of as many threads as its tiers have."""
    threads = _OTHER_THREADS + sum(
        tier.read_threads + tier.write_threads for tier in structural.tiers if isinstance(tier, FileSystemTierDocument)
    )
    return data_bytes + threads * STACK_BYTES


def apply(structural: Structural, data_bytes: int) -> int:
    """Limits this process, before it starts threads; returns the limit in bytes. What cannot be limited is logged."""
    limit = data_limit(structural, data_bytes)
    threading.stack_size(STACK_BYTES)
    try:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    except (OSError, ValueError) as error:
        _log.warning("RLIMIT_DATA cannot be set: %s", error)
        return 0
    return bound
