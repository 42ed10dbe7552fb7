"""Reads the hints of vLLM's requests.

A request has hints in ``Request.kv_hints``, where vLLM has that: an action of type ``kvtier`` and
version ``1``, with the hints as its payload. Otherwise, or without such an action, they are the
keys of ``kv_transfer_params`` that begin with ``kvtier.``. Other actions and keys belong to other
connectors: they are not looked at, and nothing is changed.

A client wrote the values, so nothing here raises. If one of them is wrong, none of the request's
hints has an effect: the request is served like one without hints, which is counted by reason. If
there is a hint among them that limits what is stored, nothing of the request is stored.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.engines.common.hints import INVALID_HINTS, NO_HINTS, RequestHints

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

PREFIX = "kvtier."
ACTION_TYPE = "kvtier"
ACTION_VERSION = "1"
MAX_PARAMETERS = 256
"""Keys of a dictionary, and actions of an envelope. Nothing is read from larger ones."""
MAX_TOKENS = 1 << 30
MAX_RETAIN_SECONDS = 7 * 86_400
MAX_TTL_SECONDS = 365 * 86_400
MAX_TIERS = 16
LOG_SECONDS = 60.0
"""Between two lines about hints that are ignored."""


class InvalidHintError(ValueError):
    """A hint is not valid. ``reason``: the label value of ``rejected_hints``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidHintError("type", f"{name}: must be true or false")
    return value


@dataclass(frozen=True, slots=True)
class _Integer:
    """A whole number from ``least`` to ``most``."""

    least: int
    most: int

    def __call__(self, name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidHintError("type", f"{name}: must be a whole number")
        if not self.least <= value <= self.most:
            raise InvalidHintError("range", f"{name}: must be from {self.least} to {self.most}")
        return int(value)


def _names(name: str, value: object) -> frozenset[str]:
    if not isinstance(value, list | tuple):
        raise InvalidHintError("type", f"{name}: must be a list of names of tiers")
    if not 1 <= len(value) <= MAX_TIERS:
        raise InvalidHintError("range", f"{name}: must have from 1 to {MAX_TIERS} names")
    if not all(isinstance(each, str) for each in value):
        raise InvalidHintError("type", f"{name}: must be a list of names of tiers")
    return frozenset(value)


FIELDS: Mapping[str, tuple[str, Callable[[str, object], Any]]] = {
    "skip_load": ("skip_load", _boolean),
    "skip_store": ("skip_store", _boolean),
    "max_load_tokens": ("max_load_tokens", _Integer(0, MAX_TOKENS)),
    "tiers": ("tiers", _names),
    "retain": ("retain_seconds", _Integer(1, MAX_RETAIN_SECONDS)),
    "pin": ("pin", _boolean),
    "ttl_seconds": ("ttl_seconds", _Integer(1, MAX_TTL_SECONDS)),
    "prefetch": ("prefetch", _boolean),
}
"""Names of hints, without the prefix: the field of ``RequestHints``, and what checks a value."""
LIMITS_OF_STORES = ("skip_store", "tiers")
"""Hints without which a request would be stored where it must not be."""


def parse_hints(values: Mapping[str, object], tiers: Collection[str]) -> RequestHints:
    """Returns the hints with these values by name, without the prefix.

    ``tiers``: the names of the policy's tiers. Raises ``InvalidHintError``.
    """
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if name not in FIELDS:
            raise InvalidHintError("unknown", f"{name[:64]!r}: no such hint")
        field, check = FIELDS[name]
        fields[field] = check(name, value)
    hints = RequestHints(**fields)
    unknown = (hints.tiers or frozenset()).difference(tiers)
    if unknown:
        name = min(unknown)[:64]
        raise InvalidHintError("unknown_tier", f"tiers: {name!r} is no tier of this engine")
    return hints


class HintReader:
    """Reads the hints of one engine's requests. The scheduler's thread only.

    ``tiers``: returns the names of the policy's tiers.
    """

    def __init__(self, tiers: Callable[[], Collection[str]], clock: Callable[[], float]) -> None:
        self.rejected: Counter[str] = Counter()
        """Requests whose hints were ignored, by reason, since the counts were last taken."""
        self._tiers = tiers
        self._clock = clock
        self._unlogged = 0
        self._log_at = float("-inf")

    def read(self, request: Request) -> RequestHints:
        """Returns a request's hints. Never raises."""
        try:
            values = _from_envelope(getattr(request, "kv_hints", None))
            if values is None:
                values = _from_parameters(getattr(request, "kv_transfer_params", None))
            return parse_hints(values, self._tiers()) if values else NO_HINTS
        except InvalidHintError as error:
            self._reject(request, error.reason, str(error))
        except Exception as error:  # noqa: BLE001 - a client's objects may do anything
            self._reject(request, "type", type(error).__name__)
        return INVALID_HINTS if _may_limit_stores(request) else NO_HINTS

    def _reject(self, request: Request, reason: str, message: str) -> None:
        self.rejected[reason] += 1
        self._unlogged += 1
        now = self._clock()
        if now < self._log_at:
            return
        logger.warning(
            "KVTier: ignoring the hints of request %s: %s (%d requests since the last such line)",
            str(request.request_id)[:128],
            message,
            self._unlogged,
        )
        self._unlogged, self._log_at = 0, now + LOG_SECONDS


def _may_limit_stores(request: Request) -> bool:
    """Whether hints that could not be read limit what is stored, or may do so."""
    try:
        actions = getattr(getattr(request, "kv_hints", None), "actions", None)
        if isinstance(actions, list | tuple):
            payloads = [
                getattr(action, "payload", None)
                for action in actions[:MAX_PARAMETERS]
                if getattr(action, "action_type", None) == ACTION_TYPE
            ]
            if payloads:
                return any(
                    not isinstance(payload, dict) or not payload.keys().isdisjoint(LIMITS_OF_STORES)
                    for payload in payloads
                )
        parameters = getattr(request, "kv_transfer_params", None)
        return not isinstance(parameters, dict) or any(
            PREFIX + name in parameters for name in LIMITS_OF_STORES
        )
    except Exception:  # noqa: BLE001 - a client's objects may do anything
        return True


def _from_envelope(envelope: object) -> dict[str, object] | None:
    """Returns the payload of the envelope's action; None without one."""
    actions = getattr(envelope, "actions", None)
    if not isinstance(actions, list | tuple):
        return None
    found: dict[str, object] | None = None
    for action in actions[:MAX_PARAMETERS]:
        if getattr(action, "action_type", None) != ACTION_TYPE:
            continue
        if found is not None:
            raise InvalidHintError("duplicate", f"more than one action of type {ACTION_TYPE}")
        if action.action_version != ACTION_VERSION:
            raise InvalidHintError("version", f"action_version: must be {ACTION_VERSION!r}")
        payload = action.payload
        if not isinstance(payload, dict) or not all(isinstance(key, str) for key in payload):
            raise InvalidHintError("type", "payload: must be an object")
        found = payload
    return found


def _from_parameters(parameters: object) -> dict[str, object]:
    """Returns the values of the keys with the prefix, without it."""
    if not isinstance(parameters, dict) or not parameters:
        return {}
    if len(parameters) > MAX_PARAMETERS:
        if any(PREFIX + name in parameters for name in FIELDS):
            raise InvalidHintError("too_many", f"more than {MAX_PARAMETERS} parameters")
        return {}
    return {
        name[len(PREFIX) :]: value
        for name, value in parameters.items()
        if isinstance(name, str) and name.startswith(PREFIX)
    }
