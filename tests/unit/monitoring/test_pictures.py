"""Pictures of panels are SVG with the data, whatever the data is."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from tools.monitoring.on_call import ON_CALL
from tools.monitoring.operator_board import OPERATOR
from tools.monitoring.pictures import PLOT, Series, format_value, legend, picture

SVG = "{http://www.w3.org/2000/svg}"


def drawn(series: list[Series]) -> ElementTree.Element:
    data = {panel.title: series for panel in ON_CALL.panels()}
    return ElementTree.fromstring(picture(ON_CALL, data))


def test_every_panel_with_data_is_drawn_and_no_other() -> None:
    lines = [Series("ram", tuple((float(time), time / 3) for time in range(100)))]
    root = drawn(lines)
    texts = [each.text for each in root.iter(f"{SVG}text")]
    for panel in ON_CALL.panels():
        assert panel.title in texts
    assert "no such panel" not in texts
    one = next(iter(ON_CALL.panels())).title
    root = ElementTree.fromstring(picture(ON_CALL, {one: lines}))
    titles = {panel.title for panel in ON_CALL.panels()}
    assert titles & {each.text for each in root.iter(f"{SVG}text")} == {one}


@pytest.mark.parametrize(
    "points",
    [
        ((0.0, 0.0),),
        ((0.0, 5.0), (0.0, 5.0)),
        ((0.0, -1.0), (1.0, -2.0)),
        tuple((float(each), 1e12) for each in range(1000)),
    ],
)
def test_flat_short_negative_and_long_data(points: tuple[tuple[float, float], ...]) -> None:
    root = drawn([Series(f"<{index}>&", points) for index in range(9)])
    for each in root.iter(f"{SVG}path"):
        assert "nan" not in each.get("d", "")
        assert "inf" not in each.get("d", "")
    assert len(ElementTree.tostring(root)) < 200_000


def test_a_line_goes_where_the_values_go() -> None:
    panel = next(panel for panel in OPERATOR.panels() if not panel.single and not panel.stacked)
    rising = Series("x", ((0.0, 0.0), (10.0, 4.0)))
    root = ElementTree.fromstring(picture(OPERATOR, {panel.title: [rising]}))
    (line,) = [each for each in root.iter(f"{SVG}path") if each.get("stroke-width") == "1.6"]
    start, end = line.get("d", "").removeprefix("M").split("L")
    (x0, y0), (x1, y1) = (map(float, each.split()) for each in (start, end))
    assert x1 > x0
    assert y1 < y0, "SVG counts from the top"
    assert math.isclose(y0 - y1, PLOT[3], abs_tol=0.2)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.5, "percentunit", "50%"),
        (0.0, "percentunit", "0%"),
        (1536.0, "bytes", "1.5 KiB"),
        (1 << 30, "Bps", "1 GiB/s"),
        (0.0125, "s", "12 ms"),
        (2.0, "s", "2 s"),
        (0.0, "s", "0 s"),
        (3e-5, "s", "30 µs"),
        (12345.0, "short", "12.3k"),
        (0.25, "cps", "0.25/s"),
    ],
)
def test_values(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


def test_names_of_series() -> None:
    assert legend("{{tier}} {{ reason }}", {"tier": "ram", "reason": "late"}) == "ram late"
    assert legend("{{none}}", {}) == ""
    assert legend("", {"tier": "ram"}) == ""
    assert legend("{{model_name}}", {"model_name": "/tmp/x/model"}) == "model"
