"""Every invalid policy is rejected with field, value and requirement."""

from __future__ import annotations

import json

import pytest
import yaml
from tests.support.invalid_policies import INVALID, InvalidCase
from tests.support.policies import changed, complete_policy

from kvtier_operator.api.documents import parse


def test_the_complete_policy_is_accepted() -> None:
    (checked,) = parse(yaml.safe_dump(complete_policy()))
    assert checked.errors == ()
    assert checked.policy is not None


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_the_error_has_field_value_and_detail(case: InvalidCase) -> None:
    (checked,) = parse(json.dumps(changed(complete_policy(), case.changes)))
    matching = [error for error in checked.errors if error.field == case.field]
    assert matching, [error.message for error in checked.errors]
    assert case.value[:40] in matching[0].value
    assert case.detail in matching[0].detail


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_it_is_the_only_error(case: InvalidCase) -> None:
    (checked,) = parse(json.dumps(changed(complete_policy(), case.changes)))
    assert len(checked.errors) == 1, [error.message for error in checked.errors]
