"""What an API server asks is read strictly, and no bytes whatsoever end in anything but an answer."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_operator.webhook import review

QUESTION: dict[str, Any] = {
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


def test_a_question_is_read() -> None:
    asked = review.parse(json.dumps(QUESTION).encode())
    assert (asked.uid, asked.kind, asked.operation, asked.namespace, asked.dry_run) == (
        "u-1",
        "Pod",
        "CREATE",
        "serving",
        True,
    )
    assert asked.object == {"metadata": {"generateName": "engine-"}}
    assert asked.old is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "not an object"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (
            b'{"apiVersion":"admission.k8s.io/v1beta1","kind":"AdmissionReview"}',
            "accepted is admission.k8s.io/v1",
        ),
        (
            b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}',
            "request is not an object",
        ),
        (
            b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{}}',
            "uid is missing",
        ),
        (
            b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u"}}',
            "kind is not",
        ),
    ],
)
def test_what_is_no_question_is_malformed_with_the_reason(body: bytes, words: str) -> None:
    with pytest.raises(review.MalformedError, match=words):
        review.parse(body)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(QUESTION["request"])), JSON)
def test_any_field_may_hold_anything(field: str, value: Any) -> None:
    question = {**QUESTION, "request": {**QUESTION["request"], field: value}}
    with contextlib.suppress(review.MalformedError):
        review.parse(json.dumps(question).encode())


def test_a_patch_is_sent_as_the_api_server_takes_it() -> None:
    operations = [{"op": "add", "path": "/a", "value": "ü"}]
    response = review.allowed("u", patch=operations)["response"]
    assert (response["uid"], response["allowed"], response["patchType"]) == ("u", True, "JSONPatch")
    assert json.loads(base64.b64decode(response["patch"])) == operations
    assert "patch" not in review.allowed("u")["response"]


def test_a_refusal_names_every_cause() -> None:
    response = review.refused("u", [("spec.a", "spec.a: 1 is not accepted"), ("spec.b", "b")])[
        "response"
    ]
    assert not response["allowed"]
    assert response["status"]["code"] == 422
    assert response["status"]["message"] == "spec.a: 1 is not accepted\nb"
    assert [cause["field"] for cause in response["status"]["details"]["causes"]] == [
        "spec.a",
        "spec.b",
    ]


def test_warnings_are_bounded() -> None:
    warnings = review.allowed("u", warnings=["w" * 1000] * 100)["response"]["warnings"]
    assert len(warnings) == 16
    assert {len(text) for text in warnings} == {256}
