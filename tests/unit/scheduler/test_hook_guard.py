"""The guard around hooks: what it returns, and when KVTier is used again."""

from __future__ import annotations

import logging

import pytest

from kvtier.engines.common.rearming import REARM_SECONDS
from kvtier.engines.vllm.hook_guard import HookGuard


class _Bench:
    """A guard whose time a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.counted: list[str] = []
        self.restarts = 0
        self.broken = False
        self.guard = HookGuard(self.counted.append, lambda: self.now)

    def start_over(self) -> None:
        self.restarts += 1
        if self.broken:
            raise RuntimeError("still broken")


def _raise(error: Exception) -> int:
    raise error


def test_results_and_arguments_pass_and_exceptions_give_the_fallback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = _Bench()
    assert bench.guard.guarded("sum", 0, sum, [1, 2], start=3) == 6
    assert (bench.guard.errors, bench.guard.off_reason, bench.counted) == (0, "", [])
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert bench.guard.guarded("hook", 7, _raise, KeyError("k")) == 7
    assert bench.guard.off_reason == "hook: KeyError: 'k'"
    assert (bench.guard.errors, bench.counted) == (2, ["hook", "hook"])
    assert caplog.text.count("unexpected error in hook; serving without tiers for 10 s") == 1
    assert "_raise" in caplog.text, "with the place"


def test_errors_while_it_is_off_do_not_use_up_the_times() -> None:
    bench = _Bench()
    for seconds in REARM_SECONDS:
        for _ in range(3):
            bench.guard.guarded("hook", None, _raise, ValueError())
        assert bench.guard.rearm_at == bench.now + seconds
        bench.now += seconds - 0.001
        assert not bench.guard.rearm(bench.start_over)
        bench.now += 0.001
        assert bench.guard.rearm(bench.start_over)
        assert not bench.guard.rearm(bench.start_over), "it is in use"
    bench.guard.guarded("hook", None, _raise, ValueError())
    bench.now += 1e9
    assert not bench.guard.rearm(bench.start_over)
    assert bench.restarts == len(REARM_SECONDS)


def test_an_error_of_starting_over_is_one_more_error() -> None:
    bench = _Bench()
    bench.guard.guarded("hook", None, _raise, ValueError())
    bench.now += REARM_SECONDS[0]
    bench.broken = True
    assert not bench.guard.rearm(bench.start_over)
    assert bench.guard.off_reason == "rearm: RuntimeError: still broken"
    assert bench.guard.rearm_at == bench.now + REARM_SECONDS[1]
    assert bench.counted == ["hook", "rearm"]


def test_an_engine_that_is_off_for_its_configuration_stays_off() -> None:
    bench = _Bench()
    bench.guard.off_reason = "no topology"
    bench.now += 1e9
    assert not bench.guard.rearm(bench.start_over)
    bench.guard.guarded("hook", None, _raise, ValueError())
    assert bench.guard.off_reason == "no topology"
