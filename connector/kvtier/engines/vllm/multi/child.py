"""One child connector, and the guard through which every call to it goes.

vLLM ends the engine if a hook raises. An exception of a child is logged and counted, and the child
loads nothing for a while; the other children and the engine do not notice.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from kvtier.engines.vllm.multi.settings import ChildSpec

logger = logging.getLogger(__name__)

SUSPEND_SECONDS = (10.0, 60.0, 360.0)
"""After an exception a child loads nothing for this long: the first time, the second and the third.
After the fourth it loads nothing until the engine restarts."""
OLD_PREEMPTION_PARAMETER = "preempted_req_ids"
"""Until vLLM 0.16 ``handle_preemptions`` received the ids of the preempted requests."""
LOAD_HOOKS = frozenset(
    {
        "bind_connector_metadata",
        "get_block_ids_with_load_errors",
        "get_finished",
        "get_transfer_results",
        "handle_preemptions",
        "start_load_kv",
        "wait_for_layer_load",
    }
)
"""Worker-side hooks after whose exception it is unknown what was loaded."""
T = TypeVar("T")


class ChildConnector:
    """One child on one side of the engine. ``clock``: monotonic, in seconds."""

    def __init__(self, spec: ChildSpec, connector: Any, clock: Callable[[], float]) -> None:
        self.spec = spec
        self.connector = connector
        """None if it could not be created or started."""
        self.errors: Counter[str] = Counter()
        """Exceptions by hook since they were last taken."""
        self.raised = 0
        """All exceptions so far."""
        self.load_errors = 0
        """Those in ``LOAD_HOOKS``."""
        self.must_reset = False
        """A reset of its cache failed, so what it holds may be stale."""
        self._clock = clock
        self._suspensions = 0
        self._usable_at = -math.inf
        self._logged: set[str] = set()
        self.takes_request_ids = takes_request_ids(connector)

    @property
    def name(self) -> str:
        """The label of its metrics."""
        return self.spec.name

    def call(self, hook: str, fallback: T, *arguments: Any, **named: Any) -> T:
        """Returns what the connector's hook returns.

        ``fallback`` if it raises, if this release of the connector lacks it, or if there is no
        connector.
        """
        return self.read(hook, _unchanged, fallback, *arguments, **named)

    def read(
        self,
        hook: str,
        reader: Callable[[Any], T],
        fallback: T,
        *arguments: Any,
        **named: Any,
    ) -> T:
        """Like ``call``; returns what ``reader`` makes of the answer. An answer that it cannot read
        counts as an exception of the hook."""
        try:
            method = getattr(self.connector, hook, None)
            if method is None:
                return fallback
            return reader(method(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - vLLM would end the engine
            self.note(hook, error)
            return fallback

    def flag(self, name: str) -> bool:
        """Returns a property of the connector. False if it raises, or if there is none."""
        try:
            return bool(getattr(self.connector, name, False))
        except Exception as error:  # noqa: BLE001 - vLLM would end the engine
            self.note(name, error)
            return False

    def start(self, hook: str, *arguments: Any, **named: Any) -> Any:
        """Like ``call`` while the engine starts: an exception of a required child is raised."""
        if not self.spec.required:
            return self.call(hook, None, *arguments, **named)
        method = getattr(self.connector, hook, None)
        return None if method is None else method(*arguments, **named)

    def note(self, hook: str, error: Exception) -> None:
        """Counts an exception, and logs the first one of a hook."""
        self.errors[hook] += 1
        self.raised += 1
        self.load_errors += hook in LOAD_HOOKS
        if hook not in self._logged:
            self._logged.add(hook)
            logger.error(
                "KVTier: connector %s raised in %s: the engine goes on without its answer",
                self.name,
                hook,
                exc_info=error,
            )

    def suspend(self) -> None:
        """Loads nothing for a while, longer each time. Repeats during a suspension are one."""
        if self.connector is None:
            return
        now = self._clock()
        if now < self._usable_at:
            return
        known = self._suspensions < len(SUSPEND_SECONDS)
        seconds = SUSPEND_SECONDS[self._suspensions] if known else math.inf
        self._suspensions += 1
        self._usable_at = now + seconds
        logger.warning(
            "KVTier: connector %s loads nothing %s after an exception",
            self.name,
            f"for {seconds:g} s" if known else "until the engine restarts",
        )

    def turn_off(self, reason: str) -> None:
        """Uses the child no more, until the engine restarts."""
        if self.connector is None:
            return
        logger.error("KVTier: connector %s is off until the engine restarts: %s", self.name, reason)
        self.call("shutdown", None)
        self.connector = None

    @property
    def may_load(self) -> bool:
        """Whether the child is asked for loads."""
        if self.connector is None or self.must_reset:
            return False
        return self._clock() >= self._usable_at

    def take_errors(self) -> Counter[str]:
        """Returns the exceptions since the last call."""
        errors, self.errors = self.errors, Counter()
        return errors


def _unchanged(answer: Any) -> Any:
    return answer


def takes_request_ids(connector: Any) -> bool:
    """Returns whether ``handle_preemptions`` of a connector has the old signature."""
    method = getattr(connector, "handle_preemptions", None)
    if method is None:
        return False
    try:
        names = list(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return False
    return bool(names) and names[0] == OLD_PREEMPTION_PARAMETER
