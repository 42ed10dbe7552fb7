"""Finding the engine in a pod, and what its command says about it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvtier_operator.api.names import INJECTED_NAMES
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.injection.command_line import Said, number, read
from kvtier_operator.injection.decision import PodObject
from kvtier_operator.injection.resources import Amounts, limits_of, requests_of
from kvtier_operator.injection.resources import containers as all_containers
from kvtier_operator.render.admission import MIRROR_ANNOTATION

_GPU = re.compile(r"(^|[./-])(v?gpu|mig-|gaudi$)", re.IGNORECASE)
_COUNTED = re.compile(r"/(v?gpu(\.shared)?|mig-[\w.]+|gaudi)$|^gpu\.intel\.com/(i915|xe)$")
"""Resources whose number is one of devices, and not of bytes or shares."""
_VLLM_IMAGE = re.compile(r"(^|[/_.-])vllm([/_.:@-]|$)")
_VLLM_WORD = re.compile(r"(^|/)vllm$|^vllm\.|^vllm/")
SIZES = (
    ("tensor-parallel-size", ("TENSOR_PARALLEL_SIZE", "VLLM_TENSOR_PARALLEL_SIZE", "TP_SIZE")),
    (
        "pipeline-parallel-size",
        ("PIPELINE_PARALLEL_SIZE", "VLLM_PIPELINE_PARALLEL_SIZE", "PP_SIZE"),
    ),
    ("prefill-context-parallel-size", ()),
)
"""Options that multiply the ranks of one engine, and variables by which launchers are told the same."""
MAX_CONTAINERS = 128
MAX_AMOUNTS = 1024
"""Requests and limits of all containers together. A request to the API server has room for thousands of either, every one of which
is compared with every LimitRange and quota: such a pod would take the webhook's threads for minutes."""


@dataclass(frozen=True, slots=True)
class EngineContainer:
    """The engine's container in ``spec.containers``."""

    index: int
    name: str


def owner_of(pod: PodObject) -> tuple[str, str, str] | None:
    """``(kind, name, uid)`` of the owner that controls the pod, or None."""
    for owner in (pod.get("metadata") or {}).get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner.get("kind")), str(owner.get("name")), str(owner.get("uid"))
    return None


def unsupported_owner(pod: PodObject) -> str | None:
    """Why a pod is none that is ever attached, or None: those of a DaemonSet, and static ones."""
    metadata = pod.get("metadata") or {}
    kinds = {str(owner.get("kind")) for owner in metadata.get("ownerReferences") or ()}
    if "DaemonSet" in kinds:
        return "pods of a DaemonSet are left alone; run the engine as a Deployment, StatefulSet or LeaderWorkerSet"
    if MIRROR_ANNOTATION in (metadata.get("annotations") or {}) or "Node" in kinds:
        return "static pods are left alone: the API server does not make them; run the engine as a Deployment"
    return None


def too_many(pod: PodObject) -> str | None:
    """Why a pod is too large to be looked into, or None."""
    found = all_containers(pod.get("spec") or {})
    if len(found) > MAX_CONTAINERS:
        return f"the pod has {len(found)} containers; an engine is looked for among at most {MAX_CONTAINERS}"
    resources = [each.get("resources") or {} for each in found]
    amounts = sum(
        len(each.get("limits") or ()) + len(each.get("requests") or ()) for each in resources
    )
    if amounts > MAX_AMOUNTS:
        return f"the pod's containers have {amounts} requests and limits; at most {MAX_AMOUNTS} are looked at"
    return None


def engine_container(policy: KVTierPolicy, pod: PodObject) -> EngineContainer | str:
    """The engine's container, or one sentence that says why there is none.

    The one that the policy names; else the only one with a GPU; else the only one that looks like vLLM by its command,
    by its variables, by its image, in this order.
    """
    found = [
        (index, each)
        for index, each in enumerate((pod.get("spec") or {}).get("containers") or ())
        if not str(each.get("name")).startswith(INJECTED_NAMES)
    ]
    wanted = policy.spec.engine.container_name
    if wanted is not None:
        for index, each in found:
            if each.get("name") == wanted:
                return EngineContainer(index, wanted)
        return f"no container is called {wanted} (spec.engine.containerName); the pod has {_names(found)}"
    with_gpu = [(index, each) for index, each in found if has_gpu(each)]
    if len(with_gpu) == 1:
        return _engine(with_gpu[0])
    candidates = with_gpu or found
    for looks_like in (_by_command, _by_environment, _by_image):
        alike = [(index, each) for index, each in candidates if looks_like(each)]
        if len(alike) == 1:
            return _engine(alike[0])
        if alike:
            return f"containers {_names(alike)} all look like an engine; name one in spec.engine.containerName"
    what = "several have a GPU" if with_gpu else "none has a GPU"
    return (
        f"of the containers {_names(found)} {what} and none looks like vLLM by command, variables or image; "
        "name the engine's in spec.engine.containerName"
    )


def has_gpu(container: Mapping[str, Any]) -> bool:
    """Whether it asks for a GPU, a part of one, or a claimed device."""
    if (container.get("resources") or {}).get("claims"):
        return True
    return any(value > 0 and _GPU.search(name) for name, value in _asked(container).items())


def gpu_count(container: Mapping[str, Any]) -> int:
    """GPUs of device plugins; claimed devices are not counted."""
    return int(
        sum(
            (value for name, value in _asked(container).items() if _COUNTED.search(name)),
            Fraction(0),
        )
    )


def _asked(container: Mapping[str, Any]) -> Amounts:
    return {**requests_of(container), **limits_of(container)}


def local_ranks(policy: KVTierPolicy, container: Mapping[str, Any], said: Said) -> int | None:
    """Worker ranks in the pod: as the policy says, else by the engine's options, else one for each GPU; None: unknown."""
    if policy.spec.engine.local_ranks is not None:
        return policy.spec.engine.local_ranks
    world = world_size(said)
    gpus = gpu_count(container) or None
    if world is None:
        return gpus
    replicas = (
        number(said.option("data-parallel-size-local"))
        or number(said.option("data-parallel-size"))
        or 1
    )
    return min(world * replicas, gpus) if gpus else world * replicas


def world_size(said: Said) -> int | None:
    """Ranks of one engine by its options, or None where none is given."""
    product, known = 1, False
    for name, others in SIZES:
        value = number(said.option(name))
        for other in others:
            value = value or number(said.variables.get(other))
        if value is not None:
            product, known = product * value, True
    return product if known else None


def _engine(found: tuple[int, Mapping[str, Any]]) -> EngineContainer:
    return EngineContainer(found[0], str(found[1].get("name")))


def _names(found: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    return ", ".join(str(each.get("name")) for _, each in found) or "none"


def _by_command(container: Mapping[str, Any]) -> bool:
    return any(_VLLM_WORD.search(word) for word in read(container).words)


def _by_environment(container: Mapping[str, Any]) -> bool:
    return any(str(entry.get("name")).startswith("VLLM_") for entry in container.get("env") or ())


def _by_image(container: Mapping[str, Any]) -> bool:
    return bool(_VLLM_IMAGE.search(str(container.get("image") or "")))
