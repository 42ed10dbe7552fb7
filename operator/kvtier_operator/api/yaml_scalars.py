"""Plain scalars of YAML, read as kubectl and the API server read them. Pure.

Both use go-yaml 2, which knows YAML 1.1 without base 60 and YAML 1.2's octal numbers, and then pass
JSON on: a float without a fraction, such as ``1e3``, arrives as an integer, and an integer of more
than 64 bits as a float. What looks like a date stays text.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

Scalar = None | bool | int | float | str
TRUE = frozenset({"y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"})
FALSE = frozenset({"n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"})
NULL = frozenset({"", "~", "null", "Null", "NULL"})
_FLOATS = {
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **{f"{sign}.{text}": math.inf for sign in ("", "+") for text in ("inf", "Inf", "INF")},
    **{f"-.{text}": -math.inf for text in ("inf", "Inf", "INF")},
}
_INTEGER = re.compile(r"([-+]?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0[oO]?([0-7]+)|(0|[1-9][0-9]*))")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_FRACTION = re.compile(r"\.[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+(?:_[0-9]+)*)?")
"""Elsewhere underscores may be anywhere; after a leading dot only between digits."""
_MAX_UNSIGNED = (1 << 64) - 1
_MIN_SIGNED, _MAX_SIGNED = -(1 << 63), (1 << 63) - 1
MAX_DIGITS = 512
"""A longer number is text here; its value would be out of every field's range."""


def parse_scalar(text: str) -> Scalar:
    """The value of a plain scalar."""
    if text in NULL:
        return None
    if text in TRUE or text in FALSE:
        return text in TRUE
    if text in _FLOATS:
        return _FLOATS[text]
    if text[0] not in "+-.0123456789" or len(text) > MAX_DIGITS:
        return text
    if text[0] == "." and _FRACTION.fullmatch(text) is None:
        return text
    plain = text.replace("_", "")
    integer = _INTEGER.fullmatch(plain)
    if integer is not None:
        value = _integer(integer)
        if _MIN_SIGNED <= value <= _MAX_UNSIGNED:
            return as_json(value)
    if _FLOAT.fullmatch(plain) is not None:
        number = float(plain)
        if math.isfinite(number):
            return as_json(number)
    return text


def as_json(number: float) -> int | float:
    """A number as it arrives through JSON: an integer if it has no fraction and fits 64 bits."""
    if not math.isfinite(number):
        return number
    if isinstance(number, float) and not number.is_integer():
        return number
    # Of a float the fewest digits are sent that identify it, and then zeros.
    digits = int(Decimal(repr(number)))
    return digits if _MIN_SIGNED <= digits <= _MAX_SIGNED else float(number)


def _integer(found: re.Match[str]) -> int:
    sign = -1 if found[1] == "-" else 1
    for digits, base in ((found[2], 16), (found[3], 2), (found[4], 8), (found[5], 10)):
        if digits is not None:
            return sign * int(digits, base)
    return 0
