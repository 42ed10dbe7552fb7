"""What a pod says is data: bounded in size, type and number, whoever wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.pods import status_document, tier_document

from kvtier_operator.api.status import TierState
from kvtier_operator.controller.pods import reports
from kvtier_operator.controller.pods.reports import MalformedError, read

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
    report = read(
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
def test_an_engine_is_attached_when_its_scheduler_and_its_workers_are_there(
    sessions: str, attached: bool
) -> None:
    assert read(body(sessions=sessions)).attached is attached


def test_a_scheduler_alone_is_no_attached_engine() -> None:
    document = status_document()
    document["sessions"] = document["sessions"][:1]
    assert not read(json.dumps(document).encode()).attached


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "no JSON"),
        (b"<html>", "no JSON"),
        (b"[1]", "no JSON object"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"9" * 200_000, "no JSON"),
        (b" " * (reports.MAX_BODY_BYTES + 1), "more than 262144 bytes"),
    ],
)
def test_what_is_no_document_is_refused_with_a_reason_that_does_not_quote_it(
    answer: bytes, why: str
) -> None:
    with pytest.raises(MalformedError, match=why):
        read(answer)


@settings(max_examples=60, deadline=None)
@given(FIELDS)
def test_any_json_object_reads_as_a_bounded_report(document: dict[str, Any]) -> None:
    report = read(json.dumps(document).encode())
    assert len(report.tiers) <= reports.MAX_TIERS
    assert 0 <= report.applied_generation <= reports.MAX_NUMBER
    assert all(0 <= tier.used_bytes <= reports.MAX_NUMBER for tier in report.tiers)
    assert len(report.content_hash) <= reports.MAX_TEXT


def test_numbers_that_make_no_sense_read_as_absent() -> None:
    for wrong in (-1, 1 << 63, 1.5, "7", True, None, [1]):
        tier = tier_document("ram", usedBytes=wrong, capacityBytes=wrong, hitTokens=wrong)
        report = read(
            json.dumps(status_document(tier, promptTokens=wrong, generation=wrong)).encode()
        )  # type: ignore[arg-type]
        assert (report.tiers[0].used_bytes, report.tiers[0].hit_tokens, report.prompt_tokens) == (
            0,
            None,
            None,
        )
        assert report.applied_generation == 0


def test_texts_are_short_and_of_one_line() -> None:
    report = read(body(version="1\n\x1b[31mred" + "x" * 1000))
    assert len(report.version) == reports.MAX_TEXT
    assert report.version.isprintable()


def test_a_state_that_nobody_knows_is_unknown() -> None:
    for strange in ("Splendid", 7, None, ["Healthy"], {"a": 1}):
        report = read(json.dumps(status_document(tier_document("ram", strange))).encode())  # type: ignore[arg-type]
        assert report.tiers[0].state is TierState.UNKNOWN


def test_a_tier_that_is_named_twice_counts_once_and_one_without_a_name_not_at_all() -> None:
    tiers = [
        tier_document("ram", usedBytes=1),
        tier_document("ram", usedBytes=2),
        tier_document(""),
    ]
    report = read(json.dumps(status_document(*tiers)).encode())
    assert [(tier.name, tier.used_bytes) for tier in report.tiers] == [("ram", 1)]
