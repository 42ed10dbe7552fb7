"""Whether an object says what it should, so that only what differs is written. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier_operator.cluster.contract import Object


def differs(desired: Any, found: Any) -> bool:
    """Whether ``found`` lacks anything of ``desired``. What others added (keys, owners) is theirs and no difference."""
    if isinstance(desired, Mapping):
        if not isinstance(found, Mapping):
            return True
        return any(
            _owners_missing(value, found.get(key)) if key == "ownerReferences" else differs(value, found.get(key))
            for key, value in desired.items()
        )
    return bool(desired != found)


def _owners_missing(desired: list[Object], found: Any) -> bool:
    present = {owner.get("uid") for owner in found or ()}
    return any(owner["uid"] not in present for owner in desired)


def is_leaving(found: Object) -> bool:
    """Whether the object is being deleted: nothing is applied to such a one."""
    return bool(found["metadata"].get("deletionTimestamp"))
