"""The rights that the operator's two processes need, as data: the chart renders them, a test compares, the docs list
them.

Secrets are the reason for care: nothing here may list or watch them, but for the webhook the one Secret of its own certificate, so that a
stolen token of the operator reads only Secrets whose names the thief knows. A rule names its purpose, because a right that nobody can explain should go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvtier_operator.settings import CertificateMode, Settings

CREATE_VOLUMES: Final = "storage.createVolumes"
SELF_MANAGED: Final = "webhook.certificates.mode=SelfManaged"
"""Where certificates are mounted, the kubelet reads their Secret and whoever keeps it writes the caBundle: neither process does."""


class Scope(StrEnum):
    """Where a rule has to hold: in every namespace that is watched (ClusterRole, or a Role in each of
    ``watchNamespaces``), in the whole cluster because the kind has no namespace, or in the operator's namespace."""

    WATCHED = "Watched"
    CLUSTER = "Cluster"
    OWN = "Own"


@dataclass(frozen=True, slots=True)
class Permission:
    """One RBAC rule. ``only_with``: the setting without which it is not given (``settings_on``); empty: always."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    purpose: str
    scope: Scope = Scope.WATCHED
    names: tuple[str, ...] = ()
    only_with: str = ""

    def rule(self) -> dict[str, Any]:
        """As it stands in a Role."""
        return {
            "apiGroups": [self.group],
            "resources": list(self.resources),
            **({"resourceNames": list(self.names)} if self.names else {}),
            "verbs": list(self.verbs),
        }


READ = ("get", "list", "watch")
CONTROLLER: tuple[Permission, ...] = (
    Permission("kvtier.io", ("kvtierpolicies",), READ, "follows policies"),
    Permission("kvtier.io", ("kvtierpolicies/status",), ("patch",), "reports about policies"),
    Permission(
        "",
        ("configmaps",),
        ("get", "list", "watch", "create", "patch", "delete"),
        "live values, and for ConfigMapOnly the structure; removes its own of policies that changed or died",
    ),
    Permission(
        "",
        ("secrets",),
        ("get", "create", "delete"),
        "the bearer token of a policy's pods: reads the one it knows by name, creates it, removes a predecessor's",
    ),
    Permission(
        "",
        ("persistentvolumeclaims",),
        ("get", "list", "watch", "create", "patch", "delete"),
        "claims of claimTemplate and NFS tiers, their state, removal of those that no policy and no pod uses",
    ),
    Permission(
        "",
        ("pods",),
        (*READ, "delete"),
        "finds attached and missed pods; frees one that attaching kept down",
    ),
    Permission(
        "",
        ("events",),
        (*READ, "create", "patch"),
        "sees refused pods (FailedCreate), tells about its own",
    ),
    Permission("apps", ("replicasets",), READ, "finds the Deployment of a pod"),
    Permission(
        "apps",
        ("deployments", "statefulsets"),
        (*READ, "patch"),
        "availability, and RestartWorkloads",
    ),
    Permission(
        "leaderworkerset.x-k8s.io",
        ("leaderworkersets",),
        (*READ, "patch"),
        "availability, and RestartWorkloads",
    ),
    Permission(
        "",
        ("namespaces",),
        ("get",),
        "whether the webhook is asked about a missed pod",
        scope=Scope.CLUSTER,
    ),
    Permission(
        "",
        ("nodes",),
        ("list",),
        "whether a pod that finds no node would find one without tiers",
        scope=Scope.CLUSTER,
    ),
    Permission(
        "",
        ("persistentvolumes",),
        ("get", "list", "watch", "create", "patch", "delete"),
        "volumes of NFS tiers, and removal of those whose policy is gone",
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
        "the webhook's certificates, where it makes them itself",
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
        "writes the CA by which the API server knows the webhook",
        scope=Scope.CLUSTER,
        names=("kvtier",),
        only_with=SELF_MANAGED,
    ),
)
"""What ``kvtier-operator controller`` needs."""
WEBHOOK: tuple[Permission, ...] = (
    Permission("kvtier.io", ("kvtierpolicies",), READ, "which policy governs a pod"),
    Permission("", ("pods",), READ, "siblings in a group of a LeaderWorkerSet"),
    Permission("", ("limitranges", "resourcequotas"), READ, "what would be refused is left alone"),
    Permission(
        "",
        ("namespaces",),
        READ,
        "labels and Pod Security level of a namespace",
        scope=Scope.CLUSTER,
    ),
    Permission(
        "", ("nodes",), READ, "kubelet versions: native sidecars need 1.29", scope=Scope.CLUSTER
    ),
    Permission(
        "",
        ("secrets",),
        READ,
        "its own serving certificate",
        scope=Scope.OWN,
        names=("kvtier-webhook-certificates",),
        only_with=SELF_MANAGED,
    ),
)
"""What ``kvtier-operator webhook`` needs: it writes nothing."""


def settings_on(settings: Settings) -> frozenset[str]:
    """Those that ``only_with`` names and that are on."""
    on = set()
    if settings.storage.create_volumes:
        on.add(CREATE_VOLUMES)
    if settings.webhook.certificates.mode is CertificateMode.SELF_MANAGED:
        on.add(SELF_MANAGED)
    return frozenset(on)


def rules(
    permissions: Sequence[Permission], scope: Scope, on: frozenset[str]
) -> list[dict[str, Any]]:
    """Rules of one scope, as a Role has them, given the settings that are on (``settings_on``)."""
    return [
        each.rule()
        for each in permissions
        if each.scope is scope and (not each.only_with or each.only_with in on)
    ]
