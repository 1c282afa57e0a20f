"""Random histories through Spark, Hyper and the servers: whatever happened, the extract equals its source as a bag."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

import pytest
from hypothesis import given
from tableauhyperapi import Connection, HyperProcess, Telemetry

from tir_dagster.changes import find_changes as find
from tir_dagster.changes.hints import ChangeType, Equal, Hint, Not
from tir_dagster.changes.plan import Reason
from tir_dagster.errors import DatasourceError, ExtractError
from tir_dagster.snowflake.names import TableName
from tir_dagster.spark import staging
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.hyper.helpers import run
from tir_dagster_tests.orchestration.history import DATABASE, PROJECT, History, Layout
from tir_dagster_tests.orchestration.random_histories import (
    Extracts,
    histories,
    play,
    random_histories,
)

# `make soak` plays a hundred.
HISTORIES = int(os.environ.get("TIR_HISTORIES", "3"))


@pytest.fixture(autouse=True, scope="module")
def through_spark() -> Iterator[None]:
    """However few rows there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIR_SPARK_ROWS", "0")
        yield


@pytest.fixture(scope="module")
def prepared(sandbox: Sandbox) -> Sandbox:
    sandbox.prepare(DATABASE, PROJECT)
    return sandbox


@pytest.fixture(scope="module")
def extracts(prepared, spark, tmp_path_factory) -> Iterator[Extracts]:
    layouts = Extracts(prepared, spark, tmp_path_factory.mktemp("histories"))
    yield layouts
    layouts.close()


