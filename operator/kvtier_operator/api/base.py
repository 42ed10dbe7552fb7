"""What all models of the policy have in common: the base class, the live/structural marks and cross-field rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from kvtier_operator.api.quantity import Quantity

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
    """Marks a list that is a map keyed by this field of its items (``x-kubernetes-list-type: map``)."""

    field: str


@dataclass(frozen=True, slots=True)
class Accepts:
    """Says in words what a field takes, where the type and its bounds do not say it well."""

    words: str


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: where (relative to the model that has the rule), the value found, what would be accepted."""

    path: Path
    value: object
    accepted: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule over several fields, stated twice: in Python for files and the webhook, in CEL for the API server.

    ``check`` yields what is wrong. ``cel`` is true for what is accepted; ``message`` (static) or ``expression`` (CEL)
    is what the API server answers, pointing at ``field_path`` below the model. A rule that the schema itself enforces
    (a duplicate key of a list map, say) has no ``cel``.
    """

    name: str
    check: Callable[[Any], Iterable[Violation]]
    cel: str | None = None
    message: str = ""
    expression: str | None = None
    field_path: str | None = None


@dataclass(frozen=True, slots=True)
class Scalar:
    """A CEL rule on one value, beside the Python validator of the same field."""

    cel: str
    message: str
    expression: str | None = None


def found_parts(subject: str, what: str, names: tuple[str, ...]) -> str:
    """CEL text that says which of the optional ``names`` an object has, where exactly one is accepted.

    Plain additions: `join` of a filtered list is beyond the API server's cost budget.
    """
    none = " && ".join(f"!has({subject}.{name})" for name in names)
    given = " + ".join(f"(has({subject}.{name}) ? '{name} ' : '')" for name in names)
    return f"({none} ? 'no {what} ' : '') + {given} + 'is not accepted; accepted is exactly one of {', '.join(names)}'"


class Model(BaseModel):
    """Base of everything a person writes: frozen, camelCase, unknown fields refused, null the same as not written.

    The API server drops a null where the schema does not allow it, so both ways of reading a policy agree.
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
            raise PydanticCustomError("rules", "rules are broken", {"violations": violations})
        return self


Integer = Annotated[int, Strict()]
"""An integer and nothing that merely looks like one: no text, no 5.0, no true."""


def _positive(quantity: Quantity) -> Quantity:
    if quantity.value <= 0:
        raise PydanticCustomError("quantity", "not above zero")
    return quantity


def _not_negative(quantity: Quantity) -> Quantity:
    if quantity.value < 0:
        raise PydanticCustomError("quantity", "below zero")
    return quantity


def _quantity_rule(condition: str, words: str) -> Scalar:
    return Scalar(
        cel=f"isQuantity(string(self)) && quantity(string(self)).{condition}",
        message=f"accepted is {words}",
        expression=f"string(self) + ' is not accepted; accepted is {words}'",
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

Name = Annotated[
    str,
    Field(min_length=1, max_length=63, pattern=RFC1123_LABEL),
    Accepts(
        "an RFC 1123 label: lower-case letters, digits and -, at most 63, letter or digit at both ends"
    ),
]
ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=RFC1123_SUBDOMAIN),
    Accepts("the name of a Kubernetes object: lower-case letters, digits, - and ., at most 253"),
]
