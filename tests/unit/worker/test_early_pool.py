"""The host pool is registered early for the connector that comes, or for none."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from tests.unit.worker.worker_testbeds import wait_until

from kvtier.engines.vllm import early_pool


class _Early:
    """A registration that takes until ``release`` to be undone, and then fails."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def abandon(self) -> None:
        self.release.wait(20)
        raise OSError("the device is gone")


def test_an_engine_without_tiers_neither_waits_for_the_device_nor_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    early: Any = _Early()
    monkeypatch.setattr(early_pool, "_started", [early])
    with caplog.at_level(logging.WARNING):
        early_pool.abandon()
        assert early_pool.take() is None
        assert caplog.text == ""
        early.release.set()
        wait_until(lambda: "not undone: the device is gone" in caplog.text)
    early_pool.abandon()
