"""AdmissionReview v1: the API server's request, and the responses to it. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
MAX_BODY_BYTES = 8 << 20
"""The API server accepts objects of at most 3 MiB, and the review of an update holds two."""
MAX_WARNING = 256
"""The API server truncates longer warnings, possibly inside a character."""
MAX_WARNINGS = 16
"""The API server drops all warnings beyond 4 KiB in total."""


class InvalidReviewError(Exception):
    """The body is not an AdmissionReview of a supported version; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """One request for admission.

    ``object`` is the object to be stored, ``old`` the stored one (UPDATE only). A dry run needs no
    special treatment because the webhook has no side effects.
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


def parse(body: bytes) -> AdmissionRequest:
    """Decodes the body of an HTTP request. Raises ``InvalidReviewError`` for every other body."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidReviewError(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidReviewError("the body is not a JSON object")
    version, kind_name = document.get("apiVersion"), document.get("kind")
    if version != API_VERSION or kind_name != KIND:
        raise InvalidReviewError(
            f"unsupported kind {version} {kind_name}: must be {API_VERSION} {KIND}"
        )
    request = _object(document, "request")
    uid = request.get("uid")
    if not isinstance(uid, str) or not uid:
        raise InvalidReviewError("request.uid: Required value")
    kind = _object(request, "kind")
    old = request.get("oldObject")
    return AdmissionRequest(
        uid=uid,
        operation=_string(request, "operation"),
        group=_string(kind, "group"),
        kind=_string(kind, "kind"),
        sub_resource=_string(request, "subResource"),
        namespace=_string(request, "namespace"),
        name=_string(request, "name"),
        object=_object(request, "object") if request.get("object") is not None else {},
        old=_object(request, "oldObject") if old is not None else None,
        dry_run=request.get("dryRun") is True,
    )


def allowed(
    uid: str, *, patch: Sequence[Mapping[str, Any]] = (), warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """A response that allows the request, with a JSON patch if there is one."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch:
        text = json.dumps(list(patch), separators=(",", ":"))
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(text.encode()).decode()}
    return _review(response, warnings)


def denied(
    uid: str, causes: Sequence[tuple[str, str]], *, warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """A response that denies the request, with all causes as pairs of field and message."""
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
    return _review({"uid": uid, "allowed": False, "status": status}, warnings)


def _review(response: dict[str, Any], warnings: Sequence[str]) -> dict[str, Any]:
    if warnings:
        response["warnings"] = [
            text if len(text) <= MAX_WARNING else text[: MAX_WARNING - 1] + "…"
            for text in warnings[:MAX_WARNINGS]
        ]
    return {"apiVersion": API_VERSION, "kind": KIND, "response": response}


def _object(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise InvalidReviewError(f"{key}: Invalid value: must be a JSON object")
    return value


def _string(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key) or ""
    if not isinstance(value, str):
        raise InvalidReviewError(f"{key}: Invalid value: must be a string")
    return value
