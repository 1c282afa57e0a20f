"""What `make soak` judges: something that grows is found, and what only varies is not. The refreshes themselves take too long here."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from tir_dagster_tests.soak import SHOWN, Measure, growing, picture, report

FLAT = Measure(
    seconds=2.0,
    extract_bytes=400_000,
    state_bytes=2_000_000,
    state_files=40,
    history_bytes=0,
    dagster_bytes=0,
    partitions=100,
    memory_bytes=300_000_000,
    hyper_memory_bytes=200_000_000,
)


def measured(count: int = 100, **grows: float) -> list[Measure]:
    """A flat run; some measures grow by so much with each refresh. Histories grow by the same each time anyway."""
    flat = [replace(FLAT, history_bytes=9_000 * at, dagster_bytes=150_000 * at) for at in range(count)]
    return [
        replace(measure, **{name: int(getattr(measure, name) + more * at) for name, more in grows.items()})
        for at, measure in enumerate(flat)
    ]


def test_a_flat_run_has_nothing_that_grows():
    assert growing(measured()) == []
    assert growing(measured(4)) == []


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("extract_bytes", 2_000),
        ("state_bytes", 20_000),
        ("state_files", 1),
        ("partitions", 1),
        ("memory_bytes", 2_000_000),
        ("hyper_memory_bytes", 2_000_000),
    ],
)
def test_what_grows_a_little_with_each_refresh_is_found(name, more):
    (sentence,) = growing(measured(**{name: more}))
    assert sentence.startswith(SHOWN[name][0])


@pytest.mark.parametrize("name", ["history_bytes", "dagster_bytes"])
def test_a_history_grows_by_as_much_each_time_and_not_by_more(name):
    steeper = [replace(measure, **{name: 2_000 * at * at}) for at, measure in enumerate(measured())]
    (sentence,) = growing(steeper)
    assert sentence.startswith(SHOWN[name][0])


def test_the_page_says_how_many_refreshes_there_were():
    first, *table = report(measured(40), 500, []).splitlines()
    assert first.startswith("`make soak REFRESHES=500`")
    assert "40 of 500 refreshes, 20 of 3,000 rows changed before each; nothing grows." in first
    assert "| the extract's file | 0.40 MB | 0.40 MB | 0.40 MB |" in table


def test_the_picture_has_a_line_for_each_measure():
    drawn = ET.fromstring(picture(measured(12)))
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == len(SHOWN)
    assert {len(line.attrib["points"].split()) for line in lines} == {11, 12}
