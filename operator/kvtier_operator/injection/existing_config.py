"""Engines that are skipped because of their own configuration. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from kvtier_operator.api.pods import Container, Pod
from kvtier_operator.injection.command_line import CommandLine, parse_count
from kvtier_operator.injection.engine_container import gpu_count, world_size
from kvtier_operator.injection.programs import Program
from kvtier_operator.render.connectors.base import TRANSFER_CONFIG_VARIABLE

TOPOLOGY_VARIABLE = "KVTIER_TOPOLOGY"
GROUP_LABEL = "leaderworkerset.sigs.k8s.io/group-key"
GROUP_SIZE_ANNOTATION = "leaderworkerset.sigs.k8s.io/size"
RAY_LABELS = ("ray.io/cluster", "ray.io/node-type")
_TRANSFER_VARIABLE = re.compile(r"KV_TRANSFER_CONFIG$")
_RAY_SCRIPT = re.compile(r"(^|/)(multi-node-serving|run_cluster)\.sh$|^--ray_cluster_size")
_RAY_PROGRAM = re.compile(r"(^|/)ray$")


def own_transfer_config(container: Container, command: CommandLine) -> str | None:
    """Where the pod configures a KV connector or vLLM's own offloading, or None.

    A configuration that the pod does not show (a file in the image, a ConfigMap) is found by the
    plugin, in the engine.
    """
    for name, value in command.options:
        if name == "kv-transfer-config" or name.startswith("kv-transfer-config."):
            return f"--{name} is in its command or variables"
        if name == "kv-offloading-size" and value not in ("", "0"):
            return (
                f"--{name}, which configures vLLM's own offloading, is in its command or variables"
            )
        is_dynamo = Program.DYNAMO_VLLM in command.programs
        if is_dynamo and name == "connector" and value.lower() not in ("", "none", "null"):
            return f"--connector {value} of dynamo.vllm is in its command or variables"
    for variable in container.env:
        if variable.name in (TOPOLOGY_VARIABLE, TRANSFER_CONFIG_VARIABLE):
            return f"the pod sets the variable {variable.name}"
        if _TRANSFER_VARIABLE.search(variable.name) or '"kv_connector"' in variable.value:
            return f"the variable {variable.name} configures a KV connector"
    return None


def multi_host_reason(pod: Pod, container: Container, command: CommandLine) -> str | None:
    """Why the ranks of the engine run on several hosts, or None.

    A chunk exists once every rank has delivered its part to one tierd, and a tierd serves one pod.
    """
    nodes = parse_count(command.option("nnodes")) or 1
    world, gpus = world_size(command), gpu_count(container)
    if nodes > 1:
        return f"--nnodes is {nodes}"
    if gpus and world is not None and world > gpus:
        return f"its parallel sizes make {world} ranks and the container has {gpus} GPUs"
    ray = _ray_reason(pod, command)
    if ray is not None and _is_in_group(pod):
        return f"{ray}, in a group of several pods"
    return None


def python_ignores_path(command: CommandLine) -> bool:
    """Whether Python runs with an option that ignores PYTHONPATH (``-I``, ``-E``)."""
    return any(
        re.search(r"(^|/)python[\d.]*$", word)
        and re.fullmatch(r"-[a-zA-Z]+", following)
        and {"I", "E"} & set(following)
        for word, following in _pairs(command)
    )


def overwrites_variable(command: CommandLine, name: str) -> bool:
    """Whether a shell in the command assigns the variable without its previous value."""
    return any(
        assigned == name and value and name not in value for assigned, value in command.assignments
    )


def _pairs(command: CommandLine) -> Iterator[tuple[str, str]]:
    """Each word of a command with the next one."""
    return itertools.chain.from_iterable(map(itertools.pairwise, command.commands))


def _ray_reason(pod: Pod, command: CommandLine) -> str | None:
    if any(label in pod.metadata.labels for label in RAY_LABELS):
        return "it is part of a Ray cluster"
    if any(
        _RAY_PROGRAM.search(word) and following == "start" for word, following in _pairs(command)
    ):
        return "its command starts Ray"
    if any(_RAY_SCRIPT.search(word) for words in command.commands for word in words):
        return "its command creates a Ray cluster"
    if command.option("distributed-executor-backend") == "ray":
        return "Ray executes it"
    return None


def _is_in_group(pod: Pod) -> bool:
    labels = pod.metadata.labels
    if any(label in labels for label in RAY_LABELS):
        return True
    if GROUP_LABEL not in labels:
        return False
    size = parse_count(pod.metadata.annotations.get(GROUP_SIZE_ANNOTATION))
    return size is None or size > 1
