"""The engine's container in a pod, and what its command line says about the engine. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction

from kvtier_operator.api.conditions import SkipReason
from kvtier_operator.api.engine import EngineType
from kvtier_operator.api.names import INJECTED_NAMES, MIRROR_ANNOTATION
from kvtier_operator.api.pods import Container, Pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.injection.command_line import CommandLine, parse_command_line, parse_count
from kvtier_operator.injection.decision import Skipped
from kvtier_operator.injection.programs import (
    ENGINE_PROGRAMS,
    NAMED_PROGRAMS,
    Program,
    program_of_image,
)
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
_OTHER_DEVICE = re.compile(r"/(tpu|npu|ascend|neuron)|(^|[./-])(tpu|npu|neuron)", re.IGNORECASE)
_OTHER_DEVICE_IMAGE = re.compile(
    r"(^|[/_.:-])vllm[-_](tpu|ascend|neuron|npu)|vllm:[\w.-]*(tpu|npu)"
)
_VLLM_NAME = re.compile(r"(^|-)vllm(-|$)")
_ADDRESS = re.compile(r"URL|URI|HOST|ADDR|ENDPOINT|SERVICE|API_KEY|TOKEN|_PORT")
"""In names of variables by which a client finds a server."""
VLLM_OPTIONS = frozenset(
    {
        "enable-chunked-prefill",
        "enable-prefix-caching",
        "enforce-eager",
        "gpu-memory-utilization",
        "kv-offloading-size",
        "kv-transfer-config",
        "limit-mm-per-prompt",
        "max-model-len",
        "max-num-batched-tokens",
        "max-num-seqs",
    }
)
"""Options that only vLLM has among the common engines."""
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


class Evidence(IntEnum):
    """What identifies a container as vLLM's server; the greater, the stronger. ``TRACES``: a GPU,
    and arguments, variables or a name of vLLM.
    """

    TRACES = 1
    IMAGE = 2
    COMMAND = 3


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


def engine_container(policy: KVTierPolicy, pod: Pod) -> EngineContainer | Skipped:
    """The engine's container, or why there is none.

    It is the container that the policy names; else the only one that something identifies as vLLM's
    server (``evidence``). If several are identified, one with a GPU precedes the others, and then a
    command precedes an image, and an image the rest.
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
                return _named_container(policy.spec.engine.type, index, each)
        return _no_engine(
            f"no container is named {named} (spec.engine.containerName); the pod has "
            f"{_names(containers)}"
        )
    if policy.spec.engine.type is EngineType.ATOM:
        return _atom_container(containers)
    found: list[tuple[tuple[bool, int], int, Container]] = []
    for index, each in containers:
        strength = evidence(each)
        if strength is not None:
            found.append(((has_gpu(each), strength), index, each))
    if not found:
        return _nothing_found(containers)
    strongest = max(rank for rank, _, _ in found)
    alike = [(index, each) for rank, index, each in found if rank == strongest]
    if len(alike) > 1:
        return _no_engine(
            f"containers {_names(alike)} all look like an engine; set "
            "spec.engine.containerName to one of them"
        )
    unsupported = _unsupported_device(alike[0][1])
    return unsupported or _engine(alike[0])


def evidence(container: Container) -> Evidence | None:
    """What identifies the container as vLLM's server, or None. A GPU alone is no evidence, because
    other engines have one too. A command that is known to run something else refutes the rest.
    """
    command = parse_command_line(container)
    if any(program in ENGINE_PROGRAMS for program in command.programs):
        return Evidence.COMMAND
    if command.programs:
        return None
    by_image = program_of_image(container.image)
    if by_image is not None:
        return Evidence.IMAGE if by_image is Program.VLLM else None
    if not has_gpu(container):
        return None
    options = {name for name, _ in command.options}
    variables = any(
        each.name.startswith("VLLM_") and not _ADDRESS.search(each.name) for each in container.env
    )
    ports = any(_VLLM_NAME.search(port.name) for port in container.ports)
    if options & VLLM_OPTIONS or variables or ports or _VLLM_NAME.search(container.name):
        return Evidence.TRACES
    return None


def _atom_container(containers: Sequence[tuple[int, Container]]) -> EngineContainer | Skipped:
    """The only container whose command, or else image, is that of ATOM."""
    by_command = [
        (index, each)
        for index, each in containers
        if Program.ATOM in parse_command_line(each).programs
    ]
    by_image = [
        (index, each) for index, each in containers if program_of_image(each.image) is Program.ATOM
    ]
    for found in (by_command, by_image):
        if len(found) == 1:
            index, container = found[0]
            return _unsupported_device(container) or EngineContainer(index, container.name)
    return _no_engine(
        f"not exactly one of the containers {_names(containers)} is identified as ATOM's server "
        "(its command or image); set spec.engine.containerName"
    )


def _named_container(
    engine_type: EngineType, index: int, container: Container
) -> EngineContainer | Skipped:
    """The container that the policy names, unless its command is known to be another engine."""
    programs = parse_command_line(container).programs
    is_atom = engine_type is EngineType.ATOM
    accepted = frozenset({Program.ATOM}) if is_atom else NAMED_PROGRAMS
    if programs and not any(program in accepted for program in programs):
        return _other_program(container, programs[0], "ATOM" if is_atom else "vLLM")
    return _unsupported_device(container) or EngineContainer(index, container.name)


def _nothing_found(containers: Sequence[tuple[int, Container]]) -> Skipped:
    for _, each in containers:
        programs = parse_command_line(each).programs
        image = program_of_image(each.image)
        program = programs[0] if programs else image
        if program is not None and program not in (Program.VLLM, Program.IDLE):
            if program is Program.DYNAMO_VLLM:
                return _no_engine(
                    f"container {each.name} runs {program}, which chooses a KV connector itself; "
                    "if it has none, set spec.engine.containerName"
                )
            return _other_program(each, program)
    return _no_engine(
        f"nothing identifies one of the containers {_names(containers)} as vLLM's server (its "
        "command, image, arguments, or the name of a port); set spec.engine.containerName"
    )


def _other_program(container: Container, program: Program, served: str = "vLLM") -> Skipped:
    return Skipped(
        SkipReason.UNSUPPORTED_ENGINE,
        f"container {container.name} runs {program}, and tiers serve {served}'s server; exclude "
        "such pods in spec.podSelector",
    )


def _unsupported_device(container: Container) -> Skipped | None:
    """Why the engine's devices are not supported, or None."""
    amounts = _amounts(container).items()
    device = next((name for name, value in amounts if value > 0 and _OTHER_DEVICE.search(name)), "")
    if not device and _OTHER_DEVICE_IMAGE.search(container.image):
        device = f"image {container.image}"
    if not device:
        return None
    return Skipped(
        SkipReason.UNSUPPORTED_ENGINE,
        f"container {container.name} computes on another device than a GPU or CPU ({device}), "
        "which this version does not copy from",
    )


def _no_engine(message: str) -> Skipped:
    return Skipped(SkipReason.NO_ENGINE_CONTAINER, message)


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
