"""What no deletion takes along: directories of nodes and exports in which a policy's pods stored.

The operator mounts none of them, so it can neither look into them nor empty them; it says which they are, once, when a
policy goes. A policy that goes while the controller is away is not told of; its directory has its uid for a name.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_operator.api.allowlist import AllowedVolume
from kvtier_operator.api.volumes import Volume
from kvtier_operator.reconcile.events import NORMAL, Note, about_policy
from kvtier_operator.reconcile.observe import Known
from kvtier_operator.reconcile.reasons import Happening
from kvtier_operator.render.storage import sub_path


def left_behind(gone: Known, allowed: Sequence[AllowedVolume]) -> list[Note]:
    """One note for each tier on a node's directory or an export. Pure. None of a policy that was never in force: no pod
    has mounted anything for it.
    """
    policy = gone.policy
    if policy is None or not (gone.raw.get("status") or {}).get("liveGeneration"):
        return []
    notes = []
    for tier in policy.spec.tiers:
        place = _place(tier.file_system.volume) if tier.file_system is not None else ""
        if not place:
            continue
        own = sub_path(policy, tier, allowed)
        if own is None:
            text = f"what it stored in {place} stays among what others store there, and is evicted like theirs"
        else:
            text = f"directory {own} in {place} stays with what it stored; remove it once no pod uses it any more"
        notes.append(Note(about_policy(policy), NORMAL, Happening.DATA_LEFT.value, f"tier {tier.name}: {text}"))
    return notes


def _place(volume: Volume) -> str:
    if volume.host_path is not None:
        return f"{volume.host_path.path} of each node where its pods ran"
    if volume.nfs is not None:
        return f"{volume.nfs.server}:{volume.nfs.path}"
    return ""