@random_histories(HISTORIES)
@given(drawn=histories())
def test_the_published_extract_equals_the_source_after_any_history(extracts, drawn):
    play(extracts.of(drawn[0]), *drawn[1:])


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows count as too many for one task, and one key as too many for a statement."""
    monkeypatch.setattr(find, "MOST_LITERALS", 0)
    monkeypatch.setattr(staging, "ROWS_PER_TASK", 2)


@random_histories(-(-HISTORIES // 20))
@given(drawn=histories())
def test_and_so_it_does_where_everything_is_too_large(extracts, large, drawn):
    play(extracts.of(drawn[0]), *drawn[1:])


@pytest.fixture
def loaded(prepared, spark, tmp_path) -> Iterator[History]:
    history = History(prepared, spark, tmp_path, Layout())
    history.act(("insert", "1", "'x'", "'2025-03-05'::DATE", "'a'"))
    history.act(("insert", "2", "'y'", "NULL", "'b'"))
    history.refresh()
    yield history
    history.close()


def test_lost_versions_mean_a_full_refresh_that_is_published_under_a_new_name(loaded):
    confirmed = loaded.confirmed.version
    shutil.rmtree(loaded.refresher.versions.folder)
    loaded.act(("update", "1", "'c'"))
    assert loaded.refresh().reason is Reason.STATE_LOST
    assert loaded.confirmed.version > confirmed, "the name of a lost version must not come back"
    assert loaded.published_rows() == loaded.source_rows()


def test_a_new_column_comes_into_a_datasource_that_we_made(loaded):
    loaded.sql(f"ALTER TABLE {loaded.name} ADD COLUMN EXTRA NUMBER(12,2)")
    loaded.sql(f"UPDATE {loaded.name} SET EXTRA = 1.5, V = 'new'")
    assert loaded.refresh().reason is Reason.SCHEMA_CHANGED
    assert loaded.published_rows() == loaded.source_rows()


def test_a_stamp_in_the_future_hides_no_later_update(loaded):
    loaded.sql(f"UPDATE {loaded.name} SET W = '2099-01-01'::TIMESTAMP_NTZ WHERE K = 2")
    loaded.refresh()
    loaded.sql(f"UPDATE {loaded.name} SET V = 'later', W = CURRENT_TIMESTAMP()::TIMESTAMP_NTZ WHERE K = 1")
    loaded.refresh()
    assert loaded.published_rows() == loaded.source_rows()


@pytest.mark.parametrize(
    ("layout", "highest"),
    [
        (Layout(mark_type="NUMBER(38,0)"), "1000000000"),
        (Layout(row_key=(), by="month"), "'2025-02-01'::TIMESTAMP_NTZ"),
    ],
    ids=["a number that is far too high", "no row key"],
)
def test_changes_that_the_order_of_marks_hides_are_found(prepared, spark, tmp_path, layout, highest):
    history = History(prepared, spark, tmp_path, layout)
    for key in "12":
        history.act(("insert", key, "'x'", "'2025-03-05'::DATE", "'a'"))
    history.sql(f"INSERT INTO {history.name} SELECT 3, 'y', '2025-04-07'::DATE, 'b', {highest}")
    history.refresh()
    for step in (("update", "1", "'late'"), ("delete", "2"), ("insert", "4", "'x'", "'2025-03-31'::DATE", "'late'")):
        history.act(step)
    assert history.refresh().reason is None
    assert history.published_rows() == history.source_rows()
    history.close()


def test_a_resync_mends_a_file_that_drifted_from_its_ledger(loaded):
    base = loaded.refresher.versions.latest()
    with (
        HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process,
        Connection(process.endpoint, str(base.extract)) as connection,
    ):
        connection.execute_command('UPDATE "Extract"."Extract" SET "V" = \'drifted\' WHERE "K" = 1')
    loaded.refresh("slices")
    assert loaded.published_rows() == loaded.source_rows()


def test_a_row_that_changed_in_a_slice_nobody_touches_is_found_in_turn_and_replaced(loaded):
    for month in (4, 5, 6):
        loaded.act(("insert", str(month), "'z'", f"'2025-0{month}-05'::DATE", "'c'"))
    loaded.refresh()
    slices = loaded.refresher.versions.latest().manifest["slice_rows"]
    assert len(slices) == 5
    # By hand, below all bookkeeping. No watermark proposes the row, and L1 reads the rows of other keys only.
    run(loaded.refresher.versions.latest().extract, """UPDATE "Extract"."Extract" SET "V" = 'drifted' WHERE "K" = 5""")
    warnings: list[str] = []
    for turn in range(len(slices)):
        loaded.act(("update", "1", f"'turn {turn}'"))
        plan = loaded.refresh()
        warnings += [warning for warning in plan.warnings if "differed from the source" in warning]
        if warnings:
            break
    assert len(warnings) == 1
    assert "in 2025-05 (" in warnings[0]
    assert loaded.published_rows() == loaded.source_rows()
    version = loaded.refresher.versions.latest()
    assert version.manifest["compared"] == {"2025-05": version.manifest["source_version"]}, "it was compared once more"


@pytest.mark.parametrize(
    ("scope", "instead"),
    [
        (Equal("K", 1), "what was there before is looked up in the extract"),
        # The table may compare texts by a collation, and hold a timestamp to more digits than the extract.
        (Equal("V", "a"), "every row is compared with the extract"),
        (Not(Equal("W", datetime(2020, 1, 1))), "every row is compared with the extract"),  # noqa: DTZ001 - as the table has it
    ],
)
def test_without_history_what_a_hint_says_was_removed_is_known_by_the_extract(
    prepared, spark, tmp_path, scope, instead
):
    history = History(prepared, spark, tmp_path, Layout(watermark=False))
    history.sql(f"ALTER TABLE {history.name} SET DATA_RETENTION_TIME_IN_DAYS = 0")
    refresher = history.refresher
    refresher.change(spec=replace(refresher.spec, changes=replace(refresher.spec.changes, detector="hint")))
    for key, value in (("1", "'a'"), ("2", "'b'")):
        history.act(("insert", key, "'x'", "'2025-03-05'::DATE", value))
    history.refresh()
    history.act(("delete", "1"))
    hint = Hint(TableName.parse(refresher.spec.source), ChangeType.REMOVE_ROWS, scope)

    looked = refresher.look(history.confirmed)
    surveyed = refresher.survey(looked)
    plan = refresher.plan(looked, surveyed, "changes", hints=(hint,), hinted=True)
    plan, change_set = refresher.detect(looked, surveyed, plan, ident="hinted", hints=(hint,), allow_empty=True)

    assert (plan.keys, change_set.purged, change_set.appended) == (1, {"2025-03": 1}, {})
    assert any(instead in warning for warning in plan.warnings)
    history.close()


def test_a_comparison_of_rows_that_a_full_load_replaces_is_not_claimed(loaded):
    spec = loaded.refresher.spec
    loaded.refresher.change(spec=replace(spec, thresholds=replace(spec.thresholds, full_share=0.1)))
    loaded.act(("update", "1", "'new'"))
    assert loaded.refresh().reason is Reason.COST_THRESHOLD
    version = loaded.refresher.versions.latest()
    assert set(version.manifest["compared"].values()) == {version.manifest["source_version"]}
    assert version.manifest["verified"] == version.manifest["compared"]


def test_what_somebody_published_between_two_steps_is_not_overwritten(loaded):
    loaded.act(("update", "1", "'ours'"))
    looked, version = loaded.ready_to_publish()
    # As after publishes that were refused: what is never confirmed must not fill the disk.
    change_set = loaded.refresher.change_sets.get(version.manifest["change_set"])
    for _ in range(4):
        version = loaded.refresher.apply(looked, change_set)
    assert [version_kept.number for version_kept in loaded.refresher.versions.versions()] == [1, 3, 4, 5, 6]
    loaded.publish_foreign()
    foreign_rows = loaded.published_rows()

    with pytest.raises(DatasourceError, match="changed"):
        loaded.refresher.publish(looked, version)

    assert loaded.published_rows() == foreign_rows
    assert loaded.refresh().reason is Reason.FOREIGN_PUBLISH
    assert loaded.published_rows() == loaded.source_rows()


def test_a_look_without_the_lease_mends_nothing(loaded):
    loaded.act(("update", "1", "'c'"))
    loaded.refresh(until="published")
    intent = loaded.refresher.change_sets.intent()

    loaded.refresher.look(loaded.confirmed, repair=False)

    assert intent is not None
    assert loaded.refresher.change_sets.intent() == intent
    (loaded.refresher.change_sets.path("intent.json")).write_text("{ half", encoding="utf-8")
    assert loaded.refresh().reason is Reason.FOREIGN_PUBLISH, "what cannot be read is not guessed"
    assert loaded.published_rows() == loaded.source_rows()


def test_a_full_refresh_that_stopped_half_way_is_still_done(loaded):
    loaded.refresh("full", until="staged")
    assert loaded.refresh().reason is Reason.REQUESTED
    assert loaded.refresh().decision == "none"


def test_another_watermark_means_a_full_refresh(loaded):
    loaded.layout = replace(loaded.layout, watermark=False)
    loaded.refresher = loaded.new_refresher()
    assert loaded.refresh().reason is Reason.DEFINITION_CHANGED
    assert loaded.refresh().decision == "none"


def test_a_datasource_that_stores_the_row_key_as_a_float_is_refused_before_anything_is_read(prepared, tmp_path):
    history = History(prepared, None, tmp_path, Layout(by="none", watermark=False))
    history.publish_database_extract(key_type="FLOAT")
    with pytest.raises(
        ExtractError, match=r"Key column K has 38 digits.*Choose another row_key, or another datasource"
    ):
        history.refresh()
    history.close()
