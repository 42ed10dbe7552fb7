"""Kubernetes quantities: `64Gi`, `500M`, `1.5Ti`, `2e9`, `4096`.

The grammar is that of `k8s.io/apimachinery/pkg/api/resource`: a signed decimal number and either a
binary suffix (Ki, Mi, Gi, Ti, Pi, Ei), a decimal one (n, u, m, none, k, M, G, T, P, E) or an
exponent (e or E and an integer). `1E` is an exa, `1E3` a thousand.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

MAX_TEXT = 64
"""Longest text that is parsed. The longest useful one has 19 digits and a suffix; CEL needs a
bound."""
MAX_VALUE = (1 << 63) - 1
"""Kubernetes stores sizes in signed 64-bit integers."""
PATTERN = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$"

_PARTS = re.compile(
    r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?[0-9]{1,2}))?",
    re.ASCII,
)
_BINARY = {f"{letter}i": Fraction(1024) ** power for power, letter in enumerate("KMGTPE", start=1)}
_DECIMAL = {letter: Fraction(1000) ** power for power, letter in enumerate("kMGTPE", start=1)}
_SMALL = {"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000)}
_SUFFIXES = {**_BINARY, **_DECIMAL, **_SMALL}


class QuantityError(ValueError):
    """The text is not a quantity, or exceeds 64 bits."""


@lru_cache(maxsize=4096)
def _value(text: str) -> Fraction:
    """Kept, because a cluster writes the same few hundred again and again, and each admission reads
    some thirty.
    """
    match = _PARTS.fullmatch(text)
    if match is None:
        raise QuantityError("not a quantity")
    number, suffix, exponent = match.groups()
    scale = Fraction(10) ** int(exponent) if exponent else _SUFFIXES.get(suffix, Fraction(1))
    value = Fraction(number) * scale
    if abs(value) > MAX_VALUE:
        raise QuantityError("does not fit 64 bits")
    return value


class _Written(ABC):
    """A value that documents give as text or a number, and that is written back as it was."""

    __slots__ = ()

    @classmethod
    @abstractmethod
    def parse(cls, written: int | str) -> Self:
        """Parses a value of a document. Raises ``QuantityError``."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        def validate(given: Any) -> Any:
            if isinstance(given, cls):
                return given
            try:
                return cls.parse(given)
            except QuantityError as error:
                raise PydanticCustomError("quantity", "{why}", {"why": str(error)}) from None

        return core_schema.no_info_plain_validator_function(
            validate, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


@dataclass(frozen=True, slots=True)
class Quantity(_Written):
    """A quantity as written (``text``) and its exact value. Two are equal when both agree."""

    text: str
    value: Fraction

    @classmethod
    def parse(cls, written: int | str) -> Quantity:
        """Parses a value of a document. Raises ``QuantityError``."""
        if isinstance(written, bool) or not isinstance(written, int | str):
            raise QuantityError("not an integer or a string")
        text = str(written)
        if len(text) > MAX_TEXT:
            raise QuantityError("not a quantity")
        return cls(text=text, value=_value(text))

    @property
    def size_bytes(self) -> int:
        """The value as whole bytes, rounded up as Kubernetes does."""
        return -(-self.value.numerator // self.value.denominator)

    def __str__(self) -> str:
        return self.text


PERCENTAGE_PATTERN = r"^[1-9]?[0-9]%$"
_PERCENTAGE = re.compile(PERCENTAGE_PATTERN, re.ASCII)


@dataclass(frozen=True, slots=True)
class SizeOrPercentage(_Written):
    """A size or a percentage from 0% to 99%, as written (``text``). One of both is None."""

    text: str
    size: Quantity | None
    percent: int | None

    @classmethod
    def parse(cls, written: int | str) -> SizeOrPercentage:
        """Parses a value of a document. Raises ``QuantityError``."""
        if isinstance(written, str) and _PERCENTAGE.fullmatch(written):
            return cls(written, None, int(written[:-1]))
        size = Quantity.parse(written)
        if not 0 <= size.value < MAX_VALUE:
            raise QuantityError("below zero or too large")
        return cls(size.text, size, None)

    @property
    def size_bytes(self) -> int:
        """The size; 0 if this is a percentage."""
        return 0 if self.size is None else self.size.size_bytes

    def __str__(self) -> str:
        return self.text
