"""What all models of the policy have in common: the base class, the live/structural marks and
cross-field rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from kvtier_operator.api.quantity import (
    MAX_VALUE,
    PATTERN,
    PERCENTAGE_PATTERN,
    Quantity,
    SizeOrPercentage,
)

Path = tuple[str | int, ...]
"""Where in a document: keys and list indexes."""

RFC1123_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
RFC1123_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


class Change(StrEnum):
    """When a changed value takes effect: under a running engine, or with the next pod."""

    LIVE = "live"
    STRUCTURAL = "structural"


LIVE = Change.LIVE
STRUCTURAL = Change.STRUCTURAL


@dataclass(frozen=True, slots=True)
class MapKey:
    """Marks a list that is a map keyed by this field of its items (``x-kubernetes-list-type:
    map``).
    """

    field: str


@dataclass(frozen=True, slots=True)
class Accepts:
    """Describes the values of a field if type and bounds do not: ``must be <words>``."""

    words: str


class ErrorType(StrEnum):
    """Types of field errors, as in ``k8s.io/apimachinery/pkg/util/validation/field``."""

    REQUIRED = "Required value"
    INVALID = "Invalid value"
    NOT_SUPPORTED = "Unsupported value"
    DUPLICATE = "Duplicate value"
    TOO_LONG = "Too long"
    FORBIDDEN = "Forbidden"

    @property
    def has_value(self) -> bool:
        """Whether the message shows the value."""
        return self in (ErrorType.INVALID, ErrorType.NOT_SUPPORTED, ErrorType.DUPLICATE)


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated rule. ``path`` is relative to the model that has the rule. ``detail``: ``must be
    ...``.
    """

    path: Path
    value: object
    detail: str
    type: ErrorType = ErrorType.INVALID


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule over several fields, defined twice: in Python for files and the webhook, in CEL for
    the API server.

    ``check`` yields violations. ``cel`` is true for valid objects. The API server answers
    ``message``, or the value of ``expression`` (CEL), after the path to ``field_path`` below the
    model. A rule that the schema enforces (such as unique keys of a list map) has no ``cel``.
    """

    name: str
    check: Callable[[Any], Iterable[Violation]]
    cel: str | None = None
    message: str = ""
    expression: str | None = None
    field_path: str | None = None

    @property
    def description(self) -> str:
        """The message with the field, for the reference."""
        return (
            f"{self.field_path.removeprefix('.')}: {self.message}"
            if self.field_path
            else self.message
        )


@dataclass(frozen=True, slots=True)
class Scalar:
    """A CEL rule on one value, beside the Python validator of the same field."""

    cel: str
    message: str
    expression: str | None = None


def exactly_one_of(names: tuple[str, ...]) -> str:
    """The detail of a violation."""
    return f"must have exactly one of {', '.join(names)}"


def exactly_one_expression(subject: str, names: tuple[str, ...]) -> str:
    """CEL expression of the same message, with the names that the object has.

    Concatenation only: `join` of a filtered list exceeds the API server's cost budget.
    """
    none = " && ".join(f"!has({subject}.{name})" for name in names)
    given = " + ".join(f"(has({subject}.{name}) ? ' {name}' : '')" for name in names)
    return f"'{exactly_one_of(names)}, got' + ({none} ? ' none' : '') + {given}"


class Model(BaseModel):
    """Base of all models that people write: frozen, camelCase, without unknown fields. Null is the
    same as absent.

    The API server drops a null that the schema does not allow, so both ways to read a policy agree.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel)

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if isinstance(given, dict):
            known = {info.alias or name for name, info in cls.model_fields.items()}
            return {
                key: value for key, value in given.items() if value is not None or key not in known
            }
        return given

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        violations = [violation for rule in self.rules for violation in rule.check(self)]
        if violations:
            raise PydanticCustomError("rules", "rules are violated", {"violations": violations})
        return self


Integer = Annotated[int, Strict()]
"""An integer; not text, not 5.0, not true."""


def _below_maximum(quantity: Quantity) -> Quantity:
    if quantity.value >= MAX_VALUE:
        raise PydanticCustomError("quantity", "too large")
    return quantity


def _positive(quantity: Quantity) -> Quantity:
    if quantity.value <= 0:
        raise PydanticCustomError("quantity", "not above zero")
    return _below_maximum(quantity)


def _not_negative(quantity: Quantity) -> Quantity:
    if quantity.value < 0:
        raise PydanticCustomError("quantity", "below zero")
    return _below_maximum(quantity)


def _quantity_rule(condition: str, words: str) -> Scalar:
    # The grammar is a part of the rule, not a pattern of the schema: one value, one error.
    # Kubernetes reads a larger value as the largest, so the largest is not accepted either.
    return Scalar(
        cel=f"string(self).matches(r'{PATTERN}') && isQuantity(string(self)) && "
        f"quantity(string(self)).{condition} && "
        f"quantity(string(self)).isLessThan(quantity('{MAX_VALUE}'))",
        message=f"must be {words}",
        expression=f"'must be {words}, got ' + string(self)",
    )


POSITIVE_WORDS = "a quantity above zero, such as 64Gi, 500M or a number of bytes"
NOT_NEGATIVE_WORDS = "a quantity of zero or more, such as 1Gi, 500M or a number of bytes"
PositiveQuantity = Annotated[
    Quantity,
    AfterValidator(_positive),
    Accepts(POSITIVE_WORDS),
    _quantity_rule("isGreaterThan(quantity('0'))", POSITIVE_WORDS),
]
NonNegativeQuantity = Annotated[
    Quantity,
    AfterValidator(_not_negative),
    Accepts(NOT_NEGATIVE_WORDS),
    _quantity_rule("compareTo(quantity('0')) >= 0", NOT_NEGATIVE_WORDS),
]
AMOUNT_WORDS = "a percentage from 0% to 99%, or a quantity of zero or more, such as 10% or 50Gi"
Amount = Annotated[
    SizeOrPercentage,
    Accepts(AMOUNT_WORDS),
    Scalar(
        cel=f"string(self).matches(r'{PERCENTAGE_PATTERN}') || "
        f"(string(self).matches(r'{PATTERN}') && isQuantity(string(self)) && "
        "quantity(string(self)).compareTo(quantity('0')) >= 0 && "
        f"quantity(string(self)).isLessThan(quantity('{MAX_VALUE}')))",
        message=f"must be {AMOUNT_WORDS}",
        expression=f"'must be {AMOUNT_WORDS}, got ' + string(self)",
    ),
]

Name = Annotated[
    str,
    Field(min_length=1, max_length=63, pattern=RFC1123_LABEL),
    Accepts(
        "an RFC 1123 label: lower-case letters, digits and -, at most 63, letter or digit at both "
        "ends"
    ),
]
ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=RFC1123_SUBDOMAIN),
    Accepts("the name of a Kubernetes object: lower-case letters, digits, - and ., at most 253"),
]
