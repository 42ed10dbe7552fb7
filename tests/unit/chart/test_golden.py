"""The chart renders what ``golden/`` has, so that a review sees what a change does."""

from __future__ import annotations

import pytest
from tools import chart_golden

pytest.importorskip(
    "helm_python", reason="the chart is rendered by Helm's own code: helm-python-sdk"
)


@pytest.mark.parametrize("case", sorted(chart_golden.cases()))
def test_the_chart_renders_what_was_reviewed(case: str) -> None:
    found = chart_golden.files(case, chart_golden.rendered({}))
    wanted = {path.name: path.read_text() for path in (chart_golden.GOLDEN / case).iterdir()}
    assert sorted(found) == sorted(wanted), f"golden/{case}: run `make generate`"
    for name, text in found.items():
        assert text == wanted[name], f"golden/{case}/{name}: review it, and run `make generate`"
