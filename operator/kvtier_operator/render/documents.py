"""All Kubernetes documents of a policy for clusters without the operator (``attach.mode: ConfigMapOnly``). Pure."""

from __future__ import annotations

from typing import Any

from kvtier.errors import ConfigurationError
from kvtier.topology.loading import LIVE_FILE, STRUCTURAL_FILE
from kvtier.topology.models import Structural
from kvtier.topology.writing import document_text
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.render import volumes
from kvtier_operator.render.topology import live, pod_placement, structural

POD_TOPOLOGY_DIRECTORY = "/etc/kvtier/topology"
"""In pods: where both documents are mounted."""
STRUCTURAL_ANNOTATION = "kvtier.io/structural"
MAX_STRUCTURAL_BYTES = 16 << 10
"""What an annotation may take of a pod; the same limit holds for the ConfigMap, so that a policy can change its
mode."""


def live_name(policy: KVTierPolicy) -> str:
    """The ConfigMap of live values."""
    return f"{policy.metadata.name}-live"


def structural_name(policy: KVTierPolicy) -> str:
    """The ConfigMap of the structural document."""
    return f"{policy.metadata.name}-structural"


def kubernetes(policy: KVTierPolicy, generation: int = 0) -> list[dict[str, Any]]:
    """ConfigMaps, PersistentVolumes and claims, in the order in which they can be applied. Raises
    ``ConfigurationError``.
    """
    document = structural(policy, pod_placement(policy), generation)
    return [
        *volumes.objects(policy),
        _config_map(policy, live_name(policy), LIVE_FILE, document_text(live(policy, generation))),
        _config_map(policy, structural_name(policy), STRUCTURAL_FILE, structural_text(document)),
    ]


def structural_text(document: Structural) -> str:
    """The structural document as it is handed to pods. Raises ``ConfigurationError`` where it is too long."""
    text = document_text(document)
    size = len(text.encode())
    if size > MAX_STRUCTURAL_BYTES:
        raise ConfigurationError(
            "spec",
            f"{size} bytes as structural document",
            f"at most {MAX_STRUCTURAL_BYTES}; shorten URLs, paths and mount options",
        )
    return text


def _config_map(policy: KVTierPolicy, name: str, file: str, text: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": policy.namespace, "labels": volumes.labels(policy)},
        "data": {file: text},
    }
