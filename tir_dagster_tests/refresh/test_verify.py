"""Verification that follows the change: what was replaced is read back, sums are brought forward, slices come in turn."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tir_dagster.changes.change_set import ChangeSet, counts_to_json
from tir_dagster.changes.difference import ROW_MARK, Forced
from tir_dagster.changes.plan import SourceState
from tir_dagster.errors import VerificationError
from tir_dagster.hyper.compare import comparing
from tir_dagster.hyper.content import (
    bring_forward,
    content_digest,
    content_digests,
    content_fingerprints,
    content_sums,
    purged_sums,
    sums_from_json,
    sums_to_json,
)
from tir_dagster.hyper.hyperfile import create_extract, odd_keys
from tir_dagster.hyper.replace import ExtractShape, replaced_rows
from tir_dagster.refresh.context import shape_to_json
from tir_dagster.refresh.state.versions import Version
from tir_dagster.refresh.verify import count_odd_keys, slices_in_turn, verify_content, verify_loaded, verify_replaced
from tir_dagster.snowflake.slices import SliceBy
from tir_dagster_tests.hyper.helpers import columns_of, run, stage
from tir_dagster_tests.hyper.replacing import replace_change

COLUMNS = columns_of({"ID": "NUMBER(38,0)", "DAY": "DATE", "NAME": "VARCHAR"})
KEYED = ExtractShape(COLUMNS, ("ID",), SliceBy("DAY", "month"))
ROWS = [
    (1, date(2024, 1, 5), "one"),
    (2, date(2024, 2, 6), "two"),
    (2, date(2024, 2, 6), "two"),
    (None, None, "nobody"),
]
FRESH = [(1, date(2024, 3, 5), "moved"), (None, None, "somebody")]


def replaced(folder: Path, rows: list[Any] = ROWS, fresh: list[Any] = FRESH) -> tuple[Path, Path, ChangeSet, Path]:
    """A base, the base with the fresh rows in place of those of their keys, and the change set between them."""
    base, target, change = folder / "base.hyper", folder / "new.hyper", folder / "change"
    create_extract(base, COLUMNS, stage(folder / "base.parquet", COLUMNS, rows))
    marked = [(*row, 1) for row in fresh]
    with comparing(base, KEYED) as comparison:
        comparison.add(stage(folder / "staged.parquet", [*COLUMNS, ROW_MARK], marked, bookkeeping=False))
        difference = comparison.decide(Forced(), change)
    purged, appended = counts_to_json(difference.purged), counts_to_json(difference.appended)
    digests = difference.purged_digests
    change_set = ChangeSet(
        *(
            "c",
            "e",
            "v",
            "t",
            SourceState("", "", "", ""),
            "changes",
            "incremental",
            None,
            0,
            0,
            purged,
            appended,
            None,
        ),
        odd_keys=(difference.null_keys, difference.repeated_keys),
        purged_digests=None
        if digests is None
        else {name: str(digest) for name, digest in counts_to_json(digests).items()},
    )
    replace_change(base, target, change_set, change, KEYED)
    return base, target, change_set, change


@pytest.mark.parametrize("rows", [ROWS, ROWS[:2]], ids=["odd before", "none odd before"])
def test_odd_keys_are_counted_from_the_change_where_there_were_none_before(tmp_path: Path, rows: list[Any]):
    fresh = [*FRESH, (3, None, "three"), (3, None, "three")]
    base, target, change_set, _ = replaced(tmp_path, rows, fresh)
    kept = odd_keys(base, KEYED.key, COLUMNS)
    version = Version(1, tmp_path, {"odd_keys": list(kept)})
    assert kept == ((0, 0) if rows == ROWS[:2] else (1, 1))
    assert count_odd_keys(target, change_set, version, KEYED) == odd_keys(target, KEYED.key, COLUMNS)


def test_what_was_replaced_is_read_back(tmp_path: Path):
    _, target, change_set, change = replaced(tmp_path)

    verify_replaced(target, change_set, change, KEYED)


@pytest.mark.parametrize(
    "damage",
    [
        'DELETE FROM "Extract"."Extract" WHERE "ID" = 1',
        """UPDATE "Extract"."Extract" SET "NAME" = 'other' WHERE "ID" IS NULL""",
        """INSERT INTO "Extract"."Extract" VALUES (NULL, NULL, 'somebody')""",
    ],
    ids=["lost", "changed", "doubled"],
)
def test_a_replaced_row_that_is_not_as_it_was_read_stops_the_refresh(tmp_path: Path, damage):
    _, target, change_set, change = replaced(tmp_path)
    run(target, damage)

    with pytest.raises(
        VerificationError, match=r"does not hold the rows that were read, of 1 keys\. Nothing was published"
    ):
        verify_replaced(target, change_set, change, KEYED)


def test_a_key_that_was_deleted_must_be_gone(tmp_path: Path):
    base, _, change_set, change = replaced(tmp_path)

    with pytest.raises(VerificationError, match="of 2 keys"):
        verify_replaced(base, change_set, change, KEYED)


def test_rows_of_other_keys_are_not_looked_at(tmp_path: Path):
    _, target, change_set, change = replaced(tmp_path)
    run(target, """UPDATE "Extract"."Extract" SET "NAME" = 'other' WHERE "ID" = 2""")

    verify_replaced(target, change_set, change, KEYED)


def test_a_file_that_was_loaded_anew_has_the_rows_that_were_read(tmp_path: Path):
    base, _, change_set, _ = replaced(tmp_path)
    sums = content_sums(base, KEYED)

    with pytest.raises(VerificationError, match="does not hold the rows that were read"):
        verify_loaded(sums, change_set, KEYED)


def test_what_the_detection_has_summed_up_is_not_read_again(tmp_path: Path):
    rows = [*ROWS, *((number, date(2024, 5, 1), "other") for number in range(10, 20))]
    base, target, change_set, change = replaced(tmp_path, rows)
    manifest = {"content_sums": sums_to_json(content_sums(base, KEYED)), "shape": shape_to_json(KEYED)}
    expected = content_sums(target, KEYED)
    base.unlink()

    assert verify_content(target, change_set, Version(1, tmp_path / "v", manifest), KEYED, change) == expected


def test_of_another_base_the_rows_that_left_are_read(tmp_path: Path):
    base, target, change_set, change = replaced(tmp_path)
    manifest = {"content_sums": sums_to_json(content_sums(base, KEYED)), "shape": shape_to_json(KEYED)}
    (tmp_path / "v1").mkdir()
    base.rename(tmp_path / "v1" / "extract.hyper")
    wrong = replace(change_set, purged_digests={"2024-01": "5"})

    sums = verify_content(target, wrong, Version(1, tmp_path / "v1", manifest), KEYED, change)

    assert sums == content_sums(target, KEYED)


VALUES = st.tuples(
    st.sampled_from([1, 2, None]),
    st.sampled_from([date(2024, 1, 1), date(2024, 2, 1), None]),
    st.sampled_from(["a", None]),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(VALUES, max_size=5), fresh=st.lists(VALUES, min_size=1, max_size=4))
def test_sums_that_are_brought_forward_are_those_of_the_file(tmp_path_factory, rows, fresh):
    base, target, change_set, change = replaced(tmp_path_factory.mktemp("sums"), rows, fresh)
    condition = replaced_rows(change_set, change, KEYED)
    purged, appended = (content_sums(file, KEYED, condition) for file in (base, target))
    sums = purged_sums(change_set)
    assert sums is None or sums == purged, "the detection has summed up the same rows"
    assert verify_replaced(target, change_set, change, KEYED) == appended

    after = bring_forward(sums_from_json(sums_to_json(content_sums(base, KEYED))), purged=purged, appended=appended)

    assert after == content_sums(target, KEYED)
    assert content_digest(after) == content_digests(content_fingerprints(target, KEYED), KEYED)[0]


def test_slices_come_in_turn_those_never_compared_first():
    verified = {"2024-01": "2026-05-01", "2024-02": "2026-04-01"}

    assert slices_in_turn(verified, ["2024-01", "2024-02", "2024-03"], 2) == ["2024-03", "2024-02"]
    assert slices_in_turn(verified, ["2024-01"], 0) == []


def test_every_slice_has_its_turn_within_as_many_refreshes_as_there_are_slices():
    names, verified = [f"2024-{month:02}" for month in range(1, 13)], {}
    for refresh in range(len(names)):
        for name in slices_in_turn(verified, names, 1):
            verified[name] = f"2026-01-{refresh + 1:02}"
    assert sorted(verified) == names
