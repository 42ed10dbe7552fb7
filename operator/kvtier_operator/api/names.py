"""Names that webhook, controller, chart and pods share."""

from __future__ import annotations

from typing import Final

from kvtier.hashing import sha256_hex

PREFIX: Final = "kvtier.io/"
INJECT_LABEL: Final = PREFIX + "inject"
"""Label of a namespace, set by its administrator to ``enabled``: the webhook is called only for
such namespaces."""
ATTACHED_LABEL: Final = PREFIX + "attached"
"""Label ``true`` of an injected pod, for selectors of monitors and network policies."""
STRUCTURAL_ANNOTATION: Final = PREFIX + "structural"
"""The structural document; a pod that has it is injected."""
POLICY_ANNOTATION: Final = PREFIX + "policy"
POLICY_UID_ANNOTATION: Final = PREFIX + "policy-uid"
HASH_ANNOTATION: Final = PREFIX + "structural-hash"
VERSION_ANNOTATION: Final = PREFIX + "version"
"""The version of the injected images."""
SKIPPED_ANNOTATION: Final = PREFIX + "skipped"
"""JSON ``{"policy", "reason", "message"}`` on a pod that was skipped."""
NOTES_ANNOTATION: Final = PREFIX + "notes"
"""JSON list of sentences: what was found while attaching and a person should know (a hash seed that
differs, ...)."""
RESTART_ANNOTATION: Final = PREFIX + "restarted-for"
"""On a pod template, by RestartWorkloads: the structural hash that the restart was for."""
MIRROR_ANNOTATION: Final = "kubernetes.io/config.mirror"
"""Marks the API object of a static pod."""
SCC_ANNOTATION: Final = "openshift.io/scc"
"""The security context constraints (SCC) by which OpenShift admitted a pod, before webhooks."""
SAFE_TO_EVICT_ANNOTATION: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
PAYLOAD_CONTAINER: Final = "kvtier-payload"
TIERD_CONTAINER: Final = "kvtier-tierd"
RUN_VOLUME: Final = "kvtier-run"
TOPOLOGY_VOLUME: Final = "kvtier-topology"
PAYLOAD_VOLUME: Final = "kvtier-payload"
TOKEN_VOLUME: Final = "kvtier-token"  # noqa: S105  (a name)
KEY_VOLUME: Final = "kvtier-key"
SHARED_MEMORY_VOLUME: Final = "kvtier-shm"
"""``/dev/shm`` of an engine whose connector needs one, if the pod has none."""
NO_ACCOUNT_VOLUME: Final = "kvtier-no-account"
"""Empty volume over the service account's token, because tierd parses files that other pods
write."""
INJECTED_NAMES: Final = "kvtier-"
"""Prefix of the names of injected containers and volumes."""
PAYLOAD_DIRECTORY: Final = "/opt/kvtier/payload"
TOKEN_DIRECTORY: Final = "/etc/kvtier/token"  # noqa: S105  (a path)
TOKEN_FILE: Final = f"{TOKEN_DIRECTORY}/token"
SERVICE_ACCOUNT_DIRECTORY: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
POD_HTTP_PORT: Final = 9400
FIELD_MANAGER: Final = "kvtier"


def tier_volume(tier: str, volume: str = "") -> str:
    """The pod's volume of a file tier, or of one of its volumes; at most 63 characters."""
    # With a digest, because tier "a" with volume "b" is not tier "a-b".
    key = f"{tier}/{volume}" if volume else tier
    name = f"kvtier-tier-{tier}" + (f"-{volume}-{sha256_hex(key, 6)}" if volume else "")
    return name if len(name) <= 63 else f"kvtier-tier-{sha256_hex(key, 16)}"


def credentials_volume(tier: str) -> str:
    """The volume with the credentials of a remote tier; at most 63 characters."""
    name = f"kvtier-secret-{tier}"
    return name if len(name) <= 63 else f"kvtier-secret-{sha256_hex(tier, 16)}"


def token_secret(policy: str) -> str:
    """The Secret with the bearer token of a policy's pods, key ``token``."""
    return f"{policy}-token"
