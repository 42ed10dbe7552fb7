"""The engine's container in a pod, and what its command line says about the engine. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvtier_operator.api.names import INJECTED_NAMES, MIRROR_ANNOTATION
from kvtier_operator.api.pods import Container, Pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.injection.command_line import CommandLine, parse_command_line, parse_count
from kvtier_operator.injection.resources import (
    Amounts,
    container_limits,
    container_requests,
    has_pod_level_resources,
    qos_class,
)

_GPU = re.compile(r"(^|[./-])(v?gpu|mig-|gaudi$)", re.IGNORECASE)
_COUNTED = re.compile(r"/(v?gpu(\.shared)?|mig-[\w.]+|gaudi)$|^gpu\.intel\.com/(i915|xe)$")
"""Resources that are counted in devices, not in bytes or shares."""
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
"""Options that multiply the ranks of one engine, and the variables that launchers read instead."""
MAX_CONTAINERS = 128
MAX_AMOUNTS = 1024
"""Requests and limits of all containers together. A request to the API server has room for
thousands, and each one is compared with every LimitRange and quota: such a pod would occupy the
webhook's threads for minutes."""


@dataclass(frozen=True, slots=True)
class EngineContainer:
    """The engine's container in ``spec.containers``."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class EnginePod:
    """A pod with an engine, as it is before injection. ``guaranteed``: it has the QoS class
    Guaranteed by its containers, and must keep it.
    """

    pod: Pod
    engine: Container
    command: CommandLine
    guaranteed: bool

    @classmethod
    def of(cls, pod: Pod, index: int) -> EnginePod:
        """The engine is ``spec.containers[index]``."""
        engine = pod.spec.containers[index]
        guaranteed = not has_pod_level_resources(pod.spec) and qos_class(pod.spec) == "Guaranteed"
        return cls(pod, engine, parse_command_line(engine), guaranteed)


def unsupported_owner(pod: Pod) -> str | None:
    """Why pods of this kind are always skipped, or None: pods of a DaemonSet, and static pods."""
    kinds = {owner.kind for owner in pod.metadata.owner_references}
    if "DaemonSet" in kinds:
        return (
            "pods of a DaemonSet are skipped; run the engine as a Deployment, StatefulSet or "
            "LeaderWorkerSet"
        )
    if MIRROR_ANNOTATION in pod.metadata.annotations or "Node" in kinds:
        return (
            "static pods are skipped, because the kubelet creates them, not the API server; run "
            "the engine as a Deployment"
        )
    return None


def too_large(pod: Pod) -> str | None:
    """Why a pod is too large to be inspected, or None."""
    containers = pod.spec.all_containers
    if len(containers) > MAX_CONTAINERS:
        return f"the pod has {len(containers)} containers; at most {MAX_CONTAINERS} are inspected"
    amounts = sum(len(each.resources.limits) + len(each.resources.requests) for each in containers)
    if amounts > MAX_AMOUNTS:
        return (
            f"the pod's containers have {amounts} requests and limits; at most {MAX_AMOUNTS} are "
            "inspected"
        )
    return None


def engine_container(policy: KVTierPolicy, pod: Pod) -> EngineContainer | str:
    """The engine's container, or one sentence that says why there is none.

    It is the container that the policy names; else the only one with a GPU; else the only one that
    looks like vLLM by its command, by its variables, by its image, in this order.
    """
    containers = [
        (index, each)
        for index, each in enumerate(pod.spec.containers)
        if not each.name.startswith(INJECTED_NAMES)
    ]
    named = policy.spec.engine.container_name
    if named is not None:
        for index, each in containers:
            if each.name == named:
                return EngineContainer(index, named)
        return (
            f"no container is named {named} (spec.engine.containerName); the pod has "
            f"{_names(containers)}"
        )
    with_gpu = [(index, each) for index, each in containers if has_gpu(each)]
    if len(with_gpu) == 1:
        return _engine(with_gpu[0])
    candidates = with_gpu or containers
    for looks_like_vllm in (_by_command, _by_environment, _by_image):
        alike = [(index, each) for index, each in candidates if looks_like_vllm(each)]
        if len(alike) == 1:
            return _engine(alike[0])
        if alike:
            return (
                f"containers {_names(alike)} all look like an engine; set "
                "spec.engine.containerName to one of them"
            )
    gpus = "several have a GPU" if with_gpu else "none has a GPU"
    return (
        f"of the containers {_names(containers)} {gpus} and none looks like vLLM by command, "
        "variables or image; "
        "set spec.engine.containerName"
    )


def has_gpu(container: Container) -> bool:
    """Whether the container requests a GPU, a part of one, or a claimed device."""
    if container.resources.claims:
        return True
    return any(value > 0 and _GPU.search(name) for name, value in _amounts(container).items())


def gpu_count(container: Container) -> int:
    """GPUs of device plugins; claimed devices are not counted."""
    counts = (value for name, value in _amounts(container).items() if _COUNTED.search(name))
    return int(sum(counts, Fraction(0)))


def local_ranks(policy: KVTierPolicy, container: Container, command: CommandLine) -> int | None:
    """Worker ranks in the pod: as the policy says, else by the engine's options, else one per GPU.
    None: unknown.
    """
    if policy.spec.engine.local_ranks is not None:
        return policy.spec.engine.local_ranks
    world = world_size(command)
    gpus = gpu_count(container) or None
    if world is None:
        return gpus
    replicas = (
        parse_count(command.option("data-parallel-size-local"))
        or parse_count(command.option("data-parallel-size"))
        or 1
    )
    return min(world * replicas, gpus) if gpus else world * replicas


def world_size(command: CommandLine) -> int | None:
    """Ranks of one engine by its options; None if no option sets them."""
    product, known = 1, False
    for name, variables in SIZES:
        value = parse_count(command.option(name))
        for variable in variables:
            value = value or parse_count(command.variables.get(variable))
        if value is not None:
            product, known = product * value, True
    return product if known else None


def _amounts(container: Container) -> Amounts:
    return {**container_requests(container), **container_limits(container)}


def _engine(found: tuple[int, Container]) -> EngineContainer:
    return EngineContainer(found[0], found[1].name)


def _names(found: Sequence[tuple[int, Container]]) -> str:
    return ", ".join(each.name for _, each in found) or "none"


def _by_command(container: Container) -> bool:
    return any(_VLLM_WORD.search(word) for word in parse_command_line(container).words)


def _by_environment(container: Container) -> bool:
    return any(variable.name.startswith("VLLM_") for variable in container.env)


def _by_image(container: Container) -> bool:
    return bool(_VLLM_IMAGE.search(container.image))
