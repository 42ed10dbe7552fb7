"""Calls about LeaderWorkerSets for the test of the guard: the kind, one object, and what the
controller's account may and may not change in it. Without the controller of the kind.
"""

from __future__ import annotations

from typing import Any

GROUP = "leaderworkerset.x-k8s.io"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CONTAINERS = [{"name": "main", "image": "example.com/image"}]
RESTARTED = {"kvtier.io/restarted-for": "3f9c1a2b"}
ANY = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def definition() -> dict[str, Any]:
    """The kind as the project publishes it, with templates that are not checked."""
    template = {
        "type": "object",
        "required": ["workerTemplate"],
        "properties": {
            "leaderTemplate": ANY,
            "workerTemplate": ANY,
            "size": {"type": "integer", "format": "int32", "default": 1},
            "restartPolicy": {"type": "string"},
        },
    }
    spec = {
        "type": "object",
        "properties": {
            "replicas": {"type": "integer", "format": "int32", "default": 1},
            "leaderWorkerTemplate": template,
            "startupPolicy": {"type": "string"},
        },
    }
    schema = {"type": "object", "properties": {"spec": spec, "status": ANY}}
    return {
        "metadata": {
            "name": f"leaderworkersets.{GROUP}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "plural": "leaderworkersets",
                "singular": "leaderworkerset",
                "kind": "LeaderWorkerSet",
            },
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {"status": {}},
                }
            ],
        },
    }


def template(**spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"app": "web"}, "annotations": {"team": "a"}},
        "spec": {"containers": CONTAINERS, **spec},
    }


def objects() -> list[dict[str, Any]]:
    """One set with a template for its leaders, one without."""
    both = {"leaderTemplate": template(), "workerTemplate": template(), "size": 2}
    return [
        {
            "apiVersion": f"{GROUP}/v1",
            "kind": "LeaderWorkerSet",
            "metadata": {"name": name, "labels": {"team": "a"}},
            "spec": {"replicas": 2, "leaderWorkerTemplate": parts},
        }
        for name, parts in (
            ("both", both),
            ("workers", {"workerTemplate": template(), "size": 2}),
        )
    ]


def parts(**templates: Any) -> dict[str, Any]:
    return {"spec": {"leaderWorkerTemplate": templates}}


ANNOTATED = {"metadata": {"annotations": RESTARTED}}
PRIVILEGED = [{**CONTAINERS[0], "securityContext": {"privileged": True}}]
ESCALATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "privileged workers": ("both", parts(workerTemplate={"spec": {"containers": PRIVILEGED}})),
    "privileged leader": ("both", parts(leaderTemplate={"spec": {"containers": PRIVILEGED}})),
    "leader template added": ("workers", parts(leaderTemplate=template())),
    "leader template added with the annotation": ("workers", parts(leaderTemplate=ANNOTATED)),
    "leader template removed": ("both", parts(leaderTemplate=None)),
    "host network of workers": ("both", parts(workerTemplate={"spec": {"hostNetwork": True}})),
    "other annotation": ("both", parts(workerTemplate={"metadata": {"annotations": {"a": "b"}}})),
    "annotation of a team removed": (
        "both",
        parts(workerTemplate={"metadata": {"annotations": {"team": None}}}),
    ),
    "label of workers": ("both", parts(workerTemplate={"metadata": {"labels": {"role": "x"}}})),
    "size of the groups": ("both", parts(size=9)),
    "restart policy": ("both", parts(restartPolicy="None")),
    "number of groups": ("both", {"spec": {"replicas": 0}}),
    "start-up policy": ("both", {"spec": {"startupPolicy": "LeaderReady"}}),
    "label of the set": ("both", {"metadata": {"labels": {"team": "b"}}}),
    "finalizer of the set": ("both", {"metadata": {"finalizers": ["example.com/x"]}}),
}
"""By what an attacker would gain: the object, and a merge patch of it."""
WRITES: dict[str, tuple[str, dict[str, Any]]] = {
    "restart of both": ("both", parts(leaderTemplate=ANNOTATED, workerTemplate=ANNOTATED)),
    "restart of workers": ("workers", parts(workerTemplate=ANNOTATED)),
}
