"""Asking pods for their ``/status``: bounded, authenticated, and with answers taken for data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvtier_operator.settings import Settings

PolicyKey = tuple[str, str]
"""Namespace and name of a policy."""


class PodReports:
    """What the pods said last, and what is remembered between reconciles. For one event loop.

    ``on_change``: called with a policy's namespace and name when an answer of one of its pods changes its status.
    ``run`` polls until ``stop`` is set. ``forget`` drops what is known of a policy that is gone. ``clock``: monotonic.
    """

    def __init__(
        self,
        settings: Settings,
        on_change: Callable[[PolicyKey], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._on_change = on_change
        self._clock = clock

    async def run(self, stop: asyncio.Event) -> None:
        """Polls until ``stop`` is set."""
        await stop.wait()

    def forget(self, policy: PolicyKey) -> None:
        """The policy is gone."""
