"""Hints of requests: what clients may ask for, and what they get wrong."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.scheduler.scheduler_testbed import SchedulerTestbed

from kvtier.engines.common.hints import INVALID_HINTS, NO_HINTS, RequestHints
from kvtier.engines.vllm.metrics import KVTierStats
from kvtier.engines.vllm.request_hints import FIELDS, LOG_SECONDS, MAX_PARAMETERS, HintReader

TIERS = ("ram", "disk", "nfs")
ALL: dict[str, Any] = {
    "skip_load": True,
    "skip_store": True,
    "max_load_tokens": 512,
    "tiers": ["ram", "disk"],
    "retain": 3_600,
    "pin": True,
    "ttl_seconds": 60,
    "prefetch": True,
}
READ = RequestHints(
    skip_load=True,
    skip_store=True,
    max_load_tokens=512,
    tiers=frozenset(("ram", "disk")),
    retain_seconds=3_600,
    pin=True,
    ttl_seconds=60,
    prefetch=True,
)


def _request(parameters: object = None, hints: object = None) -> Any:
    return SimpleNamespace(request_id="r", kv_transfer_params=parameters, kv_hints=hints)


def _parameters(values: dict[str, Any]) -> dict[str, Any]:
    return {f"kvtier.{name}": value for name, value in values.items()}


def _envelope(
    payload: object, action_type: object = "kvtier", version: object = "1", times: int = 1
) -> Any:
    action = SimpleNamespace(
        action_id="a", action_type=action_type, action_version=version, payload=payload
    )
    return SimpleNamespace(protocol_version="1", message_id="m", actions=[action] * times)


def _read(request: Any) -> tuple[RequestHints, dict[str, int]]:
    reader = HintReader(lambda: TIERS, lambda: 0.0)
    return reader.read(request), dict(reader.rejected)


def test_every_hint_is_read_from_the_parameters_and_from_the_envelope() -> None:
    assert ALL.keys() == FIELDS.keys()
    assert _read(_request(_parameters(ALL))) == (READ, {})
    assert _read(_request(hints=_envelope(ALL))) == (READ, {})


def test_the_envelope_of_vllm_is_read() -> None:
    protocol = pytest.importorskip(
        "vllm.v1.kv_hints.protocol", reason="this vLLM has no envelope for hints"
    )
    action = protocol.KvHintAction("a", "kvtier", "1", ALL)
    other = protocol.KvHintAction("b", "kvcr.retain", "7", {"skip_load": 3})
    assert _read(_request(hints=protocol.KvHintsEnvelope("1", "m", [other, action]))) == (READ, {})


def test_the_envelope_takes_precedence_over_the_parameters() -> None:
    request = _request(_parameters({"skip_load": True}), _envelope({"skip_store": True}))
    assert _read(request) == (RequestHints(skip_store=True), {})
    assert _read(_request(_parameters(ALL), _envelope({}))) == (NO_HINTS, {})


def test_without_an_action_for_kvtier_the_parameters_are_read() -> None:
    other = _envelope({"skip_store": True}, action_type="retain")
    assert _read(_request(_parameters(ALL), other)) == (READ, {})


def test_keys_of_other_connectors_are_neither_read_nor_changed() -> None:
    theirs = {"do_remote_prefill": True, "remote_block_ids": [1], "max_load_tokens": -1, 7: "x"}
    given_parameters = {**theirs, **_parameters({"skip_load": True})}
    before = dict(given_parameters)
    assert _read(_request(given_parameters)) == (RequestHints(skip_load=True), {})
    assert given_parameters == before
    assert _read(_request(dict(theirs))) == (NO_HINTS, {})


@pytest.mark.parametrize("parameters", [None, {}, [], "kvtier.skip_load", 3, {"kvtier": True}])
def test_parameters_without_hints_are_not_counted(parameters: object) -> None:
    assert _read(_request(parameters)) == (NO_HINTS, {})
    assert _read(SimpleNamespace(request_id="r")) == (NO_HINTS, {})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"skip_load": 1}, "type"),
        ({"skip_store": "true"}, "type"),
        ({"pin": None}, "type"),
        ({"max_load_tokens": True}, "type"),
        ({"max_load_tokens": 512.0}, "type"),
        ({"max_load_tokens": "512"}, "type"),
        ({"max_load_tokens": -1}, "range"),
        ({"max_load_tokens": 1 << 80}, "range"),
        ({"retain": 0}, "range"),
        ({"retain": 7 * 86_400 + 1}, "range"),
        ({"retain": float("nan")}, "type"),
        ({"ttl_seconds": 0}, "range"),
        ({"ttl_seconds": float("inf")}, "type"),
        ({"tiers": "ram"}, "type"),
        ({"tiers": {"ram": 1}}, "type"),
        ({"tiers": ["ram", 3]}, "type"),
        ({"tiers": []}, "range"),
        ({"tiers": ["ram"] * 17}, "range"),
        ({"tiers": [7] * 1_000_000}, "range"),
        ({"tiers": ["ram", "tape"]}, "unknown_tier"),
        ({"skip_loads": True}, "unknown"),
        ({"": True}, "unknown"),
    ],
)
def test_a_wrong_value_makes_all_hints_of_the_request_have_no_effect(
    values: dict[str, Any], reason: str
) -> None:
    for wrong in (values, {"skip_load": True, "retain": 5, **values}):
        expected = INVALID_HINTS if {"tiers", "skip_store"} & wrong.keys() else NO_HINTS
        assert _read(_request(_parameters(wrong))) == (expected, {reason: 1})
        assert _read(_request(hints=_envelope(wrong))) == (expected, {reason: 1})
    # A limit of what is stored that has no effect would be broken.
    for limit in ({"tiers": ["ram"]}, {"skip_store": True}):
        wrong = {**limit, **values}
        assert _read(_request(_parameters(wrong))) == (INVALID_HINTS, {reason: 1})
        assert _read(_request(hints=_envelope(wrong))) == (INVALID_HINTS, {reason: 1})


@pytest.mark.parametrize(
    ("envelope", "reason", "hints"),
    [
        (_envelope(ALL, version="2"), "version", INVALID_HINTS),
        (_envelope({"pin": True}, version="2"), "version", NO_HINTS),
        (_envelope(ALL, version=1), "version", INVALID_HINTS),
        (_envelope(ALL, times=2), "duplicate", INVALID_HINTS),
        (_envelope(None), "type", INVALID_HINTS),
        (_envelope([("skip_load", True)]), "type", INVALID_HINTS),
        (_envelope({3: True}), "type", NO_HINTS),
        (SimpleNamespace(actions=[SimpleNamespace(action_type="kvtier")]), "type", INVALID_HINTS),
    ],
)
def test_a_wrong_action_is_not_replaced_by_the_parameters(
    envelope: Any, reason: str, hints: RequestHints
) -> None:
    request = _request(_parameters(ALL), envelope)
    assert _read(request) == (hints, {reason: 1})


def test_nothing_is_read_from_a_dictionary_that_is_too_large() -> None:
    many = {f"other.{number}": number for number in range(MAX_PARAMETERS)}
    assert _read(_request(many)) == (NO_HINTS, {})
    assert _read(_request({**many, "kvtier.pin": True})) == (NO_HINTS, {"too_many": 1})
    assert _read(_request({**many, "another": 1})) == (NO_HINTS, {})
    many = {**many, "kvtier.tiers": ["ram"]}
    assert _read(_request(many)) == (INVALID_HINTS, {"too_many": 1})


class _Hostile(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no")


def test_objects_that_raise_do_not_reach_the_engine() -> None:
    assert _read(_request(_Hostile(_parameters(ALL)))) == (INVALID_HINTS, {"type": 1})
    assert _read(_request(_Hostile(_parameters({"pin": True})))) == (NO_HINTS, {"type": 1})


@given(
    st.dictionaries(
        st.one_of(st.sampled_from([f"kvtier.{name}" for name in FIELDS]), st.text(max_size=9)),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
            lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
            max_leaves=4,
        ),
    )
)
def test_any_json_is_either_read_or_counted_once(parameters: dict[str, Any]) -> None:
    hints, rejected = _read(_request(parameters))
    assert sum(rejected.values()) <= 1
    if rejected:
        limits = {"kvtier.tiers", "kvtier.skip_store"} & parameters.keys()
        assert hints == (INVALID_HINTS if limits else NO_HINTS)
    assert 0 <= hints.retain_seconds <= 7 * 86_400
    assert hints.tiers is None or hints.tiers <= set(TIERS)


def test_ignored_hints_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    reader = HintReader(lambda: TIERS, lambda: now[0])
    wrong = _request(_parameters({"pin": "x" * 10_000}))
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            reader.read(wrong)
        now[0] += LOG_SECONDS
        reader.read(wrong)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "pin: must be true or false (1 requests" in lines[0]
    assert "(50 requests" in lines[1]
    assert max(map(len, lines)) < 400
    assert reader.rejected == {"type": 51}


def test_ignored_hints_are_counted_in_the_engines_metrics(testbed: SchedulerTestbed) -> None:
    request = testbed.request(300, kv_transfer_params={"kvtier.tiers": ["tape"]})
    testbed.hold(request.keys(0, 4))
    assert testbed.ask(request)
    stats = KVTierStats()
    testbed.scheduler.collect_stats(stats)
    testbed.scheduler.collect_stats(stats)
    assert stats.data["rejected_hints"] == {"unknown_tier": 1}
