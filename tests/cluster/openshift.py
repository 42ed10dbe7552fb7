"""OpenShift's security context constraints (SCC) for namespaces of tests, as admission policies.

``enforce`` makes a namespace admit pods by the published rules of one SCC: defaults first, as the
admission plugin sets them before webhooks (and again after them), then the checks. Users, groups
and SELinux levels come from the namespace's annotations, as on OpenShift. What is left out: that an
account may use several SCCs and a pod is given the first one that admits it, and that capabilities
and supplemental groups are added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nodes import MERGE, ok, wait_for

POLICIES = "/apis/admissionregistration.k8s.io/v1"
SCC_LABEL = "kvtier.test/scc"
FIRST_USER = 1_000_660_000
USERS = 10_000
LEVEL = "s0:c26,c5"
ANNOTATIONS = {
    "openshift.io/sa.scc.uid-range": f"{FIRST_USER}/{USERS}",
    "openshift.io/sa.scc.supplemental-groups": f"{FIRST_USER}/{USERS}",
    "openshift.io/sa.scc.mcs": LEVEL,
}
VOLUMES = ("configMap", "downwardAPI", "emptyDir", "persistentVolumeClaim", "projected", "secret")
OTHER_VOLUMES = ("csi", "ephemeral")
FORBIDDEN_VOLUMES = ("hostPath", "nfs", "image", "iscsi", "cephfs", "glusterfs", "rbd", "gitRepo")


@dataclass(frozen=True, slots=True)
class Constraints:
    """One SCC. ``any_user`` and ``any_group``: RunAsAny for users and fsGroup; ``any_supplemental``
    for supplemental groups. ``seccomp``: the runtime's profile is set and required; otherwise no
    profile may be set.
    """

    name: str
    volumes: tuple[str, ...] = (*VOLUMES, *OTHER_VOLUMES)
    host_network: bool = False
    any_user: bool = False
    any_group: bool = False
    any_supplemental: bool = True
    seccomp: bool = True
    drops_all: bool = True


RESTRICTED_V2 = Constraints("restricted-v2", volumes=VOLUMES)
HOSTNETWORK_V2 = Constraints("hostnetwork-v2", host_network=True, any_supplemental=False)
ANYUID = Constraints("anyuid", any_user=True, any_group=True, seccomp=False, drops_all=False)

_POD_CONTEXT = "object.spec.?securityContext"
_VARIABLES = {
    "containers": "object.spec.containers + object.spec.?initContainers.orValue([])",
    "first": "int(namespaceObject.metadata.annotations['openshift.io/sa.scc.uid-range']"
    ".split('/')[0])",
    "count": "int(namespaceObject.metadata.annotations['openshift.io/sa.scc.uid-range']"
    ".split('/')[1])",
    "level": "namespaceObject.metadata.annotations['openshift.io/sa.scc.mcs']",
}


def _container_defaults(field: str, scc: Constraints) -> str:
    """An expression: the containers of ``field`` with what the SCC sets where a pod has nothing."""
    kind, context = f"Object.spec.{field}", f"Object.spec.{field}.securityContext"
    optional = "optional.none()"
    user = f"!has(c.securityContext.runAsUser) && !{_POD_CONTEXT}.?runAsUser.hasValue()"
    user = f"!has(c.securityContext) || ({user})"
    pod_user = f"!{_POD_CONTEXT}.?runAsUser.hasValue()"
    wanted = [f"?runAsUser: ({user}) && {pod_user} ? optional.of(variables.first) : {optional}"]
    if scc.any_user:
        wanted = []
    if scc.drops_all:
        wanted.append(
            "allowPrivilegeEscalation: c.?securityContext.?allowPrivilegeEscalation.orValue(false)"
        )
    return (
        f"object.spec.?{field}.orValue([]).map(c, {kind}{{name: c.name, securityContext: "
        f"{context}{{{', '.join(wanted)}}}}})"
    )


def _defaults(scc: Constraints) -> str:
    pod = "Object.spec.securityContext"
    wanted = [
        f"seLinuxOptions: {pod}.seLinuxOptions{{level: "
        f"{_POD_CONTEXT}.?seLinuxOptions.?level.orValue(variables.level)}}"
    ]
    if not scc.any_group:
        wanted.append(f"fsGroup: {_POD_CONTEXT}.?fsGroup.orValue(variables.first)")
    if scc.seccomp:
        profile = f"{_POD_CONTEXT}.?seccompProfile.?type.orValue('RuntimeDefault')"
        wanted.append(f"seccompProfile: {pod}.seccompProfile{{type: {profile}}}")
    return (
        "Object{metadata: Object.metadata{annotations: "
        f"{{'openshift.io/scc': '{scc.name}'}}}}, spec: Object.spec{{"
        f"securityContext: {pod}{{{', '.join(wanted)}}}, "
        f"containers: {_container_defaults('containers', scc)}, "
        f"initContainers: {_container_defaults('initContainers', scc)}}}}}"
    )


def _checks(scc: Constraints) -> dict[str, str]:
    """Expressions by the message of their failure."""
    every = "variables.containers.all(c, {})".format
    in_range = "{0} >= variables.first && {0} < variables.first + variables.count".format
    user = f"c.?securityContext.?runAsUser.orValue({_POD_CONTEXT}.?runAsUser.orValue(-1))"
    found = {
        "privileged: Invalid value: true": every("!c.?securityContext.?privileged.orValue(false)"),
        "hostPID, hostIPC: not allowed": "!object.spec.?hostPID.orValue(false) && "
        "!object.spec.?hostIPC.orValue(false)",
        "volumes: not allowed to be used": "object.spec.?volumes.orValue([]).all(v, "
        + " && ".join(f"!has(v.{name})" for name in FORBIDDEN_VOLUMES[:3])
        + "".join(f" && !has(v.{name})" for name in ("csi", "ephemeral") if name not in scc.volumes)
        + ")",
        "seLinuxOptions.level: must be the namespace's": every(
            "c.?securityContext.?seLinuxOptions.?level.orValue(variables.level) == variables.level"
        )
        + f" && {_POD_CONTEXT}.?seLinuxOptions.?level.orValue('') == variables.level",
    }
    if not scc.host_network:
        found["hostNetwork, hostPort: not allowed"] = (
            "!object.spec.?hostNetwork.orValue(false) && "
            + every("c.?ports.orValue([]).all(p, p.?hostPort.orValue(0) == 0)")
        )
    if not scc.any_user:
        found["runAsUser: must be in the ranges"] = every(in_range(user))
    if not scc.any_group:
        found["fsGroup: not an allowed group"] = (
            f"{_POD_CONTEXT}.?fsGroup.orValue(-1) == variables.first"
        )
    if not scc.any_supplemental:
        found["supplementalGroups: not an allowed group"] = (
            f"{_POD_CONTEXT}.?supplementalGroups.orValue([]).all(g, {in_range('g')})"
        )
    if scc.drops_all:
        found["capabilities, allowPrivilegeEscalation: not allowed"] = every(
            "!c.?securityContext.?allowPrivilegeEscalation.orValue(true) && "
            "c.?securityContext.?capabilities.?add.orValue([]).all(a, a == 'NET_BIND_SERVICE')"
        )
    profile = "?securityContext.?seccompProfile"
    if scc.seccomp:
        runtime = "in ['', 'RuntimeDefault']"
        found["seccomp: only runtime/default"] = (
            every(f"c.{profile}.?type.orValue('') {runtime}")
            + f" && object.spec.{profile}.?type.orValue('') {runtime}"
        )
    else:
        found["seccomp: Forbidden: seccomp may not be set"] = (
            every(f"!c.{profile}.hasValue()") + f" && !object.spec.{profile}.hasValue()"
        )
    return found


def _matched(scc: Constraints) -> dict[str, Any]:
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods"],
    }
    return {
        "resourceRules": [rule],
        "namespaceSelector": {"matchLabels": {SCC_LABEL: scc.name}},
    }


def objects(scc: Constraints) -> dict[str, dict[str, Any]]:
    """The admission policies and their bindings, by plural."""
    name = f"scc-{scc.name}"
    variables = [{"name": key, "expression": text} for key, text in _VARIABLES.items()]
    common = {"matchConstraints": _matched(scc), "variables": variables, "failurePolicy": "Fail"}
    metadata = {"metadata": {"name": name}}
    checks = [
        {"expression": text, "message": f"{scc.name}: {message}"}
        for message, text in _checks(scc).items()
    ]
    mutation = {
        "patchType": "ApplyConfiguration",
        "applyConfiguration": {"expression": _defaults(scc)},
    }
    return {
        "mutatingadmissionpolicies": {
            **metadata,
            "spec": {**common, "mutations": [mutation], "reinvocationPolicy": "IfNeeded"},
        },
        "mutatingadmissionpolicybindings": {**metadata, "spec": {"policyName": name}},
        "validatingadmissionpolicies": {**metadata, "spec": {**common, "validations": checks}},
        "validatingadmissionpolicybindings": {
            **metadata,
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        },
    }


def namespace_metadata(scc: Constraints) -> dict[str, dict[str, str]]:
    """Labels and annotations of a namespace that ``enforce`` covers."""
    return {"labels": {SCC_LABEL: scc.name}, "annotations": dict(ANNOTATIONS)}


def constrain(api: Any, namespace: str, scc: Constraints) -> None:
    """Puts a namespace, made if it does not exist, under an SCC that is enforced."""
    body = {"metadata": {"name": namespace, **namespace_metadata(scc)}}
    if api.request("POST", "/api/v1/namespaces", body)[0] == 409:
        ok(api.request("PATCH", f"/api/v1/namespaces/{namespace}", body, content_type=MERGE))


@contextlib.contextmanager
def enforce(api: Any, *constraints: Constraints) -> Iterator[None]:
    """Admits pods of labelled namespaces by these SCCs while the block runs."""
    made: list[str] = []
    try:
        for scc in constraints:
            for plural, body in objects(scc).items():
                path = f"{POLICIES}/{plural}"
                ok(api.request("POST", path, body))
                made.append(f"{path}/{body['metadata']['name']}")
        for scc in constraints:
            _wait_enforced(api, scc)
        yield
    finally:
        for path in reversed(made):
            api.request("DELETE", path)


def _wait_enforced(api: Any, scc: Constraints) -> None:
    """Policies take effect a moment after they are created. The namespace is removed."""
    name = f"probe-{scc.name}"
    constrain(api, name, scc)
    account = f"/api/v1/namespaces/{name}/serviceaccounts"
    wait_for("the default account", lambda: api.request("GET", f"{account}/default")[0] == 200)
    plain = {"containers": [{"name": "probe", "image": "probe"}]}
    refused = {**plain, "hostPID": True}
    pods = f"/api/v1/namespaces/{name}/pods?dryRun=All"

    def enforced() -> bool:
        codes = [
            api.request("POST", pods, {"metadata": {"name": "probe"}, "spec": spec})
            for spec in (plain, refused)
        ]
        (admitted, body), (code, _) = codes
        annotations = body.get("metadata", {}).get("annotations") or {}
        return bool(admitted == 201 and "openshift.io/scc" in annotations and code in (403, 422))

    wait_for(f"{scc.name} is enforced", enforced, 30)
    api.request("DELETE", f"/api/v1/namespaces/{name}")
