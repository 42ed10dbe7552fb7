"""RBAC rules of the operator's two processes, as data. The chart renders them, and the
documentation lists them.

No rule allows get, list or watch of Secrets, except of the webhook's own certificate by name. What
a patch may touch, and so what its response may show, is limited by the chart's admission policies.
Each rule has its purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvtier_operator.settings import CertificateMode, Settings

CREATE_VOLUMES: Final = "storage.createVolumes"
ROLLOUT: Final = "rollout.enabled"
SELF_MANAGED: Final = "webhook.certificates.mode=SelfManaged"
"""With mounted certificates the kubelet reads the Secret, and its owner writes the caBundle;
the operator needs no rights."""


class Scope(StrEnum):
    """Scope of a rule: every watched namespace (a ClusterRole, or a Role in each of
    ``watchNamespaces``), the cluster (for kinds without namespace), or the operator's namespace.
    """

    WATCHED = "Watched"
    CLUSTER = "Cluster"
    OWN = "Own"


@dataclass(frozen=True, slots=True)
class Permission:
    """One RBAC rule.

    ``only_with``: the setting that requires it (``settings_on``); empty: always.
    """

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    purpose: str
    scope: Scope = Scope.WATCHED
    names: tuple[str, ...] = ()
    only_with: str = ""

    def rule(self) -> dict[str, Any]:
        """The rule of a Role."""
        return {
            "apiGroups": [self.group],
            "resources": list(self.resources),
            **({"resourceNames": list(self.names)} if self.names else {}),
            "verbs": list(self.verbs),
        }


READ = ("get", "list", "watch")
CONTROLLER: tuple[Permission, ...] = (
    Permission("kvtier.io", ("kvtierpolicies",), READ, "reads policies"),
    Permission(
        "kvtier.io", ("kvtierpolicies/status",), ("patch",), "writes the status of policies"
    ),
    Permission(
        "",
        ("configmaps",),
        ("get", "list", "watch", "create", "patch", "delete"),
        "writes the live values, and the structure for ConfigMapOnly; deletes orphaned ones",
    ),
    Permission(
        "",
        ("secrets",),
        ("create", "patch", "delete"),
        "creates and replaces the bearer token of a policy's pods; reads it by a dry run of a "
        "patch, which the admission policy kvtier-controller limits to Secrets of KVTier",
    ),
    Permission(
        "",
        ("persistentvolumeclaims",),
        ("get", "list", "watch", "create", "patch", "delete"),
        "manages the claims of claimTemplate and NFS tiers; deletes orphaned ones",
    ),
    Permission(
        "",
        ("pods",),
        (*READ, "delete"),
        "finds injected and missed pods; deletes a pod that injection prevents from starting",
    ),
    Permission(
        "",
        ("events",),
        (*READ, "create", "patch"),
        "reads FailedCreate Events of rejected pods; writes Events",
    ),
    Permission(
        "apps",
        ("replicasets", "statefulsets"),
        READ,
        "finds the pod template of a rejected pod, and the Deployment of a pod",
    ),
    Permission(
        "apps",
        ("deployments",),
        (*READ, "patch"),
        "reads availability; restarts workloads for RestartWorkloads",
        only_with=ROLLOUT,
    ),
    Permission(
        "apps",
        ("statefulsets",),
        ("patch",),
        "restarts workloads for RestartWorkloads",
        only_with=ROLLOUT,
    ),
    Permission(
        "leaderworkerset.x-k8s.io",
        ("leaderworkersets",),
        (*READ, "patch"),
        "reads availability; restarts workloads for RestartWorkloads",
        only_with=ROLLOUT,
    ),
    Permission(
        "",
        ("namespaces",),
        ("get",),
        "finds why the webhook did not see a pod",
        scope=Scope.CLUSTER,
    ),
    Permission(
        "",
        ("nodes",),
        ("list",),
        "finds whether a pending pod would fit a node without tiers",
        scope=Scope.CLUSTER,
    ),
    Permission(
        "storage.k8s.io",
        ("storageclasses",),
        ("get",),
        "finds whether a pending claim waits for its first pod",
        scope=Scope.CLUSTER,
    ),
    Permission(
        "",
        ("persistentvolumes",),
        ("get", "list", "watch", "create", "patch", "delete"),
        "manages the volumes of NFS tiers; deletes orphaned ones",
        scope=Scope.CLUSTER,
        only_with=CREATE_VOLUMES,
    ),
    Permission(
        "coordination.k8s.io",
        ("leases",),
        ("create",),
        "leader election: creates the Lease",
        scope=Scope.OWN,
    ),
    Permission(
        "coordination.k8s.io",
        ("leases",),
        ("get", "update"),
        "leader election: holds, renews and releases the Lease",
        scope=Scope.OWN,
        names=("kvtier-controller",),
    ),
    Permission(
        "",
        ("secrets",),
        ("create",),
        "creates the Secret of self-managed certificates",
        scope=Scope.OWN,
        only_with=SELF_MANAGED,
    ),
    Permission(
        "",
        ("secrets",),
        ("get", "patch"),
        "reads and renews the webhook's certificates",
        scope=Scope.OWN,
        names=("kvtier-webhook-certificates",),
        only_with=SELF_MANAGED,
    ),
    Permission(
        "admissionregistration.k8s.io",
        ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"),
        ("get", "patch"),
        "writes the CA of the webhook's certificate",
        scope=Scope.CLUSTER,
        names=("kvtier",),
        only_with=SELF_MANAGED,
    ),
)
"""Rules of ``kvtier-operator controller``."""
WEBHOOK: tuple[Permission, ...] = (
    Permission("kvtier.io", ("kvtierpolicies",), READ, "finds the policy that governs a pod"),
    Permission("", ("pods",), READ, "finds the other pods of a LeaderWorkerSet group"),
    Permission(
        "", ("limitranges", "resourcequotas"), READ, "finds pods that would be rejected with tiers"
    ),
    Permission(
        "",
        ("namespaces",),
        READ,
        "reads labels and the Pod Security level",
        scope=Scope.CLUSTER,
    ),
    Permission(
        "",
        ("nodes",),
        READ,
        "reads kubelet versions: native sidecars need 1.29",
        scope=Scope.CLUSTER,
    ),
    Permission(
        "",
        ("secrets",),
        READ,
        "reads its serving certificate",
        scope=Scope.OWN,
        names=("kvtier-webhook-certificates",),
        only_with=SELF_MANAGED,
    ),
)
"""Rules of ``kvtier-operator webhook``, which writes nothing."""


def settings_on(settings: Settings) -> frozenset[str]:
    """The settings for ``only_with`` that are on."""
    on = set()
    if settings.storage.create_volumes:
        on.add(CREATE_VOLUMES)
    if settings.rollout.enabled:
        on.add(ROLLOUT)
    if settings.webhook.certificates.mode is CertificateMode.SELF_MANAGED:
        on.add(SELF_MANAGED)
    return frozenset(on)


def rules(
    permissions: Sequence[Permission], scope: Scope, on: frozenset[str]
) -> list[dict[str, Any]]:
    """The rules of a Role for one scope. ``on``: from ``settings_on``."""
    return [
        each.rule()
        for each in permissions
        if each.scope is scope and (not each.only_with or each.only_with in on)
    ]
