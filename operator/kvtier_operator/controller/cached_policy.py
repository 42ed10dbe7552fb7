"""A policy as the lister holds it, decoded once."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.stored import read_stored
from kvtier_operator.api.validation import FieldError, InvalidDocumentError
from kvtier_operator.kube.resources import Object
from kvtier_operator.render.volumes import claim_name


@dataclass(frozen=True, slots=True)
class CachedPolicy:
    """A policy as last received. ``policy`` is None if the document is invalid; ``errors`` then
    says why. ``unknown_fields``: paths of fields that this version does not know.
    """

    raw: Object
    policy: KVTierPolicy | None
    errors: tuple[FieldError, ...] = ()
    unknown_fields: tuple[str, ...] = ()

    @property
    def uid(self) -> str:
        """``metadata.uid``."""
        return str(self.raw["metadata"].get("uid", ""))

    @property
    def generation(self) -> int:
        """``metadata.generation``."""
        return int(self.raw["metadata"].get("generation", 0))


def parse_policy(raw: Object) -> CachedPolicy:
    """Parses a policy as the API server sends it. An invalid policy has ``errors``."""
    try:
        stored = read_stored(raw)
    except InvalidDocumentError as error:
        return CachedPolicy(raw, None, tuple(error.errors))
    return CachedPolicy(raw, stored.policy, unknown_fields=stored.unknown_fields)


def claims_of(policy: KVTierPolicy | None) -> dict[str, str]:
    """The claim behind each volume that has one, by the volume's key."""
    if policy is None:
        return {}
    names = {
        volume.key: claim_name(policy, volume)
        for tier in policy.spec.tiers
        for volume in tier.volumes
    }
    return {volume: name for volume, name in names.items() if name is not None}
