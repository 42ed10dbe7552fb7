"""Environment variables of ATOM that shape KV.

ATOM chooses kernels, the layout of a block and the precision of intermediate values by variables of
its own and of its kernel libraries. Which of them matter changes from version to version, so every
variable that is set and has such a name is part of the identity, except those that are known to
concern processes, reports or the schedule. A variable that is not set has the default of the
version, which is part of the identity.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

SHAPING_PREFIXES = ("ATOM_", "AITER_", "FLA_", "V4_")
SHAPING_NAMES = frozenset(
    {
        "ENABLE_CUDA_GRAPH",
        "GDN_RECOMPUTE_SUPPRESS_LEVEL",
        "GPU_ARCHS",
        "KERNEL_SEQ_SIZE_PER_BLOCK",
        "SEQ_SIZE_PER_BLOCK",
        "USE_DEFAULT_FLA_NORM",
        "VLLM_PP_LAYER_PARTITION",
    }
)
"""Variables with other names that ATOM reads."""
OTHER_PREFIXES = (
    "ATOM_CRASH_ON_",
    "ATOM_DEBUG_TOPK",
    "ATOM_DP_",
    "ATOM_FWD_DUMP_",
    "ATOM_KV_EVENTS_",
    "ATOM_KV_OFFLOAD",
    "ATOM_LOADER_",
    "ATOM_LOG_",
    "ATOM_PREFILL_DELAYER_",
    "ATOM_PROFILER_",
    "ATOM_WEIGHT_DUMP_",
)
OTHER_NAMES = frozenset(
    {
        "AITER_JIT_DIR",
        "AITER_LOG_LEVEL",
        "AITER_LOG_MORE",
        "AITER_REBUILD",
        "ATOM_AUTO_NUMA_BIND",
        "ATOM_DISABLE_MMAP",
        "ATOM_ENABLE_DETAILED_ANNOTATION",
        "ATOM_ENABLE_PREFILL_DELAYER",
        "ATOM_GC_THRESHOLD",
        "ATOM_HOST_IP",
        "ATOM_MOONCAKE_IB_DEVICE",
        "ATOM_NUMA_BIND",
        "ATOM_NUMA_NODE",
        "ATOM_PROCESS_NAME_PREFIX",
        "ATOM_RTL_TRACE_DIR",
        "ATOM_TORCH_PROFILER_DIR",
        "FLA_CI_ENV",
    }
)
"""Variables that shape no KV: processes, reports, the schedule, how files of weights are read. The
processes of one engine may have different values of them."""
_SERVICE_LINK = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$"
)
"""Kubernetes sets such variables for each Service of the namespace, by the name of the Service, for
example ``ATOM_SERVICE_HOST``. Another pod, or the same one at another time, has others."""
_INITIAL = Path("/proc/self/environ")


def shapes_kv(name: str) -> bool:
    """Whether the variable is part of the identity."""
    if name in SHAPING_NAMES:
        return True
    if name in OTHER_NAMES or name.startswith(OTHER_PREFIXES) or _SERVICE_LINK.search(name):
        return False
    return name.startswith(SHAPING_PREFIXES)


def shaping_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that are part of the identity."""
    return {name: value for name, value in sorted(environment.items()) if shapes_kv(name)}


def initial_environment(path: Path = _INITIAL) -> dict[str, str]:
    """Returns the environment with which this process was started.

    ATOM changes that of a rank's process by its configuration, which the scheduler side, in another
    process, does not see. Where the system does not tell, the current environment is returned.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return dict(os.environ)
    pairs = (each.partition(b"=") for each in content.split(b"\0") if b"=" in each)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
