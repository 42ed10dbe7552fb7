"""Quantities mean what Kubernetes takes them to mean."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_operator.api.quantity import PATTERN, Quantity, QuantityError


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("1", 1),
        ("+5", 5),
        ("-5", -5),
        ("1Ki", 1024),
        ("1Mi", 1 << 20),
        ("64Gi", 64 << 30),
        ("10Ti", 10 << 40),
        ("1Pi", 1 << 50),
        ("7Ei", 7 << 60),
        ("1k", 1000),
        ("1M", 10**6),
        ("1G", 10**9),
        ("1T", 10**12),
        ("1P", 10**15),
        ("1E", 10**18),
        ("1.5Gi", 3 << 29),
        (".5Ki", 512),
        ("1.", 1),
        ("1E3", 1000),
        ("1e3", 1000),
        ("1e+3", 1000),
        ("5e-1", 1),
        ("1500m", 2),
        ("1000000u", 1),
        ("1n", 1),
        ("0n", 0),
    ],
)
def test_is_read_and_rounded_up_to_whole_bytes(written: int | str, size: int) -> None:
    assert Quantity.parse(written).size_bytes == size


@pytest.mark.parametrize(
    "written",
    [
        "",
        " 1Gi",
        "1 Gi",
        "1gi",
        "1GB",
        "1KB",
        "1K",
        "Gi",
        "1e",
        "1e3Gi",
        "0x10",
        "1_000",
        "١Gi",
        "--1",
        "1..2",
        ".",
        "8Ei",
        "1e99",
        "9" * 65,
    ],
)
def test_an_invalid_quantity_or_one_out_of_range_is_rejected(written: str) -> None:
    with pytest.raises(QuantityError):
        Quantity.parse(written)


@pytest.mark.parametrize("written", [1.5, True, None, [], b"1"])
def test_other_types_are_rejected(written: object) -> None:
    with pytest.raises(QuantityError):
        Quantity.parse(written)  # type: ignore[arg-type]


@given(st.text(alphabet="0123456789.+-KMGTPEinumke", max_size=12))
def test_the_pattern_for_the_api_server_agrees_with_the_parser(text: str) -> None:
    try:
        read = Quantity.parse(text).text == text
    except QuantityError as error:
        # What does not fit 64 bits is a quantity all the same; the pattern cannot know.
        read = "64 bits" in str(error)
    assert read == (re.match(PATTERN, text) is not None)
