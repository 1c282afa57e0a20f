"""Whose rows are under the datasource's name: somebody else's, ours without a record, or those of another datasource."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.changes.plan import Reason
from tir_dagster.errors import DatasourceError
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.hyper.helpers import run
from tir_dagster_tests.orchestration.history import DATABASE, PROJECT, History, Layout


@pytest.fixture(scope="module")
def prepared(sandbox: Sandbox) -> Sandbox:
    sandbox.prepare(DATABASE, PROJECT)
    return sandbox


def filled(prepared: Sandbox, spark: Any, folder: Path, layout: Layout) -> History:
    history = History(prepared, spark, folder, layout)
    for key in (1, 2, 3):
        value = f"TO_VARIANT('{key}')" if layout.value_type == "VARIANT" else f"'{key}'"
        history.act(("insert", str(key), "'x'", "'2025-03-05'::DATE", value))
    return history


@pytest.fixture
def loaded(prepared, spark, tmp_path) -> Iterator[History]:
    history = filled(prepared, spark, tmp_path, Layout())
    assert history.refresh().reason is Reason.FIRST_LOAD
    yield history
    history.close()


def named(history: History, name: str, **settings: Any) -> None:
    """The spec names that datasource from now on."""
    spec = history.new_refresher().spec
    history.refresher = history.new_refresher()
    history.refresher.change(spec=replace(spec, datasource=replace(spec.datasource, name=name, **settings)))


def published(history: History) -> set[str]:
    """The names of all datasources that begin with the extract's."""
    with history.sandbox.tableau() as server:
        return {
            datasource.name for datasource in TSC.Pager(server.datasources) if datasource.name.startswith(history.name)
        }


@pytest.mark.parametrize("kind", ["VARCHAR", "VARIANT"])
def test_values_of_two_rows_that_somebody_exchanged_are_noticed(prepared, spark, tmp_path, kind):
    history = filled(prepared, spark, tmp_path, Layout(value_type=kind))
    history.refresh()
    foreign_file = tmp_path / "theirs.hyper"
    shutil.copyfile(history.refresher.versions.latest().extract, foreign_file)
    history.publish(foreign_file)
    assert history.refresh().decision == "none", "the same rows in the same words"
    run(
        foreign_file,
        'CREATE TEMPORARY TABLE old AS (SELECT "K" AS k, "V" AS v FROM "Extract"."Extract")',
        'UPDATE "Extract"."Extract" SET "V" = (SELECT v FROM old WHERE k = 3 - "K") WHERE "K" IN (1, 2)',
    )
    history.publish(foreign_file)
    assert history.published_rows() != history.source_rows()
    assert history.refresh().reason is Reason.FOREIGN_PUBLISH
    assert history.published_rows() == history.source_rows()
    history.close()


def test_a_name_that_nothing_has_creates_nothing_once_the_extract_was_loaded(loaded):
    wrong = f"{loaded.name}_x"
    named(loaded, wrong)
    for mode in ("changes", "full"):
        with pytest.raises(DatasourceError, match="the spec names another datasource") as caught:
            loaded.refresh(mode)
        assert f"There is no datasource {wrong!r} in project {PROJECT!r}" in str(caught.value)
        assert f"Similar names: {loaded.name!r}" in str(caught.value)
        assert "datasource.create: true" in str(caught.value)
    assert published(loaded) == {loaded.name}
    named(loaded, loaded.name)
    assert loaded.refresh().decision == "none", "a corrected name costs nothing"

    named(loaded, wrong, create=True)
    assert loaded.refresh().reason is Reason.DATASOURCE_CHANGED
    assert published(loaded) == {loaded.name, wrong}
    assert loaded.published_rows() == loaded.source_rows()
    assert loaded.refresh().decision == "none"

    named(loaded, loaded.name)
    assert loaded.refresh().reason is Reason.DATASOURCE_CHANGED, "it is there: nothing has to be created"
    assert loaded.refresh().decision == "none"


def test_a_datasource_that_was_renamed_on_the_server_is_not_created_a_second_time(loaded):
    # As the release before wrote it down: without a name.
    loaded.confirmed = replace(loaded.confirmed, datasource="")
    with loaded.sandbox.tableau() as server:
        datasource = server.datasources.get_by_id(loaded.confirmed.datasource_id)
        datasource.name = f"{loaded.name}_y"
        server.datasources.update(datasource)
    with pytest.raises(DatasourceError, match=rf"published to datasource '{loaded.name}_y' in project '{PROJECT}'"):
        loaded.refresh()
    named(loaded, f"{loaded.name}_y")
    assert loaded.refresh().decision == "none"


def test_a_datasource_that_was_deleted_is_created_again_and_the_reason_says_so(loaded):
    with loaded.sandbox.tableau() as server:
        server.datasources.delete(loaded.confirmed.datasource_id)
    plan = loaded.refresh()
    assert (plan.reason, plan.sentence()) == (
        Reason.DATASOURCE_GONE,
        f"{loaded.name}: full refresh, because the datasource was deleted on the server.",
    )
    assert loaded.published_rows() == loaded.source_rows()


def test_a_version_of_ours_whose_record_was_deleted_is_confirmed_again(loaded):
    first = loaded.confirmed
    loaded.act(("update", "1", "'c'"))
    loaded.refresh()
    last = loaded.confirmed
    for left in (first, None):
        loaded.confirmed = left
        assert loaded.refresh().decision == "none"
        # How far the server's jobs are known is newer.
        assert replace(loaded.confirmed, jobs_until=last.jobs_until) == last
    assert loaded.published_rows() == loaded.source_rows()

    loaded.publish_foreign()
    loaded.confirmed = None
    assert loaded.refresh().reason is Reason.STATE_LOST, "it was loaded before"
    assert loaded.published_rows() == loaded.source_rows()


def test_a_file_of_somebody_elses_with_other_columns_is_not_replaced_by_a_first_load(prepared, spark, tmp_path):
    history = filled(prepared, spark, tmp_path, Layout())
    history.publish_foreign('"K" BIGINT, "BUDGET" TEXT, "OWNER" TEXT')
    for mode in ("changes", "full"):
        with pytest.raises(DatasourceError) as caught:
            history.refresh(mode)
        assert f"datasource {history.name!r} in project {PROJECT!r}" in str(caught.value)
        assert "has the columns BUDGET, K, OWNER, and the extract D, K, L, V, W" in str(caught.value)
        assert "datasource.replace: true" in str(caught.value)
    assert "BUDGET" in history.published_columns()

    named(history, history.name, replace=True)
    assert history.refresh().reason is Reason.FIRST_LOAD
    assert history.published_rows() == history.source_rows()
    history.close()


def test_a_file_with_the_same_columns_is_replaced_by_a_first_load(prepared, spark, tmp_path):
    history = filled(prepared, spark, tmp_path, Layout())
    history.publish_foreign()
    assert history.refresh().reason is Reason.FIRST_LOAD
    assert history.published_rows() == history.source_rows()
    history.close()
