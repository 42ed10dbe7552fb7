"""A policy with every field of the API, and changes of it."""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any


class Removal(Enum):
    """Reads the same in every process, which names of tests have to."""

    REMOVED = "removed"


REMOVED = Removal.REMOVED
"""As a new value: the field is taken out."""


def complete_policy() -> dict[str, Any]:
    """A policy that says everything it can, with all tier kinds; a fresh copy."""
    return copy.deepcopy(_COMPLETE)


def changed(policy: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with values replaced: ``{"spec.tiers.0.name": "x"}``. An index one past the end
    appends; ``REMOVED`` removes.
    """
    result = copy.deepcopy(policy)
    for path, value in changes.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        place: Any = result
        for part in parents:
            if isinstance(part, str) and part not in place:
                place[part] = {}
            place = place[part]
        if value is REMOVED:
            del place[last]
        elif isinstance(place, list) and last == len(place):
            place.append(copy.deepcopy(value))
        else:
            place[last] = copy.deepcopy(value)
    return result


_COMPLETE: dict[str, Any] = {
    "apiVersion": "kvtier.io/v1alpha1",
    "kind": "KVTierPolicy",
    "metadata": {"name": "chat-70b", "namespace": "default"},
    "spec": {
        "podSelector": {
            "matchLabels": {"app": "vllm-chat"},
            "matchExpressions": [{"key": "tier", "operator": "In", "values": ["gold", "silver"]}],
        },
        "engine": {
            "type": "VLLM",
            "containerName": "vllm",
            "connector": "KVTier",
            "delivery": "InitContainer",
            "pythonPath": "",
            "daemon": "Sidecar",
            "localRanks": 8,
            "hashSeed": "0",
        },
        "chunkTokens": 256,
        "minLoadTokens": 512,
        "selection": "Cost",
        "tiers": [
            {
                "name": "ram",
                "loadWeight": 100,
                "memory": {"capacity": "64Gi", "evictionPolicy": "LRU", "persistence": "Pod"},
            },
            {
                "name": "nvme",
                "loadWeight": 100,
                "lookupTimeoutMilliseconds": 50,
                "loadTimeoutSeconds": 5,
                "storePolicy": "Reused",
                "maxPendingStoreBytes": "4Gi",
                "maxWriteBytesPerSecond": "200M",
                "fileSystem": {
                    "capacity": "500Gi",
                    "minFree": "10%",
                    "highWatermarkPercent": 90,
                    "lowWatermarkPercent": 75,
                    "retentionSeconds": 604800,
                    "sharing": "Node",
                    "directIO": "Auto",
                    "sync": "None",
                    "readThreads": 8,
                    "writeThreads": 4,
                    "volume": {"hostPath": {"path": "/mnt/nvme/kv"}},
                },
            },
            {
                "name": "shared",
                "loadWeight": 50,
                "lookupTimeoutMilliseconds": 200,
                "loadTimeoutSeconds": 10,
                "fileSystem": {
                    "capacity": "10Ti",
                    "sharing": "Cluster",
                    "volume": {
                        "nfs": {
                            "server": "nas.example",
                            "path": "/kv",
                            "mountOptions": ["nconnect=8", "noatime"],
                        }
                    },
                },
            },
            {
                "name": "remote",
                "lmcache": {
                    "url": "redis://cache.serving:6379",
                    "capacity": "1Ti",
                    "credentialsSecretRef": {"name": "cache-auth"},
                },
            },
        ],
        "breaker": {"failureThreshold": 5, "periodSeconds": 60},
        "isolation": {
            "salt": "",
            "modelRevision": "",
            "keySecretRef": {"name": ""},
            "encryption": "None",
        },
        "security": {"storageGid": 3000},
        "resources": {
            "daemon": {"requests": {"cpu": "1"}, "limits": {"cpu": "8"}},
            "memoryPolicy": "Validate",
        },
        "attach": {"mode": "Webhook", "startTimeoutSeconds": 120, "retrySeconds": 600},
        "rollout": {"strategy": "OnPodRestart"},
        "monitoring": {"podMonitor": "Auto"},
    },
}
