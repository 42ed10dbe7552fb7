"""The region in ``/dev/shm`` of vLLM's own offloading, over restarts of the engine's container.

vLLM removes the file of its region when it exits. After a SIGKILL, or if the kernel ends it for
lack of memory, the file stays: ``/dev/shm`` belongs to the pod and outlives the container. The next
start would find too little room and fail, again and again. So the plugin names the region after the
pod, and before each start removes what earlier containers of the pod left.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

POD_VARIABLE = "KVTIER_POD_UID"
"""The pod's uid. Without it regions have vLLM's own names, and none is removed."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where vLLM creates the region)
_PREFIX = "vllm_offload_"

logger = logging.getLogger(__name__)


def prepare(transfer: Any, directory: Path = SHARED_MEMORY) -> str:
    """Names the region of an engine that is about to start, after removing those of earlier ones.

    ``transfer``: vLLM's ``KVTransferConfig`` of an ``OffloadingConnector``; its ``engine_id`` is
    set. Returns why the region cannot be created, empty if it can. Raises ``OSError`` if the
    directory cannot be read.
    """
    pod = os.environ.get(POD_VARIABLE, "").strip()
    if pod:
        removed = remove_leftovers(pod, directory)
        if removed:
            logger.info("KVTier: removed %d offload regions of ended engines", len(removed))
        transfer.engine_id = f"{_engine_prefix(pod)}{uuid.uuid4().hex}"
    extra = transfer.kv_connector_extra_config or {}
    needed, free = int(extra.get("cpu_bytes_to_use") or 0), shutil.disk_usage(directory).free
    if needed > free:
        return f"the tiers need {needed} bytes in {directory}, and {free} are free"
    return ""


def remove_leftovers(pod: str, directory: Path = SHARED_MEMORY) -> list[str]:
    """Removes the regions of this pod that no process has open, and returns their names.

    A region is created and opened in one step and stays open while its engine lives, so files are
    listed before processes. Regions of another user stay, and so do those of other pods.
    """
    user = os.geteuid()
    found: dict[str, Path] = {}
    for path in directory.glob(f"{_PREFIX}{_engine_prefix(pod)}*"):
        try:
            owner = path.lstat().st_uid
        except FileNotFoundError:
            continue
        if owner == user:
            found[path.name] = path
    if not found:
        return []
    for used in _open_names():
        found.pop(used, None)
    for path in found.values():
        path.unlink(missing_ok=True)
    return sorted(found)


def _engine_prefix(pod: str) -> str:
    return f"kvtier-{pod}-"


def _open_names() -> Iterator[str]:
    """Names of files that processes have open or mapped. Names of regions are unique, and to look
    at the files themselves could hang on other mounts. A process that cannot be inspected has
    another user or more privileges than this one, so it is no engine of this container.
    """
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            yield from _names_of(process)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue


def _names_of(process: Path) -> Iterator[str]:
    for descriptor in (process / "fd").iterdir():
        try:
            yield os.path.basename(os.readlink(descriptor))
        except FileNotFoundError:
            continue
    for line in (process / "maps").read_text(errors="replace").splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6:
            yield os.path.basename(parts[5])
