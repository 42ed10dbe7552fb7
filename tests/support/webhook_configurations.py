"""The webhook configurations of the chart, as values for tests without Helm. A test compares them
with the templates.

Without ``caBundle``, which the operator or cert-manager writes.
"""

from __future__ import annotations

from typing import Any

from kvtier_operator.api.crd import PLURAL
from kvtier_operator.api.names import INJECT_LABEL, MIRROR_ANNOTATION, STRUCTURAL_ANNOTATION
from kvtier_operator.api.policy import GROUP, VERSION
from kvtier_operator.render.volumes import MANAGED_BY
from kvtier_operator.settings import Settings
from kvtier_operator.webhook.listener import MUTATE_PATH, VALIDATE_PATH

POD_WEBHOOK = "attach.kvtier.io"
POLICY_WEBHOOK = "validate.kvtier.io"
TIMEOUT_SECONDS = 2
SERVICE_PORT = 443

MATCH_CONDITIONS = (
    {
        "name": "not-of-a-daemon-set",
        "expression": "!has(object.metadata.ownerReferences) || "
        "!object.metadata.ownerReferences.exists(owner, owner.kind == 'DaemonSet')",
    },
    {
        "name": "not-static",
        "expression": "!has(object.metadata.annotations) || "
        f"!('{MIRROR_ANNOTATION}' in object.metadata.annotations)",
    },
    {
        "name": "not-injected",
        "expression": "!has(object.metadata.annotations) || "
        f"!('{STRUCTURAL_ANNOTATION}' in object.metadata.annotations)",
    },
)
"""Evaluated by the API server, which does not call the webhook for pods that do not match."""


def mutating(settings: Settings) -> dict[str, Any]:
    """Intercepts new pods in labelled namespaces, never in the operator's own namespace."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {
            "name": settings.webhook.certificates.mutating_configuration,
            "labels": dict(MANAGED_BY),
        },
        "webhooks": [
            {
                "name": POD_WEBHOOK,
                "admissionReviewVersions": ["v1"],
                "clientConfig": _service(settings, MUTATE_PATH),
                "rules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "resources": ["pods"],
                        "operations": ["CREATE"],
                        "scope": "Namespaced",
                    }
                ],
                "namespaceSelector": {
                    "matchLabels": {INJECT_LABEL: "enabled"},
                    "matchExpressions": [
                        {
                            "key": "kubernetes.io/metadata.name",
                            "operator": "NotIn",
                            "values": ["kube-system", settings.namespace],
                        }
                    ],
                },
                "matchConditions": [dict(condition) for condition in MATCH_CONDITIONS],
                "matchPolicy": "Equivalent",
                "failurePolicy": "Ignore",
                "reinvocationPolicy": "IfNeeded",
                "sideEffects": "None",
                "timeoutSeconds": TIMEOUT_SECONDS,
            }
        ],
    }


def validating(settings: Settings) -> dict[str, Any]:
    """For policies. It may fail open, because the CRD rejects what must never pass."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {
            "name": settings.webhook.certificates.validating_configuration,
            "labels": dict(MANAGED_BY),
        },
        "webhooks": [
            {
                "name": POLICY_WEBHOOK,
                "admissionReviewVersions": ["v1"],
                "clientConfig": _service(settings, VALIDATE_PATH),
                "rules": [
                    {
                        "apiGroups": [GROUP],
                        "apiVersions": [VERSION],
                        "resources": [PLURAL],
                        "operations": ["CREATE", "UPDATE"],
                        "scope": "Namespaced",
                    }
                ],
                "matchPolicy": "Equivalent",
                "failurePolicy": "Ignore",
                "sideEffects": "None",
                "timeoutSeconds": TIMEOUT_SECONDS,
            }
        ],
    }


def _service(settings: Settings, path: str) -> dict[str, Any]:
    return {
        "service": {
            "name": settings.webhook.certificates.service_name,
            "namespace": settings.namespace,
            "path": path,
            "port": SERVICE_PORT,
        }
    }
