"""Which version that others have pinned an extract may use: a table of cases, without any file or server."""

from __future__ import annotations

import time

import pytest

from tir_dagster.refresh.state.shared import FRESH_SECONDS, Pin, shared_pin
from tir_dagster.snowflake.versions import SourceVersion

QUIET = 2.0


def version(minute: int) -> str:
    return str(SourceVersion.parse(f"2026-01-01T10:{minute:02}:00+00:00"))


def pin(minute: int, quiet: float = QUIET, age: float = 0.0, **states: str) -> Pin:
    return Pin(states, quiet, version(minute), ("other",), time.time() - age)


@pytest.mark.parametrize(
    ("pins", "states", "after", "expected"),
    [
        ([], {"a": "1"}, None, None),
        ([pin(5, a="1")], {"a": "1"}, None, 5),
        ([pin(5, a="1")], {"a": "2"}, None, None),
        # Its tables changed, or another one is not known.
        ([pin(5, a="1", b="1")], {"a": "1", "b": "2"}, None, None),
        ([pin(5, a="1")], {"a": "1", "b": "1"}, None, None),
        ([pin(5, a="1", b="1")], {"a": "1"}, None, 5),
        # The other table has not changed since an earlier pin; of a later pin nobody knows what was before.
        ([pin(5, a="1"), pin(3, b="1")], {"a": "1", "b": "1"}, None, 5),
        ([pin(5, a="1"), pin(7, b="1")], {"a": "1", "b": "1"}, None, 7),
        ([pin(5, a="1"), pin(3, b="1", age=10 * FRESH_SECONDS)], {"a": "1", "b": "1"}, None, 5),
        ([pin(5, c="1"), pin(3, a="1")], {"a": "1"}, 4, None),
        # The first one, so that all choose the same; but a later one than the extract shows.
        ([pin(6, a="1"), pin(5, a="1")], {"a": "1"}, None, 5),
        ([pin(6, a="1"), pin(5, a="1")], {"a": "1"}, 5, 6),
        ([pin(5, a="1")], {"a": "1"}, 5, None),
        ([pin(5, a="1")], {"a": "1"}, 9, None),
        ([pin(5, quiet=60.0, a="1")], {"a": "1"}, None, None),
        ([pin(5, age=FRESH_SECONDS + 1, a="1")], {"a": "1"}, None, None),
    ],
)
def test_a_pin_is_used_only_while_all_tables_are_as_they_were(pins, states, after, expected):
    confirmed = None if after is None else SourceVersion.parse(version(after))
    used = shared_pin(pins, states, QUIET, after=confirmed)
    assert (used.version if used else None) == (None if expected is None else version(expected))
