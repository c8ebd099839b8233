from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.job.units import (
    format_duration,
    format_memory,
    format_span,
    parse_duration,
    parse_memory,
    parse_nodes,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("48:00:00", 172800),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("2-12:30:15", 217815),
        ("30min", 1800),
        ("1.5h", 5400),
        (" 12 H ", 43200),
        ("45s", 45),
        ("7d", 604800),
    ],
)
def test_durations_as_sbatch_and_people_write_them(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["soon", "-5", "٣", "0", "9999999d"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=f"^invalid .*'{text}'"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512", 512 * 1024**2),
        ("200GB", 200 * 1024**3),
        ("200G", 200 * 1024**3),
        ("1.5TiB", 1536 * 1024**3),
        ("64 kb", 64 * 1024),
        ("1000B", 1024),
        ("1024P", 1024**6),
    ],
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(("text", "size"), [("8GB", 8 * 10**9), ("8GiB", 8 * 1024**3), ("1.5T", 1500 * 10**9)])
def test_amounts_of_memory_in_powers_of_1000(text: str, size: int) -> None:
    assert parse_memory(text, base=1000.0) == size


@pytest.mark.parametrize("text", ["lots", "5i", "0G", "1025P", "9999999P"])
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(ValueError, match=f"^invalid .*'{text}'"):
        parse_memory(text)


@pytest.mark.parametrize(("text", "nodes"), [("4", (4, 4)), ("2:4", (2, 4)), (" 1 ", (1, 1))])
def test_numbers_of_nodes(text: str, nodes: tuple[int, int]) -> None:
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["0", "4:2", "0:4", "-1", "eight", "", "1:", "2:3:4"])
def test_what_is_no_number_of_nodes(text: str) -> None:
    with pytest.raises(ValueError, match=f"^invalid .*'{text}'"):
        parse_nodes(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (2.33e-7, "0.233 us"), (9e-4, "900 us"), (0.0125, "12.5 ms"), (0.9996, "1 s"), (1.254, "1.25 s")],
)
def test_short_times_have_three_digits(seconds: float, text: str) -> None:
    assert format_span(seconds) == text


@given(st.integers(1, 100 * 365 * 86400))
def test_a_duration_survives_being_written(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(1, 2**50))
def test_memory_survives_being_written(kilobytes: int) -> None:
    assert parse_memory(format_memory(kilobytes * 1024)) == kilobytes * 1024


@given(st.text(max_size=40) | st.from_regex(r"[0-9]{1,400}[.:-]?[0-9]{0,400}[smhdkKMGTPiB]{0,3}", fullmatch=True))
def test_any_other_text_gives_a_value_error_and_nothing_else(text: str) -> None:
    for parse in (parse_duration, parse_memory, parse_nodes):
        try:
            assert parse(text)
        except ValueError as error:
            assert str(error).startswith("invalid ")
