"""Label selectors of Kubernetes: model and matching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvtier_operator.api.base import STRUCTURAL, Accepts, ErrorType, Model, Rule, Violation

LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"

LabelKey = Annotated[
    str,
    Field(min_length=1, max_length=317, pattern=LABEL_KEY),
    Accepts("a label key: [prefix/]name, name of at most 63 characters"),
]
LabelValue = Annotated[
    str,
    Field(max_length=63, pattern=LABEL_VALUE),
    Accepts("a label value: at most 63 letters, digits, -, _ and ., as text"),
]


class Operator(StrEnum):
    """Relation between a label key and values."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


def _values_where_needed(requirement: LabelRequirement) -> Iterator[Violation]:
    takes_values = requirement.operator in (Operator.IN, Operator.NOT_IN)
    if takes_values == bool(requirement.values):
        return
    kind = ErrorType.REQUIRED if takes_values else ErrorType.FORBIDDEN
    must = "must be set" if takes_values else "must not be set"
    detail = f"{must} with operator {requirement.operator.value}"
    yield Violation(("values",), requirement.values, detail, kind)


class LabelRequirement(Model):
    """Requirement on a label."""

    key: Annotated[LabelKey, STRUCTURAL, Field(description="Label key.")]
    operator: Annotated[
        Operator, STRUCTURAL, Field(description=("Relation between the key and the values."))
    ]
    values: Annotated[
        list[LabelValue] | None,
        STRUCTURAL,
        Field(max_length=64, description="Values for In and NotIn."),
    ] = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="values-where-needed",
            check=_values_where_needed,
            cel="(self.operator in ['In', 'NotIn']) == "
            "(has(self.values) && self.values.size() > 0)",
            message="values must be set with operator In or NotIn, and only then",
            expression="'values must ' + (self.operator in ['In', 'NotIn'] ? '' : 'not ') + "
            "'be set with operator ' + self.operator",
            field_path=".operator",
        ),
    )


class LabelSelector(Model):
    """Selects pods by labels. All requirements must match."""

    match_labels: Annotated[
        dict[LabelKey, LabelValue] | None,
        STRUCTURAL,
        Field(max_length=64, description="Labels and their values."),
    ] = None
    match_expressions: Annotated[
        list[LabelRequirement] | None,
        STRUCTURAL,
        Field(max_length=64, description="Label requirements. All of them must match."),
    ] = None


SELECTS_EVERYTHING = (
    "selects every pod of the namespace; pods without an engine are skipped and listed in the "
    "status. Set matchLabels to select the engines"
)


def selects_everything(selector: LabelSelector) -> bool:
    """Whether the selector has no requirement, and so matches every pod."""
    return not selector.match_labels and not selector.match_expressions


def matches(selector: LabelSelector, labels: Mapping[str, str]) -> bool:
    """Whether the labels fulfil every condition, as Kubernetes reads them: a selector without any
    matches everything.
    """
    for key, value in (selector.match_labels or {}).items():
        if labels.get(key) != value:
            return False
    return all(_fulfilled(requirement, labels) for requirement in selector.match_expressions or ())


def describe(selector: LabelSelector) -> str:
    """The selector as kubectl's ``--selector`` takes it."""
    parts = [f"{key}={value}" for key, value in (selector.match_labels or {}).items()]
    for each in selector.match_expressions or ():
        values = f" ({', '.join(each.values or ())})"
        match each.operator:
            case Operator.IN:
                parts.append(f"{each.key} in{values}")
            case Operator.NOT_IN:
                parts.append(f"{each.key} notin{values}")
            case Operator.EXISTS:
                parts.append(each.key)
            case Operator.DOES_NOT_EXIST:
                parts.append(f"!{each.key}")
    return ",".join(parts)


def _fulfilled(requirement: LabelRequirement, labels: Mapping[str, str]) -> bool:
    value = labels.get(requirement.key)
    if requirement.operator is Operator.IN:
        return value is not None and value in (requirement.values or ())
    if requirement.operator is Operator.NOT_IN:
        return value is None or value not in (requirement.values or ())
    return (value is not None) == (requirement.operator is Operator.EXISTS)
