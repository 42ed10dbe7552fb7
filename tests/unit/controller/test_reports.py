"""Parsing of a pod's status: untrusted data, bounded in size, type and number."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.pods import status_document, tier_document

from kvtier_operator.api.status import TierState
from kvtier_operator.controller.pods import reports
from kvtier_operator.controller.pods.reports import MalformedReportError, parse_report

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=6,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        [
            "version",
            "contentHash",
            "started",
            "appliedGeneration",
            "liveRefusals",
            "tiers",
            "sessions",
            "counters",
            "conditions",
            "promptTokens",
        ]
    ),
    JSON,
)


def body(**more: Any) -> bytes:
    return json.dumps(status_document(**more)).encode()


def test_a_whole_document_is_read() -> None:
    tier = tier_document(
        "nvme", "Degraded", usedBytes=5, capacityBytes=10, hitTokens=3, lastError="slow"
    )
    report = parse_report(
        json.dumps(status_document(tier, contentHash="0123abcd", promptTokens=9)).encode()
    )
    assert report.attached
    assert (report.content_hash, report.applied_generation, report.prompt_tokens) == (
        "0123abcd",
        5,
        9,
    )
    assert report.tiers == (reports.TierReport("nvme", TierState.DEGRADED, 5, 10, 3, "slow"),)


@pytest.mark.parametrize(
    ("sessions", "attached"), [("ready", True), ("unready", False), ("none", False)]
)
def test_an_engine_is_attached_when_all_its_sessions_are_ready(
    sessions: str, attached: bool
) -> None:
    assert parse_report(body(sessions=sessions)).attached is attached


def test_an_engine_without_workers_is_not_attached() -> None:
    document = status_document()
    document["sessions"] = document["sessions"][:1]
    assert not parse_report(json.dumps(document).encode()).attached


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "not JSON"),
        (b"<html>", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"9" * 200_000, "not JSON"),
        (b" " * (reports.MAX_BODY_BYTES + 1), "more than 262144 bytes"),
    ],
)
def test_an_invalid_document_is_rejected_with_an_error_that_does_not_quote_it(
    answer: bytes, error: str
) -> None:
    with pytest.raises(MalformedReportError, match=error):
        parse_report(answer)


@settings(max_examples=60, deadline=None)
@given(FIELDS)
def test_any_json_object_reads_as_a_bounded_report(document: dict[str, Any]) -> None:
    report = parse_report(json.dumps(document).encode())
    assert len(report.tiers) <= reports.MAX_TIERS
    assert 0 <= report.applied_generation <= reports.MAX_NUMBER
    assert all(0 <= tier.used_bytes <= reports.MAX_NUMBER for tier in report.tiers)
    assert len(report.content_hash) <= reports.MAX_TEXT


def test_invalid_numbers_read_as_absent() -> None:
    for wrong in (-1, 1 << 63, 1.5, "7", True, None, [1]):
        tier = tier_document("ram", usedBytes=wrong, capacityBytes=wrong, hitTokens=wrong)
        report = parse_report(
            json.dumps(status_document(tier, promptTokens=wrong, generation=wrong)).encode()
        )  # type: ignore[arg-type]
        assert (report.tiers[0].used_bytes, report.tiers[0].hit_tokens, report.prompt_tokens) == (
            0,
            None,
            None,
        )
        assert report.applied_generation == 0


def test_texts_are_bounded_and_of_one_line() -> None:
    report = parse_report(body(version="1\n\x1b[31mred" + "x" * 1000))
    assert len(report.version) == reports.MAX_TEXT
    assert report.version.isprintable()


def test_an_invalid_state_is_unknown() -> None:
    for strange in ("Splendid", 7, None, ["Healthy"], {"a": 1}):
        report = parse_report(json.dumps(status_document(tier_document("ram", strange))).encode())  # type: ignore[arg-type]
        assert report.tiers[0].state is TierState.UNKNOWN


def test_a_duplicate_tier_and_one_without_a_name_are_ignored() -> None:
    tiers = [
        tier_document("ram", usedBytes=1),
        tier_document("ram", usedBytes=2),
        tier_document(""),
    ]
    report = parse_report(json.dumps(status_document(*tiers)).encode())
    assert [(tier.name, tier.used_bytes) for tier in report.tiers] == [("ram", 1)]
