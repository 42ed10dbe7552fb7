"""Every reason that a person can meet is explained."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

import pytest

from kvtier_operator.api import conditions
from kvtier_operator.api.conditions import EventReason, Reason, SkipReason

PAGE = Path(__file__).resolve().parents[3] / "docs" / "troubleshooting.md"
EXPLAINED = {
    word
    for row in re.findall(r"^\| (`[^|]*)\|", PAGE.read_text(), re.MULTILINE)
    for word in re.findall(r"`(\w+)`", row)
}


@pytest.mark.parametrize("reasons", [Reason, EventReason, SkipReason, conditions.PolicyReason])
def test_every_reason_in_code_is_in_the_table(reasons: type[StrEnum]) -> None:
    assert sorted({each.value for each in reasons} - EXPLAINED) == []


def test_the_table_explains_nothing_that_does_not_exist() -> None:
    known = {
        each.value
        for reasons in (Reason, EventReason, SkipReason, conditions.PolicyReason)
        for each in reasons
    }
    assert sorted(EXPLAINED - known) == []
