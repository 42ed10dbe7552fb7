"""``docs/troubleshooting.md`` explains every reason of conditions, skipped pods and Events."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

import pytest

from kvtier_operator.api import conditions
from kvtier_operator.api.conditions import EventReason, Reason, SkipReason

PAGE = Path(__file__).resolve().parents[3] / "docs" / "troubleshooting.md"
TABLES = re.findall(r"^\| reason \|.*\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
EXPLAINED = {
    word
    for table in TABLES
    for row in re.findall(r"^\| (`[^|]*)\|", table, re.MULTILINE)
    for word in re.findall(r"`(\w+)`", row)
}


@pytest.mark.parametrize("reasons", [Reason, EventReason, SkipReason, conditions.PolicyReason])
def test_every_reason_in_code_is_in_a_table(reasons: type[StrEnum]) -> None:
    assert sorted({each.value for each in reasons} - EXPLAINED) == []


def test_every_reason_in_the_tables_is_in_code() -> None:
    known = {
        each.value
        for reasons in (Reason, EventReason, SkipReason, conditions.PolicyReason)
        for each in reasons
    }
    assert sorted(EXPLAINED - known) == []
