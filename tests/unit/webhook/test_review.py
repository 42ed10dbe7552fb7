"""An AdmissionReview is decoded strictly; any other body is an error, never an exception of another
kind.
"""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_operator.webhook import review

REVIEW: dict[str, Any] = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "u-1",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "operation": "CREATE",
        "namespace": "serving",
        "object": {"metadata": {"generateName": "engine-"}},
        "oldObject": None,
        "dryRun": True,
    },
}


def test_an_admission_review_is_decoded() -> None:
    request = review.parse(json.dumps(REVIEW).encode())
    assert (request.uid, request.kind, request.operation, request.namespace, request.dry_run) == (
        "u-1",
        "Pod",
        "CREATE",
        "serving",
        True,
    )
    assert request.object == {"metadata": {"generateName": "engine-"}}
    assert request.old is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (
            b'{"apiVersion":"admission.k8s.io/v1beta1","kind":"AdmissionReview"}',
            "must be admission.k8s.io/v1",
        ),
        (
            b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}',
            "request: Invalid value",
        ),
        (
            b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{}}',
            "request.uid: Required value",
        ),
        (
            b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u"}}',
            "kind: Invalid value",
        ),
    ],
)
def test_any_other_body_is_an_error_with_the_reason(body: bytes, words: str) -> None:
    with pytest.raises(review.InvalidReviewError, match=words):
        review.parse(body)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(REVIEW["request"])), JSON)
def test_any_field_may_hold_anything(field: str, value: Any) -> None:
    admission_review = {**REVIEW, "request": {**REVIEW["request"], field: value}}
    with contextlib.suppress(review.InvalidReviewError):
        review.parse(json.dumps(admission_review).encode())


def test_a_patch_is_encoded_as_json_patch() -> None:
    operations = [{"op": "add", "path": "/a", "value": "ü"}]
    response = review.allowed("u", patch=operations)["response"]
    assert (response["uid"], response["allowed"], response["patchType"]) == ("u", True, "JSONPatch")
    assert json.loads(base64.b64decode(response["patch"])) == operations
    assert "patch" not in review.allowed("u")["response"]


def test_a_denial_names_every_cause() -> None:
    response = review.denied("u", [("spec.a", "spec.a: Invalid value: 1"), ("spec.b", "b")])[
        "response"
    ]
    assert not response["allowed"]
    assert response["status"]["code"] == 422
    assert response["status"]["message"] == "spec.a: Invalid value: 1\nb"
    assert [cause["field"] for cause in response["status"]["details"]["causes"]] == [
        "spec.a",
        "spec.b",
    ]


def test_warnings_are_bounded() -> None:
    warnings = review.allowed("u", warnings=["w" * 1000] * 100)["response"]["warnings"]
    assert len(warnings) == 16
    assert {len(text) for text in warnings} == {256}
