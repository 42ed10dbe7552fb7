"""AdmissionReview v1: what the API server asks, and the answers. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
MAX_BODY_BYTES = 8 << 20
"""The API server takes objects of at most 3 MiB; a review of an update holds two, and the JSON of secrets of others is
not asked for."""
MAX_WARNING = 256
"""Longer warnings are cut by the API server, in the middle of a character if need be."""
MAX_WARNINGS = 16
"""The API server drops what is beyond 4 KiB altogether."""


class MalformedError(Exception):
    """The body is no AdmissionReview of a version that is spoken here; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Review:
    """One question. ``object``: as it would be stored; ``old``: as it is stored (UPDATE). ``dry_run``: nothing will be
    stored, which changes nothing here because nothing is ever written.
    """

    uid: str
    operation: str
    group: str
    kind: str
    sub_resource: str
    namespace: str
    name: str
    object: Mapping[str, Any]
    old: Mapping[str, Any] | None
    dry_run: bool


def parse(body: bytes) -> Review:
    """The question in a request's body. Raises ``MalformedError``, whatever the bytes are."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise MalformedError("the body is not an object")
    if document.get("apiVersion") != API_VERSION or document.get("kind") != KIND:
        raise MalformedError(
            f"{document.get('apiVersion')} {document.get('kind')} is not accepted; accepted is {API_VERSION} {KIND}"
        )
    request = _mapping(document, "request")
    uid = request.get("uid")
    if not isinstance(uid, str) or not uid:
        raise MalformedError("request.uid is missing")
    kind = _mapping(request, "kind")
    old = request.get("oldObject")
    return Review(
        uid=uid,
        operation=_text(request, "operation"),
        group=_text(kind, "group"),
        kind=_text(kind, "kind"),
        sub_resource=_text(request, "subResource"),
        namespace=_text(request, "namespace"),
        name=_text(request, "name"),
        object=_mapping(request, "object") if request.get("object") is not None else {},
        old=_mapping(request, "oldObject") if old is not None else None,
        dry_run=request.get("dryRun") is True,
    )


def allowed(
    uid: str, *, patch: Sequence[Mapping[str, Any]] = (), warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """Yes, with changes where there are any."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch:
        text = json.dumps(list(patch), separators=(",", ":"))
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(text.encode()).decode()}
    return _answer(response, warnings)


def refused(
    uid: str, causes: Sequence[tuple[str, str]], *, warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """No, with everything that is wrong: pairs of field and message."""
    details = [
        {"reason": "FieldValueInvalid", "field": field, "message": message}
        for field, message in causes
    ]
    status = {
        "code": 422,
        "reason": "Invalid",
        "message": "\n".join(message for _, message in causes),
        "details": {"causes": details},
    }
    return _answer({"uid": uid, "allowed": False, "status": status}, warnings)


def _answer(response: dict[str, Any], warnings: Sequence[str]) -> dict[str, Any]:
    if warnings:
        response["warnings"] = [
            text if len(text) <= MAX_WARNING else text[: MAX_WARNING - 1] + "…"
            for text in warnings[:MAX_WARNINGS]
        ]
    return {"apiVersion": API_VERSION, "kind": KIND, "response": response}


def _mapping(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise MalformedError(f"{key} is not an object")
    return value


def _text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key) or ""
    if not isinstance(value, str):
        raise MalformedError(f"{key} is not text")
    return value
