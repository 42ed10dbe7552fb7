"""Engines that are left alone for what their own configuration says. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from kvtier_operator.injection.command_line import Said, number
from kvtier_operator.injection.decision import PodObject
from kvtier_operator.injection.engine_container import gpu_count, world_size
from kvtier_operator.render.connectors.base import TRANSFER_CONFIG_VARIABLE

TOPOLOGY_VARIABLE = "KVTIER_TOPOLOGY"
GROUP_LABEL = "leaderworkerset.sigs.k8s.io/group-key"
GROUP_SIZE_ANNOTATION = "leaderworkerset.sigs.k8s.io/size"
RAY_LABELS = ("ray.io/cluster", "ray.io/node-type")
_TRANSFER_VARIABLE = re.compile(r"KV_TRANSFER_CONFIG$")
_RAY_SCRIPT = re.compile(r"(^|/)(multi-node-serving|run_cluster)\.sh$|^--ray_cluster_size")
_RAY_PROGRAM = re.compile(r"(^|/)ray$")
Container = Mapping[str, Any]


def own_transfer_config(container: Container, said: Said) -> str | None:
    """Where a KV connector, or vLLM's own offloading, is configured already; None: nowhere that can be seen.

    What cannot be seen (a configuration file in the image, a ConfigMap) is left alone by the plugin, in the engine.
    """
    for name, value in said.options:
        if name == "kv-transfer-config" or name.startswith("kv-transfer-config."):
            return f"--{name} is in its command or variables"
        if name == "kv-offloading-size" and value not in ("", "0"):
            return (
                f"--{name} is in its command or variables, which configures vLLM's own offloading"
            )
    for entry in container.get("env") or ():
        name = str(entry.get("name"))
        if name in (TOPOLOGY_VARIABLE, TRANSFER_CONFIG_VARIABLE):
            return f"the variable {name} is set in the pod"
        if _TRANSFER_VARIABLE.search(name) or '"kv_connector"' in str(entry.get("value") or ""):
            return f"the variable {name} configures a KV connector"
    return None


def several_hosts(pod: PodObject, container: Container, said: Said) -> str | None:
    """Why the engine's ranks are on more hosts than this pod's, or None.

    A chunk exists once every rank has delivered to one tierd, and a tierd is a pod's own.
    """
    ray = _ray(pod, said)
    nodes = number(said.option("nnodes")) or 1
    world, gpus = world_size(said), gpu_count(container)
    if nodes > 1:
        return f"--nnodes is {nodes}"
    if gpus and world is not None and world > gpus:
        return f"its parallel sizes make {world} ranks and the container has {gpus} GPUs"
    if ray and _grouped(pod):
        return f"{ray}, in a group of several pods"
    return None


def python_ignores_path(said: Said) -> bool:
    """Whether Python is told not to look at PYTHONPATH (``-I``, ``-E``)."""
    return any(
        re.search(r"(^|/)python[\d.]*$", word)
        and re.fullmatch(r"-[a-zA-Z]+", following)
        and {"I", "E"} & set(following)
        for word, following in itertools.pairwise(said.words)
    )


def assigns(container: Container, name: str) -> bool:
    """Whether a shell in the command sets the variable itself and drops what it was."""
    raw = " ".join(
        str(text) for text in [*(container.get("command") or ()), *(container.get("args") or ())]
    )
    return any(
        name not in value
        for value in re.findall(rf"(?:^|[\s;&|(]){name}=(\"[^\"]*\"|'[^']*'|\S*)", raw)
        if value
    )


def _ray(pod: PodObject, said: Said) -> str | None:
    if any(label in ((pod.get("metadata") or {}).get("labels") or {}) for label in RAY_LABELS):
        return "it is part of a Ray cluster"
    if any(
        _RAY_PROGRAM.search(word) and following == "start"
        for word, following in itertools.pairwise(said.words)
    ):
        return "its command starts Ray"
    if any(_RAY_SCRIPT.search(word) for word in said.words):
        return "its command makes a Ray cluster"
    if said.option("distributed-executor-backend") == "ray":
        return "Ray executes it"
    return None


def _grouped(pod: PodObject) -> bool:
    metadata = pod.get("metadata") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    if any(label in labels for label in RAY_LABELS):
        return True
    if GROUP_LABEL not in labels:
        return False
    size = number(str(annotations.get(GROUP_SIZE_ANNOTATION) or ""))
    return size is None or size > 1
