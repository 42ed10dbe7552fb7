"""Warnings about what a change of a policy costs: another tier, another place, other objects.

None of these changes is refused. What they have in common is that tiers which were full start empty
without anything being wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvtier_operator.api.policy import KVTierPolicy, PolicySpec
from kvtier_operator.api.tiers import TierSpec
from kvtier_operator.render.volumes import claim_name

IDENTITY: tuple[tuple[str, Callable[[PolicySpec], object]], ...] = (
    ("chunkTokens", lambda spec: spec.tokens_per_chunk),
    ("engine.hashSeed", lambda spec: spec.engine.hash_seed),
    ("isolation.salt", lambda spec: spec.isolation.salt),
    ("isolation.modelRevision", lambda spec: spec.isolation.model_revision),
)
"""Fields that are part of the namespace of every object."""


def transition_warnings(before: KVTierPolicy, after: KVTierPolicy) -> Iterator[str]:
    """The warnings about a change of a stored policy."""
    for path, read in IDENTITY:
        if read(before.spec) != read(after.spec):
            yield (
                f"spec.{path}: objects that were stored before this change are not used after it; "
                "the tiers fill again as pods are replaced"
            )
    old = {tier.name: tier for tier in before.spec.tiers}
    new = {tier.name for tier in after.spec.tiers}
    gone = [tier for tier in before.spec.tiers if tier.name not in new]
    for index, tier in enumerate(after.spec.tiers):
        path = f"spec.tiers[{index}]"
        if tier.name in old:
            yield from _changed(path, before, old[tier.name], tier)
            continue
        renamed = next((each for each in gone if _kind(each) == _kind(tier)), None)
        if renamed is not None:
            gone.remove(renamed)
            yield (
                f'{path}.name: "{tier.name}" is another tier than "{renamed.name}": pods get it '
                "when they are replaced, and its metrics and status begin again"
                f"{_claim(before, renamed)}"
            )
    for tier in gone:
        yield (
            f'spec.tiers: tier "{tier.name}" is gone from pods when they are replaced'
            f"{_claim(before, tier)}"
        )


def _changed(path: str, policy: KVTierPolicy, before: TierSpec, after: TierSpec) -> Iterator[str]:
    if _kind(before) != _kind(after):
        yield (
            f'{path}: tier "{after.name}" is of another kind now and starts empty'
            f"{_claim(policy, before)}"
        )
        return
    new = {each.name: each.volume for each in after.volumes}
    for each in before.volumes:
        if new.get(each.name) == each.volume:
            continue
        if each.name:
            yield (
                f'{path}.fileSystem.volumes: what tier "{after.name}" holds on volume '
                f'"{each.name}" is not used by pods that are created from now on'
            )
        else:
            yield (
                f'{path}.fileSystem.volume: tier "{after.name}" does not hold there what it holds '
                f"now; pods use the new volume when they are replaced{_claim(policy, before)}"
            )


def _kind(tier: TierSpec) -> str:
    if tier.memory is not None:
        return "memory"
    return "fileSystem" if tier.file_system is not None else "lmcache"


def _claim(policy: KVTierPolicy, tier: TierSpec) -> str:
    """What happens to the claim that the operator created from a template for the tier."""
    for each in tier.volumes:
        if each.volume.claim_template is not None:
            name = claim_name(policy, each)
            return f". Claim {name} is deleted with its data once no pod mounts it"
    return ""
