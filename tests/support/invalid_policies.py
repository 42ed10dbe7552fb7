"""Changes of the complete policy that make it invalid.

The same table is run against the models and against a real API server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.policies import REMOVED


@dataclass(frozen=True, slots=True)
class InvalidCase:
    """An invalid policy and its errors.

    ``field``, ``value`` and ``detail`` are parts of the message for a file; ``server``: of the API
    server's answer.
    """

    name: str
    changes: dict[str, Any]
    field: str
    value: str
    detail: str
    server: tuple[str, ...] = ()


_NVME = "spec.tiers.1.fileSystem"
_NVME_FIELD = "spec.tiers[1].fileSystem"
_CAPACITY = "a quantity above zero"
_PATH = "an absolute path without .."
_SOURCES = "exactly one of emptyDir, ephemeral, persistentVolumeClaim, claimTemplate, hostPath, nfs"
_CLAIM = {"spec": {"resources": {"requests": {"storage": "1Ti"}}}}
_FILES = {"capacity": "1Gi", "sharing": "Pod", "volume": {"emptyDir": {}}}
_VOLUMES = f"{_NVME}.volumes"
_VOLUMES_FIELD = f"{_NVME_FIELD}.volumes"


def _disks(**second: Any) -> dict[str, Any]:
    """A tier of two disks; ``second`` replaces fields of the second."""
    first = {"name": "nvme0", "capacity": "1Gi", "hostPath": {"path": "/mnt/nvme0/kv"}}
    other = {"name": "nvme1", "capacity": "1Gi", "hostPath": {"path": "/mnt/nvme1/kv"}}
    changed = {key: value for key, value in {**other, **second}.items() if value is not None}
    return {"sharing": "Node", "volumes": [first, changed]}


def _case(
    name: str, changes: dict[str, Any], message: tuple[str, str, str], *server: str
) -> InvalidCase:
    return InvalidCase(name, changes, *message, server=server)


INVALID: tuple[InvalidCase, ...] = (
    _case(
        "the first tier is no memory tier",
        {"spec.tiers.0": {"name": "disk", "fileSystem": _FILES}},
        ("spec.tiers[0]", "disk", "must be a memory tier"),
        "spec.tiers",
        "the first tier must be a memory tier, got disk",
    ),
    _case(
        "two memory tiers",
        {"spec.tiers.4": {"name": "more", "memory": {"capacity": "1Gi"}}},
        ("spec.tiers[4]", "more", "must not be a second memory tier (the first is ram)"),
        "spec.tiers",
        "must have one memory tier, got more as well",
    ),
    _case(
        "a tier without a kind",
        {"spec.tiers.1.fileSystem": REMOVED},
        ("spec.tiers[1]", "", "must have exactly one of memory, fileSystem, lmcache"),
        "spec.tiers[1]",
        "tier nvme must have exactly one of memory, fileSystem, lmcache, got none",
    ),
    _case(
        "a tier with two kinds",
        {"spec.tiers.0.lmcache": {"url": "redis://host:1"}},
        ("spec.tiers[0]", "memory, lmcache", "exactly one of memory, fileSystem, lmcache"),
        "spec.tiers[0]",
        "tier ram must have exactly one of memory, fileSystem, lmcache, got memory lmcache",
    ),
    _case(
        "a volume without a source",
        {f"{_NVME}.volume": {}},
        (f"{_NVME_FIELD}.volume", "", _SOURCES),
        f"{_NVME_FIELD}.volume",
        "must have " + _SOURCES + ", got none",
    ),
    _case(
        "a volume with two sources",
        {f"{_NVME}.volume.emptyDir": {}},
        (f"{_NVME_FIELD}.volume", "emptyDir, hostPath", _SOURCES),
        f"{_NVME_FIELD}.volume",
        "must have " + _SOURCES + ", got emptyDir hostPath",
    ),
    _case(
        "low and high watermark equal",
        {f"{_NVME}.lowWatermarkPercent": 90},
        (
            f"{_NVME_FIELD}.lowWatermarkPercent",
            "90",
            "must be below highWatermarkPercent (90)",
        ),
        f"{_NVME_FIELD}.lowWatermarkPercent",
        "must be below highWatermarkPercent (90), got 90",
    ),
    _case(
        "the low watermark above the default high one",
        {f"{_NVME}.lowWatermarkPercent": 95, f"{_NVME}.highWatermarkPercent": REMOVED},
        (
            f"{_NVME_FIELD}.lowWatermarkPercent",
            "95",
            "must be below highWatermarkPercent (90)",
        ),
        "must be below highWatermarkPercent (90), got 95",
    ),
    _case(
        "volume and volumes",
        {_VOLUMES: _disks()["volumes"]},
        (_NVME_FIELD, "volume, volumes", "must have exactly one of volume, volumes"),
        _NVME_FIELD,
        "must have exactly one of volume, volumes",
    ),
    _case(
        "a capacity beside volumes",
        {_NVME: {**_disks(), "capacity": "2Gi"}},
        (f"{_NVME_FIELD}.capacity", "", "must not be set with volumes"),
        f"{_NVME_FIELD}.capacity",
        "must not be set with volumes",
    ),
    _case(
        "volumes of a cluster",
        {_NVME: {**_disks(), "sharing": "Cluster"}},
        (f"{_NVME_FIELD}.sharing", "Cluster", "must be Pod or Node with volumes"),
        f"{_NVME_FIELD}.sharing",
        "must be Pod or Node with volumes",
    ),
    _case(
        "two volumes of one name",
        {_NVME: _disks(name="nvme0")},
        (f"{_VOLUMES_FIELD}[1].name", "nvme0", ""),
        f'{_VOLUMES_FIELD}[1]: Duplicate value: {{"name":"nvme0"}}',
    ),
    _case(
        "two volumes in one directory",
        {_NVME: _disks(hostPath={"path": "/mnt/nvme0/kv"})},
        (f"{_VOLUMES_FIELD}[1].hostPath.path", "/mnt/nvme0/kv", "must differ from that of volume"),
        _VOLUMES_FIELD,
        "must be different directories and claims",
    ),
    _case(
        "one of several volumes without a source",
        {_NVME: _disks(hostPath=None)},
        (f"{_VOLUMES_FIELD}[1]", "", "must have exactly one of emptyDir, ephemeral"),
        f"{_VOLUMES_FIELD}[1]",
        "must have exactly one of emptyDir, ephemeral, persistentVolumeClaim, hostPath, got none",
    ),
    _case(
        "one of several volumes with two sources",
        {_NVME: _disks(emptyDir={})},
        (f"{_VOLUMES_FIELD}[1]", "emptyDir, hostPath", "must have exactly one of emptyDir"),
        f"{_VOLUMES_FIELD}[1]",
        "got emptyDir hostPath",
    ),
    _case(
        "one of several volumes without a capacity",
        {_NVME: _disks(capacity=None)},
        (f"{_VOLUMES_FIELD}[1].capacity", "", ""),
        f"{_VOLUMES_FIELD}[1].capacity: Required value",
    ),
    _case(
        "a size limit below the capacity of one of several volumes",
        {_NVME: {**_disks(hostPath=None, emptyDir={"sizeLimit": "1Mi"}), "sharing": "Pod"}},
        (f"{_VOLUMES_FIELD}[1].emptyDir.sizeLimit", "1Mi", "must be at least the capacity (1Gi)"),
        f"{_VOLUMES_FIELD}[1].emptyDir.sizeLimit",
        "must be at least the capacity",
    ),
    _case(
        "minFree of the whole file system",
        {f"{_NVME}.minFree": "100%"},
        (f"{_NVME_FIELD}.minFree", "100%", "a percentage from 0% to 99%, or a quantity"),
        f"{_NVME_FIELD}.minFree",
        "a percentage from 0% to 99%, or a quantity of zero or more, such as 10% or 50Gi, got 100%",
    ),
    _case(
        "minFree below zero",
        {f"{_NVME}.minFree": "-1Gi"},
        (f"{_NVME_FIELD}.minFree", "-1Gi", "a quantity of zero or more"),
        f"{_NVME_FIELD}.minFree",
        "got -1Gi",
    ),
    _case(
        "a high watermark above 100",
        {f"{_NVME}.highWatermarkPercent": 101},
        (f"{_NVME_FIELD}.highWatermarkPercent", "101", "an integer from 2 to 100"),
        f"{_NVME_FIELD}.highWatermarkPercent: Invalid value: 101",
        "less than or equal to 100",
    ),
    _case(
        "chunkTokens that is no multiple of 16",
        {"spec.chunkTokens": 250},
        ("spec.chunkTokens", "250", "a multiple of 16 from 16 to 65536"),
        "spec.chunkTokens: Invalid value: 250",
        "multiple of 16",
    ),
    _case(
        "chunkTokens of zero",
        {"spec.chunkTokens": 0},
        ("spec.chunkTokens", "0", "a multiple of 16 from 16 to 65536"),
        "spec.chunkTokens: Invalid value: 0",
        "greater than or equal to 16",
    ),
    _case(
        "negative chunkTokens",
        {"spec.chunkTokens": -256},
        ("spec.chunkTokens", "-256", "a multiple of 16 from 16 to 65536"),
        "spec.chunkTokens: Invalid value: -256",
    ),
    _case(
        "a tier name that is there twice",
        {"spec.tiers.2.name": "nvme"},
        ("spec.tiers[2].name", "nvme", ""),
        'spec.tiers[2]: Duplicate value: {"name":"nvme"}',
    ),
    _case(
        "a tier name with upper case",
        {"spec.tiers.1.name": "NVMe"},
        ("spec.tiers[1].name", "NVMe", "an RFC 1123 label"),
        'spec.tiers[1].name: Invalid value: "NVMe"',
    ),
    _case(
        "a tier name that ends in a dash",
        {"spec.tiers.1.name": "nvme-"},
        ("spec.tiers[1].name", "nvme-", "an RFC 1123 label"),
        'spec.tiers[1].name: Invalid value: "nvme-"',
    ),
    _case(
        "a tier name of 64 characters",
        {"spec.tiers.1.name": "n" * 64},
        ("spec.tiers[1].name", "n" * 64, "at most 63"),
        "spec.tiers[1].name: Too long",
        "63",
    ),
    _case(
        "an empty tier name",
        {"spec.tiers.1.name": ""},
        ("spec.tiers[1].name", '""', "an RFC 1123 label"),
        "spec.tiers[1].name: Invalid value",
    ),
    _case(
        "a memory capacity of zero",
        {"spec.tiers.0.memory.capacity": 0},
        ("spec.tiers[0].memory.capacity", "0", _CAPACITY),
        "spec.tiers[0].memory.capacity",
        "must be " + _CAPACITY,
        "got 0",
    ),
    _case(
        "a negative file capacity",
        {f"{_NVME}.capacity": "-1Gi"},
        (f"{_NVME_FIELD}.capacity", "-1Gi", _CAPACITY),
        f"{_NVME_FIELD}.capacity",
        "must be " + _CAPACITY,
        "got -1Gi",
    ),
    _case(
        "an lmcache capacity of zero",
        {"spec.tiers.3.lmcache.capacity": "0Gi"},
        ("spec.tiers[3].lmcache.capacity", "0Gi", _CAPACITY),
        "spec.tiers[3].lmcache.capacity",
        "must be " + _CAPACITY,
        "got 0Gi",
    ),
    _case(
        "a store that tierd cannot use",
        {"spec.tiers.3.lmcache.url": "s3://bucket.s3.region"},
        (
            "spec.tiers[3].lmcache.url",
            "s3://bucket.s3.region",
            "must start with redis:// or rediss:// or lm://",
        ),
        "spec.tiers",
        "lmcache.url must be a redis://, rediss:// or lm:// URL",
    ),
    _case(
        "a store's password in the policy",
        {"spec.tiers.3.lmcache.url": "redis://user:password@cache:6379"},
        (
            "spec.tiers[3].lmcache.url",
            "redis://***",
            "must not contain a user or a password",
        ),
        "spec.tiers",
        "without a password",
    ),
    _case(
        "credentials for a store without users",
        {"spec.tiers.3.lmcache.url": "lm://cache.serving:65432"},
        (
            "spec.tiers[3].lmcache.credentialsSecretRef",
            "cache-auth",
            "only redis:// and rediss:// have credentials",
        ),
        "spec.tiers",
        "only redis:// and rediss:// have credentials",
    ),
    _case(
        "a capacity that is no quantity",
        {"spec.tiers.0.memory.capacity": "64GB"},
        ("spec.tiers[0].memory.capacity", "64GB", _CAPACITY),
        "spec.tiers[0].memory.capacity: Invalid value",
        "64GB",
    ),
    _case(
        "a capacity with a fraction as a number",
        {"spec.tiers.0.memory.capacity": 1.5},
        ("spec.tiers[0].memory.capacity", "1.5", _CAPACITY),
        "spec.tiers[0].memory.capacity: Invalid value",
    ),
    _case(
        "no capacity",
        {f"{_NVME}.capacity": REMOVED},
        (f"{_NVME_FIELD}.capacity", "", "must be set with volume"),
        f"{_NVME_FIELD}.capacity",
        "must be set with volume",
    ),
    _case(
        "claimTemplate with ReadWriteOnce for the whole cluster",
        {
            f"{_NVME}.sharing": "Cluster",
            f"{_NVME}.volume": {"claimTemplate": {"accessModes": ["ReadWriteOnce"]}},
        },
        (
            f"{_NVME_FIELD}.volume.claimTemplate.accessModes[0]",
            "ReadWriteOnce",
            "must be ReadWriteMany with sharing: Cluster",
        ),
        f"{_NVME_FIELD}.volume.claimTemplate.accessModes",
        "must be ReadWriteMany with sharing: Cluster, got ReadWriteOnce",
    ),
    _case(
        "claimTemplate with ReadWriteOncePod among others for the whole cluster",
        {
            f"{_NVME}.sharing": "Cluster",
            f"{_NVME}.volume": {
                "claimTemplate": {"accessModes": ["ReadWriteMany", "ReadWriteOncePod"]}
            },
        },
        (f"{_NVME_FIELD}.volume.claimTemplate.accessModes[1]", "ReadWriteOncePod", "ReadWriteMany"),
        "ReadWriteOncePod",
        "must be ReadWriteMany with sharing: Cluster",
    ),
    _case(
        "emptyDir for the whole cluster",
        {f"{_NVME}.sharing": "Cluster", f"{_NVME}.volume": {"emptyDir": {}}},
        (
            f"{_NVME_FIELD}.volume.emptyDir",
            "",
            "must not be set with sharing: Cluster",
        ),
        f"{_NVME_FIELD}.volume",
        "emptyDir must not be set with sharing: Cluster; use a volume that all nodes can mount",
    ),
    _case(
        "ephemeral for the whole cluster",
        {
            f"{_NVME}.sharing": "Cluster",
            f"{_NVME}.volume": {"ephemeral": {"volumeClaimTemplate": _CLAIM}},
        },
        (
            f"{_NVME_FIELD}.volume.ephemeral",
            "",
            "must not be set with sharing: Cluster",
        ),
        f"{_NVME_FIELD}.volume",
        "ephemeral must not be set with sharing: Cluster; use a volume that all nodes can mount",
    ),
    _case(
        "hostPath that the kubelet would make",
        {f"{_NVME}.volume.hostPath.type": "DirectoryOrCreate"},
        (
            f"{_NVME_FIELD}.volume.hostPath.type",
            "DirectoryOrCreate",
            "must be Directory, because",
        ),
        f"{_NVME_FIELD}.volume.hostPath.type",
        "got DirectoryOrCreate",
    ),
    _case(
        "hostPath with ..",
        {f"{_NVME}.volume.hostPath.path": "/mnt/nvme/../../etc"},
        (f"{_NVME_FIELD}.volume.hostPath.path", "/mnt/nvme/../../etc", _PATH),
        f"{_NVME_FIELD}.volume.hostPath.path",
        "must be " + _PATH,
        "got /mnt/nvme/../../etc",
    ),
    _case(
        "hostPath that ends in ..",
        {f"{_NVME}.volume.hostPath.path": "/mnt/.."},
        (f"{_NVME_FIELD}.volume.hostPath.path", "/mnt/..", _PATH),
        "must be " + _PATH,
        "got /mnt/..",
    ),
    _case(
        "hostPath that is relative",
        {f"{_NVME}.volume.hostPath.path": "mnt/kv"},
        (f"{_NVME_FIELD}.volume.hostPath.path", "mnt/kv", _PATH),
        "must be " + _PATH,
        "got mnt/kv",
    ),
    _case(
        "an export with ..",
        {"spec.tiers.2.fileSystem.volume.nfs.path": "/kv/../secret"},
        ("spec.tiers[2].fileSystem.volume.nfs.path", "/kv/../secret", _PATH),
        "spec.tiers[2].fileSystem.volume.nfs.path",
        "must be " + _PATH,
        "got /kv/../secret",
    ),
    _case(
        "emptyDir smaller than the tier",
        {f"{_NVME}.sharing": "Pod", f"{_NVME}.volume": {"emptyDir": {"sizeLimit": "100Gi"}}},
        (f"{_NVME_FIELD}.volume.emptyDir.sizeLimit", "100Gi", "at least the capacity (500Gi)"),
        "must be at least the capacity (500Gi)",
    ),
    _case(
        "no podSelector",
        {"spec.podSelector": REMOVED},
        ("spec.podSelector", "", "a mapping with matchLabels, matchExpressions"),
        "spec.podSelector: Required value",
    ),
    _case(
        "a label value that is none",
        {"spec.podSelector.matchLabels": {"app": "vllm chat"}},
        ("spec.podSelector.matchLabels.app", "vllm chat", "a label value"),
        'spec.podSelector.matchLabels.app: Invalid value: "vllm chat"',
    ),
    _case(
        "a label key that is none",
        {"spec.podSelector.matchLabels": {"-app": "vllm"}},
        ("spec.podSelector.matchLabels.-app", "-app", "a label key"),
        "each key must be a label key",
    ),
    _case(
        "In without values",
        {"spec.podSelector.matchExpressions.0.values": REMOVED},
        (
            "spec.podSelector.matchExpressions[0].values",
            "",
            "must be set with operator In",
        ),
        "spec.podSelector.matchExpressions[0].operator",
        "values must be set with operator In",
    ),
    _case(
        "Exists with values",
        {"spec.podSelector.matchExpressions.0.operator": "Exists"},
        ("spec.podSelector.matchExpressions[0].values", "", "must not be set with operator Exists"),
        "values must not be set with operator Exists",
    ),
    _case(
        "no tiers",
        {"spec.tiers": []},
        ("spec.tiers", "[]", "a list of objects with 1 to 8 items"),
        "spec.tiers: Invalid value",
        "at least 1 items",
    ),
    _case(
        "nine tiers",
        {
            "spec.tiers": [{"name": "ram", "memory": {"capacity": "1Gi"}}]
            + [{"name": f"disk-{index}", "fileSystem": _FILES} for index in range(8)]
        },
        ("spec.tiers", "", "a list of objects with 1 to 8 items"),
        "spec.tiers: Too many: 9",
        "at most 8 items",
    ),
    _case(
        "no sharing",
        {f"{_NVME}.sharing": REMOVED},
        (f"{_NVME_FIELD}.sharing", "", "one of Pod, Node, Cluster"),
        f"{_NVME_FIELD}.sharing: Required value",
    ),
    _case(
        "no volume",
        {f"{_NVME}.volume": REMOVED},
        (_NVME_FIELD, "", "must have exactly one of volume, volumes"),
        _NVME_FIELD,
        "must have exactly one of volume, volumes",
    ),
    _case(
        "an engine that is not known",
        {"spec.engine.type": "SGLANG"},
        ("spec.engine.type", "SGLANG", 'supported values: "VLLM", "ATOM"'),
        'spec.engine.type: Unsupported value: "SGLANG"',
        '"VLLM", "ATOM"',
    ),
    _case(
        "a hash seed that is a number",
        {"spec.engine.hashSeed": 0},
        ("spec.engine.hashSeed", "0", "a decimal number from 0 to 4294967295, in quotes"),
        "spec.engine.hashSeed",
    ),
    _case(
        "a hash seed beyond 32 bits",
        {"spec.engine.hashSeed": "4294967296"},
        ("spec.engine.hashSeed", "4294967296", "a decimal number from 0 to 4294967295, in quotes"),
        "must be a decimal number from 0 to 4294967295, in quotes, got 4294967296",
    ),
    _case(
        "a weight of zero",
        {"spec.tiers.0.loadWeight": 0},
        ("spec.tiers[0].loadWeight", "0", "an integer from 1 to 10000"),
        "spec.tiers[0].loadWeight: Invalid value: 0",
    ),
    _case(
        "a time limit as text",
        {"spec.tiers.1.loadTimeoutSeconds": "5s"},
        ("spec.tiers[1].loadTimeoutSeconds", "5s", "an integer from 1 to 600"),
        "spec.tiers[1].loadTimeoutSeconds",
    ),
    _case(
        "a time limit with a fraction",
        {"spec.tiers.1.loadTimeoutSeconds": 2.5},
        ("spec.tiers[1].loadTimeoutSeconds", "2.5", "an integer from 1 to 600"),
        "spec.tiers[1].loadTimeoutSeconds",
    ),
    _case(
        "pending bytes below zero",
        {"spec.tiers.1.maxPendingStoreBytes": "-1"},
        ("spec.tiers[1].maxPendingStoreBytes", "-1", "a quantity of zero or more"),
        "must be a quantity of zero or more",
    ),
    _case(
        "a write budget of nothing",
        {"spec.tiers.1.maxWriteBytesPerSecond": 0},
        ("spec.tiers[1].maxWriteBytesPerSecond", "0", "a quantity above zero"),
        "must be a quantity above zero",
    ),
    _case(
        "a mount option with a comma",
        {"spec.tiers.2.fileSystem.volume.nfs.mountOptions": ["soft,exec"]},
        ("spec.tiers[2].fileSystem.volume.nfs.mountOptions[0]", "soft,exec", "text of at least 1"),
        "spec.tiers[2].fileSystem.volume.nfs.mountOptions[0]: Invalid value",
    ),
    _case(
        "memory of the sidecar",
        {"spec.resources.daemon.limits": {"memory": "80Gi"}},
        (
            "spec.resources.daemon.limits",
            "memory",
            "resources other than memory, which is computed",
        ),
        "spec.resources.daemon.limits",
        "must be quantities of resources other than memory",
    ),
    _case(
        "more cpu asked for than the default limit",
        {"spec.resources.daemon": {"requests": {"cpu": "16"}}},
        ("spec.resources.daemon.requests.cpu", "16", "at most the limit (8)"),
        "spec.resources.daemon.requests",
        "cpu must be at most the limit (8), got 16",
    ),
    _case(
        "encryption without a Secret",
        {"spec.isolation": {"encryption": "AES256GCM", "keySecretRef": {"name": ""}}},
        ("spec.isolation.keySecretRef.name", "", "must be set if encryption is AES256GCM"),
        "spec.isolation.keySecretRef",
        "must be set if encryption is not None",
    ),
    _case(
        "an unknown encryption",
        {"spec.isolation.encryption": "AES128"},
        ("spec.isolation.encryption", "AES128", 'supported values: "None", "AES256GCM"'),
        "spec.isolation.encryption",
    ),
    _case(
        "a policy name of 64 characters",
        {"metadata.name": "p" * 64},
        ("metadata.name", "p" * 64, "at most 63 characters"),
        "metadata.name must have at most 63 characters",
    ),
)
