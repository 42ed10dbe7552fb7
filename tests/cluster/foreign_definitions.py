"""Definitions of the kinds of the Prometheus operator and of cert-manager that the chart renders.

Written for tests: the fields that KVTier uses, with the published types, patterns and required
fields. With ``fieldValidation=Strict`` the API server rejects any other field. The variable
KVTIER_TEST_DEFINITIONS names a directory with the published files, which are used instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

VARIABLE = "KVTIER_TEST_DEFINITIONS"
PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DURATION = (
    "^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$"
)
Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
TIME: Schema = {"type": "string", "pattern": DURATION}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def fields(*required: str, **properties: Schema) -> Schema:
    """An object with these fields only."""
    found: Schema = {"type": "object", "properties": properties}
    return {**found, "required": list(required)} if required else found


def items(of: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": of}


def one_of(*values: str) -> Schema:
    """A string of these."""
    return {"type": "string", "enum": list(values)}


RELABELING = fields(
    sourceLabels=items(TEXT),
    targetLabel=TEXT,
    regex=TEXT,
    modulus={"type": "integer", "format": "int64", "minimum": 0},
    replacement=TEXT,
    separator=TEXT,
    action=one_of("replace", "keep", "drop", "hashmod", "labelmap", "labeldrop", "labelkeep"),
)
ENDPOINT: dict[str, Schema] = {
    "port": TEXT,
    "interval": TIME,
    "scrapeTimeout": TIME,
    "relabelings": items(RELABELING),
    "metricRelabelings": items(RELABELING),
    "authorization": fields(type=TEXT, credentials=fields("key", name=TEXT, key=TEXT)),
}
SELECTOR = fields(matchLabels=TEXTS)
RULE = fields(
    "expr",
    alert=TEXT,
    expr={"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, TEXT]},
    **{"for": TIME},
    labels=TEXTS,
    annotations=TEXTS,
)
GROUPS: Schema = {
    **items(
        fields("name", name={"type": "string", "minLength": 1}, interval=TIME, rules=items(RULE))
    ),
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["name"],
}
ISSUER_REFERENCE = fields("name", name=TEXT, kind=TEXT, group=TEXT)
CERTIFICATE = fields(
    "issuerRef",
    "secretName",
    isCA={"type": "boolean"},
    commonName=TEXT,
    secretName=TEXT,
    dnsNames=items(TEXT),
    duration=TEXT,
    renewBefore=TEXT,
    privateKey=fields(
        algorithm=one_of("RSA", "ECDSA", "Ed25519"),
        size={"type": "integer"},
        rotationPolicy=one_of("Never", "Always"),
    ),
    usages=items(one_of("server auth", "client auth", "digital signature", "cert sign")),
    issuerRef=ISSUER_REFERENCE,
)
SPECS: dict[tuple[str, str, str], Schema] = {
    ("monitoring.coreos.com", "PodMonitor", "podmonitors"): fields(
        "selector", selector=SELECTOR, podMetricsEndpoints=items(fields(**ENDPOINT))
    ),
    ("monitoring.coreos.com", "ServiceMonitor", "servicemonitors"): fields(
        "endpoints",
        "selector",
        selector=SELECTOR,
        namespaceSelector=fields(matchNames=items(TEXT)),
        endpoints=items(fields(**ENDPOINT)),
    ),
    ("monitoring.coreos.com", "PrometheusRule", "prometheusrules"): fields(groups=GROUPS),
    ("cert-manager.io", "Certificate", "certificates"): CERTIFICATE,
    ("cert-manager.io", "Issuer", "issuers"): fields(
        selfSigned=fields(), ca=fields("secretName", secretName=TEXT)
    ),
}


def written() -> list[dict[str, Any]]:
    """The definitions of this module, or the published ones."""
    directory = os.environ.get(VARIABLE)
    if directory:
        files = sorted(Path(directory).glob("*.yaml"))
        texts = [path.read_text() for path in files]
        return [body for text in texts for body in yaml.load_all(text, yaml.CSafeLoader) if body]
    return [
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {
                "name": f"{plural}.{group}",
                # The API server reserves groups below k8s.io only; these are others' own.
            },
            "spec": {
                "group": group,
                "scope": "Namespaced",
                "names": {
                    "kind": kind,
                    "plural": plural,
                    "singular": kind.lower(),
                    "listKind": f"{kind}List",
                },
                "versions": [
                    {
                        "name": "v1",
                        "served": True,
                        "storage": True,
                        "schema": {"openAPIV3Schema": fields("spec", spec=spec)},
                    }
                ],
            },
        }
        for (group, kind, plural), spec in SPECS.items()
    ]


@contextmanager
def installed(api: Any, nodes: ModuleType) -> Iterator[dict[str, tuple[str, str]]]:
    """Group and plural of each kind while its definition is established."""
    definitions = written()
    names = [body["metadata"]["name"] for body in definitions]
    try:
        for body in definitions:
            nodes.ok(api.request("POST", PATH, body))
        nodes.wait_for(
            "the definitions are established", lambda: all(_serves(api, each) for each in names), 60
        )
        yield {
            body["spec"]["names"]["kind"]: (body["spec"]["group"], body["spec"]["names"]["plural"])
            for body in definitions
        }
    finally:
        for name in names:
            api.request("DELETE", f"{PATH}/{name}")
        nodes.wait_for(
            "the definitions are gone",
            lambda: all(api.request("GET", f"{PATH}/{name}")[0] == 404 for name in names),
            60,
        )


def _serves(api: Any, name: str) -> bool:
    plural, _, group = name.partition(".")
    conditions = api.request("GET", f"{PATH}/{name}")[1].get("status", {}).get("conditions", ())
    established = any(
        each["type"] == "Established" and each["status"] == "True" for each in conditions
    )
    path = f"/apis/{group}/v1/namespaces/default/{plural}"
    return established and api.request("GET", path)[0] == 200
