"""New versions without a copy of the base: an older file that nobody needs is brought forward by what was replaced since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tir_dagster.changes.change_set import ChangeSet
from tir_dagster.changes.difference import ROW_MARK
from tir_dagster.changes.plan import SourceState
from tir_dagster.hyper.hyperfile import create_extract
from tir_dagster.hyper.replace import ExtractShape
from tir_dagster.refresh import apply
from tir_dagster.refresh.context import shape_to_json
from tir_dagster.refresh.state import versions
from tir_dagster.refresh.state.versions import Version, VersionStore
from tir_dagster.snowflake.slices import SliceBy
from tir_dagster_tests.hyper.helpers import bag, columns_of, run, stage

COLUMNS = columns_of({"ID": "NUMBER(38,0)", "DAY": "DATE", "NAME": "VARCHAR"})
SHAPE = ExtractShape(COLUMNS, ("ID",), SliceBy("DAY", "month"))
KEEP = 2
Row = tuple[Any, ...]


@pytest.fixture(autouse=True)
def always_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a test are too small for a spare to be worth it, and a disk that shares blocks needs none."""
    monkeypatch.setattr(apply, "_COPY_SPEED", 0)
    monkeypatch.setattr(versions, "shares_blocks", lambda _: False)


class Extract:
    """The versions of one extract, each made of the one before, and what each must hold."""

    def __init__(self, folder: Path, rows: Sequence[Row]) -> None:
        self.folder, self.rows, self.number = folder, list(rows), 0
        self.store = VersionStore(folder / "versions")
        with apply.new_version(self.store) as workspace:
            create_extract(workspace.extract, COLUMNS, stage(folder / "base.parquet", COLUMNS, rows))
            self.version = self.store.commit(workspace, self._manifest(len(rows), None))

    def _manifest(self, rows: int, base: str | None) -> dict[str, Any]:
        return {"rows": rows, "replaced_in": base, "shape": shape_to_json(SHAPE)}

    def replace(self, keys: Sequence[int | None], fresh: Sequence[Row], *, prune: bool = True) -> Version:
        self.number += 1
        change = self.folder / f"change-{self.number}"
        stage(change / "keys" / "part-0.parquet", [COLUMNS[0]], [(key,) for key in keys], bookkeeping=False)
        marked = [(*row, 1) for row in fresh]
        stage(change / "rows" / "part-0.parquet", [*COLUMNS, ROW_MARK], marked, bookkeeping=False)
        change_set = ChangeSet(
            *("c", "e", "v", "t", SourceState("", "", "", ""), "changes", "incremental", None, 0, 0, {}, {}, None)
        )
        base = self.version
        with apply.new_version(self.store) as workspace:
            counts = apply.fill_extract(
                workspace,
                change_set,
                change,
                shapes={"": SHAPE},
                base=base,
                template=None,
                rebuild_factor=99.0,
                spare=apply.spare_file(self.store, base, change_set, change, {"": SHAPE}),
            )[""]
            apply.keep_change(workspace, change_set, change, {"": SHAPE})
            self.version = self.store.commit(workspace, self._manifest(counts.after, base.id))
        if prune:
            self.store.prune(KEEP, protected={self.version.id})
        self.rows = [row for row in self.rows if row[0] not in keys] + list(fresh)
        assert bag(self.version.extract) == Counter(map(stored, self.rows))
        assert (counts.before - counts.purged + counts.appended, counts.appended) == (len(self.rows), len(fresh))
        return self.version

    @property
    def files(self) -> set[int]:
        return {path.stat().st_ino for path in self.store.folder.rglob("extract.hyper")}


def stored(row: Row) -> Row:
    """A row as the extract gives it back."""
    from tableauhyperapi import Date

    day = row[1]
    return (row[0], day and Date(day.year, day.month, day.day), row[2])


ROWS: list[Row] = [(number, date(2024, 1, 1 + number), f"row {number}") for number in range(9)] + [
    (None, None, "nobody")
]


def test_after_the_first_versions_no_file_is_copied_any_more(tmp_path: Path):
    extract = Extract(tmp_path, ROWS)
    for number in range(KEEP + 1):
        extract.replace([number], [(number, None, "new")])
    files = extract.files
    assert len(files) == KEEP + 1, "those that are kept, and the spare one"

    for number in range(6):
        base, before = extract.version, bag(extract.version.extract)
        extract.replace([number, None], [(number, date(2024, 5, 1), f"again {number}"), (None, None, None)])
        assert extract.files == files
        assert bag(base.extract) == before, "the base is not touched"
    assert [version.id for version in extract.store.versions()] == ["v00000009", "v00000010"]


KEYS = st.sampled_from([1, 2, 3, None])
CHANGES = st.tuples(st.sets(KEYS, min_size=1, max_size=3), st.lists(st.tuples(KEYS, st.sampled_from(["a", "b", None]))))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(CHANGES, min_size=4, max_size=8))
def test_whatever_was_replaced_the_spare_file_becomes_what_a_copy_would_be(tmp_path_factory, changes):
    extract = Extract(
        tmp_path_factory.mktemp("spare"), [(1, None, "a"), (2, None, "b"), (2, None, "b"), (None, None, "c")]
    )
    for keys, fresh in changes:
        extract.replace(sorted(keys, key=repr), [(key, None, name) for key, name in fresh if key in keys])


def with_spare(folder: Path) -> tuple[Extract, Version]:
    extract = Extract(folder, ROWS)
    for number in range(KEEP + 1):
        extract.replace([number], [(number, None, "new")])
    spare = extract.store.spare()
    assert spare is not None
    return extract, spare


@pytest.mark.parametrize("damage", ["a row less", "no Hyper file", "gone"])
def test_a_spare_that_is_not_what_it_should_be_is_given_up_for_a_copy(tmp_path: Path, damage: str):
    extract, spare = with_spare(tmp_path)
    if damage == "a row less":
        run(spare.extract, 'DELETE FROM "Extract"."Extract" WHERE "ID" = 8')
    elif damage == "no Hyper file":
        spare.extract.write_bytes(b"something else")
    else:
        spare.extract.unlink()

    extract.replace([5], [(5, None, "new")], prune=False)

    assert extract.store.spare() is None


def test_a_spare_before_a_load_of_everything_is_given_up(tmp_path: Path):
    extract, _ = with_spare(tmp_path)
    with apply.new_version(extract.store) as workspace:
        create_extract(workspace.extract, COLUMNS, stage(tmp_path / "all.parquet", COLUMNS, ROWS))
        extract.version = extract.store.commit(workspace, extract._manifest(len(ROWS), None))
    extract.rows = list(ROWS)

    extract.replace([5], [(5, None, "new")], prune=False)

    assert extract.store.spare() is None


def test_a_spare_that_an_interrupted_refresh_used_up_is_missed_by_nobody(tmp_path: Path):
    extract, spare = with_spare(tmp_path)
    workspace = extract.store.begin()
    spare.extract.rename(workspace.extract)

    extract.replace([5], [(5, None, "new")], prune=False)

    assert extract.store.spare() is None
    assert not [path for path in extract.store.folder.iterdir() if path.name.startswith(".")]


def test_where_much_was_replaced_a_copy_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    extract, _ = with_spare(tmp_path)
    monkeypatch.setattr(apply, "_COPY_SPEED", 1_000_000)

    version = extract.replace([5], [(5, None, "new")], prune=False)

    assert extract.store.spare() is None, "its room is the copy's"
    assert not (version.folder / "change").exists(), "nor is a large change kept"
