"""What of a pod stands in the way of what would be added. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier_operator.render.attachment import PodObject, Skipped, SkipReason
from kvtier_operator.render.names import INJECTED_NAMES
from kvtier_operator.render.resources import containers

READ_ONLY_SOURCES = ("configMap", "secret", "downwardAPI", "projected", "image")


def taken_names(pod: PodObject) -> Skipped | None:
    """Containers and volumes that somebody wrote with KVTier's names: a pod that was attached by hand."""
    spec = pod.get("spec") or {}
    found = [f"container {each.get('name')}" for each in containers(spec)]
    found += [f"volume {each.get('name')}" for each in spec.get("volumes") or ()]
    ours = [each for each in found if each.split(" ", 1)[1].startswith(INJECTED_NAMES)]
    if not ours:
        return None
    return Skipped(
        SkipReason.ALREADY_CONFIGURED,
        f"the pod has {', '.join(ours)} already; rename or remove what begins with {INJECTED_NAMES}",
    )


def mounts(spec: Mapping[str, Any], engine: Mapping[str, Any], added: Sequence[Mapping[str, Any]]) -> Skipped | None:
    """Mounts of the engine's container that are where something has to be mounted, or are read-only above it, so that
    no directory to mount on can be made and the container would never start.
    """
    sources = {str(volume.get("name")): volume for volume in spec.get("volumes") or ()}
    for mount in engine.get("volumeMounts") or ():
        path = posixpath.normpath(str(mount.get("mountPath")))
        volume = sources.get(str(mount.get("name")), {})
        fixed = bool(mount.get("readOnly")) or any(source in volume for source in READ_ONLY_SOURCES)
        for wanted in (str(each["mountPath"]) for each in added):
            if path == wanted:
                message = (
                    f"container {engine['name']} mounts {mount.get('name')} at {path}, where KVTier's own would be"
                )
                return Skipped(SkipReason.ALREADY_CONFIGURED, f"{message}; mount it elsewhere")
            if fixed and (path == "/" or wanted.startswith(f"{path}/")):
                return Skipped(
                    SkipReason.WOULD_NOT_START,
                    f"container {engine['name']} mounts {mount.get('name')} read-only at {path}, so nothing can be mounted at "
                    f"{wanted}; mount it elsewhere, or writable",
                )
    return None
