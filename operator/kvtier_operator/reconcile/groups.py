"""Groups of pods that make up one engine (LeaderWorkerSet): all of a group get the same structure, or none. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_operator.reconcile import objects
from kvtier_operator.reconcile.podview import PodView
from kvtier_operator.render.names import STRUCTURAL_ANNOTATION


def mixed_groups(pods: Sequence[PodView]) -> list[str]:
    """One pod of each group whose pods differ, and in what, as words."""
    groups: dict[str, list[PodView]] = {}
    for pod in pods:
        key = objects.labels(pod.pod).get(objects.GROUP_KEY_LABEL)
        if key:
            groups.setdefault(key, []).append(pod)
    found = []
    for members in groups.values():
        structures = {objects.annotated(each.pod).get(STRUCTURAL_ANNOTATION) for each in members}
        if len(structures) > 1:
            names = objects.listed(each.name for each in members)
            what = "some have tiers and some have none" if None in structures else "they have different structures"
            found.append(f"{names}: {what}")
    return sorted(found)
