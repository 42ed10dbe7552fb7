"""What a command says, however it is written."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.steps import executed_lines

from kvtier_operator.api.pods import Container, decode
from kvtier_operator.injection.command_line import (
    MAX_EXPANDED,
    MAX_TEXT,
    CommandLine,
    expand,
    parse_command_line,
    parse_count,
)
from kvtier_operator.injection.existing_config import python_ignores_path


def read_document(container: dict[str, Any]) -> CommandLine:
    return parse_command_line(decode(container, Container))


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        (
            {"args": ["--a", "1", "--b=2", "--c", "--d_e", "x"]},
            [("a", "1"), ("b", "2"), ("c", ""), ("d-e", "x")],
        ),
        ({"command": ["sh", "-c", "vllm serve m --a 'x y' --b"]}, [("a", "x y"), ("b", "")]),
        (
            {"command": ["sh", "-c", "vllm serve m \\\n  --a 1 \\\n  --b 2"]},
            [("a", "1"), ("b", "2")],
        ),
        (
            {"command": ["sh", "-c", "bash -c 'vllm --a 1' && (vllm --b 2); vllm --c 3;"]},
            [("a", "1"), ("b", "2"), ("c", "3")],
        ),
        ({"command": ["sh", "-c", "vllm --a 'unfinished"]}, [("a", "'unfinished")]),
        (
            {"args": ["$(A)", "${B:-2}"], "env": [{"name": "A", "value": "-tp"}]},
            [("tensor-parallel-size", "2")],
        ),
        ({"args": ["--a", "$$(A)"], "env": [{"name": "A", "value": "1"}]}, [("a", "$$(A)")]),
        ({"env": [{"name": "ARGS", "value": "--a 1"}]}, [("a", "1")]),
        ({"args": ["--a", "1", "--a", "2"]}, [("a", "1"), ("a", "2")]),
        ({}, []),
    ],
)
def test_options_are_found(container: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert list(read_document(container).options) == expected


def test_the_last_of_several_values_wins() -> None:
    assert read_document({"args": ["--a", "1", "--a=2"]}).option("a") == "2"
    assert read_document({"args": ["--a", "1"]}).option("b") is None


def test_a_variable_with_value_from_hides_an_earlier_value() -> None:
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "$(A)"},
        {"name": "A", "valueFrom": {"fieldRef": {}}},
    ]
    assert read_document({"env": env}).variables == {"B": "1"}


def test_recursive_variables_are_cheap_to_expand() -> None:
    env = [{"name": "V0", "value": "--x y " * 1000}]
    env += [{"name": f"V{index}", "value": f"$(V{index - 1})" * 50} for index in range(1, 100)]
    container = decode(
        {"args": ["$(V99)"] * 1000 + ["sh", "-c", "a 'b \"c " * 50_000], "env": env}, Container
    )
    # A few lines for each character; without a bound there are 50 to the power of 99.
    assert executed_lines(lambda: parse_command_line(container)) < 4 * MAX_EXPANDED
    assert len(expand("$A" * 100, {"A": "x" * MAX_TEXT})) < 4 * MAX_TEXT


def test_many_references_to_a_long_variable_use_bounded_memory() -> None:
    env = [{"name": "A", "value": "x" * MAX_TEXT}] + [
        {"name": f"V{index}", "value": "$(A)y"} for index in range(1000)
    ]
    found = read_document({"env": env}).variables
    assert found["V0"] == "x" * MAX_TEXT + "y"
    assert found["V999"] == "$(A)y"
    assert sum(map(len, found.values())) < MAX_EXPANDED + 3 * MAX_TEXT


def test_near_matches_of_patterns_take_linear_time() -> None:
    """Each of these takes hours where every beginning is followed to the end of the text."""
    assert not python_ignores_path(
        CommandLine((("/usr/bin/python3", "-" + "IE" * 2_000_000 + "!"),))
    )
    assert expand("${a:-" * 200_000, {}) == "${a:-" * 200_000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("2147483647", 2147483647),
        ("2147483648", None),
        ("0", None),
        ("-1", None),
        ("9" * 5000, None),
        ("", None),
    ],
)
def test_long_numbers_are_cheap_to_parse(text: str, value: int | None) -> None:
    assert parse_count(text) == value
