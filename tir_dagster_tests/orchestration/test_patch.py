"""The delivery `patch` through Spark, Hyper and the servers: only the change travels, and nothing is ever lost."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given

from tir_dagster.changes.plan import Reason
from tir_dagster.errors import DatasourceError
from tir_dagster.hyper.casts import PURGE_KEY
from tir_dagster.refresh.verify import ExtractVerification
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.hyper.helpers import run
from tir_dagster_tests.orchestration.history import DATABASE, PROJECT, History, Layout
from tir_dagster_tests.orchestration.random_histories import Extracts, histories, play, random_histories
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.sandbox.tableau.helpers import Admin

HISTORIES = int(os.environ.get("TIR_HISTORIES", "2"))
# `make soak` goes on to five million.
SIZES = [100_000, 5_000_000] if "TIR_HISTORIES" in os.environ else [2_000, 20_000]
PATCHED = [
    Layout(delivery="patch", whole_key=True),
    Layout(delivery="patch", key_type="VARCHAR", by="week"),
    Layout(delivery="patch", key_type="TIMESTAMP_NTZ", row_key=("K", "L")),
    Layout(delivery="patch", row_key=(), by="month"),
]


@pytest.fixture(scope="module")
def prepared(sandbox: Sandbox) -> Sandbox:
    sandbox.prepare(DATABASE, PROJECT)
    return sandbox


@pytest.fixture
def admin(prepared: Sandbox) -> Iterator[Admin]:
    server_admin = Admin(prepared.tableau_url)
    server_admin.forget_calls()
    yield server_admin
    server_admin.clear_faults()
    server_admin.set(clock_offset_seconds=0)


@pytest.fixture(scope="module")
def extracts(prepared, spark, tmp_path_factory) -> Iterator[Extracts]:
    layouts = Extracts(prepared, spark, tmp_path_factory.mktemp("histories"))
    yield layouts
    layouts.close()


@random_histories(HISTORIES)
@given(drawn=histories(PATCHED))
def test_the_published_extract_equals_the_source_after_any_history(extracts, drawn):
    play(extracts.of(drawn[0]), *drawn[1:])


@pytest.fixture(params=[True, False], ids=["a key that is never NULL", "a key that may be NULL"])
def loaded(request, prepared, spark, tmp_path) -> Iterator[History]:
    yield from load(prepared, spark, tmp_path, Layout(delivery="patch", whole_key=request.param))


@pytest.fixture
def patched_history(prepared, spark, tmp_path) -> Iterator[History]:
    yield from load(prepared, spark, tmp_path, Layout(delivery="patch"))


def load(prepared, spark, folder: Path, layout: Layout) -> Iterator[History]:
    history = History(prepared, spark, folder, layout)
    for key in range(1, 6):
        history.act(("insert", str(key), "'x'", "'2025-03-05'::DATE", "'a'"))
    history.refresh()
    yield history
    history.close()


def calls(admin: Admin) -> list[dict[str, Any]]:
    """What the server was asked since this was asked last."""
    return requests.delete(f"{admin.url}/sandbox/calls", timeout=30).json()["calls"]


def routes(admin: Admin) -> list[str]:
    return [call["route"] for call in calls(admin)]


def test_only_the_change_travels_with_a_key_column_where_it_is_needed(loaded, admin):
    assert (PURGE_KEY in loaded.published_columns()) == (not loaded.layout.whole_key)
    loaded.act(("update", "1", "'b'"))
    loaded.act(("delete", "2"))
    admin.forget_calls()
    # The server loses the upload half-way: it starts over.
    admin.fault("status", method="PUT", path="/fileUploads/", status=404, code="404015")
    loaded.refresh()
    assert admin.faults() == []
    asked = routes(admin)
    assert asked.count("update_data") == 1
    assert not {"download", "publish"} & set(asked), asked
    assert loaded.published_rows() == loaded.source_rows()
    assert loaded.refresh().decision == "none"


def test_the_same_bytes_travel_whatever_the_extracts_size(patched_history, admin):
    """From the warehouse by its feed of changes, and to Tableau."""
    env, spec = patched_history.env, patched_history.refresher.spec
    warehouse = Admin(f"http://{env['SNOWFLAKE_HOST']}:{env['SNOWFLAKE_PORT']}")
    patched_history.sql(f"ALTER TABLE {patched_history.name} SET CHANGE_TRACKING = TRUE")
    patched_history.refresher.change(spec=replace(spec, changes=replace(spec.changes, detector="feed")))
    sizes, answers = [], []
    stamp = "'2025-02-0{}'::TIMESTAMP_NTZ"
    for number, rows in enumerate(SIZES, 1):
        # The last one is a day younger: the others are no longer looked back at.
        rows_sql = (
            "SELECT RANGE + 1000, 'x', '2025-04-01'::DATE, MD5(RANGE::VARCHAR),"
            f" IFF(RANGE = {rows} - 1, {stamp.format(3 * number - 1)}, {stamp.format(3 * number - 2)})"
        )
        patched_history.sql(f"INSERT INTO {patched_history.name} {rows_sql} FROM RANGE({rows})")
        patched_history.refresh("full")
        patched_history.sql(
            f"UPDATE {patched_history.name} SET V = MD5(V), W = {stamp.format(3 * number)} WHERE K >= 1000 AND K < 2000"
        )
        admin.forget_calls()
        warehouse.forget_calls()
        assert patched_history.refresh().decision == "incremental"
        asked = calls(admin)
        answers.append(sum(call["bytes_out"] for call in calls(warehouse)))
        assert not {"download", "publish"} & {call["route"] for call in asked}
        sizes.append(sum(call["bytes_in"] for call in asked))
        patched_history.sql(f"DELETE FROM {patched_history.name} WHERE K >= 1000")
    assert 0 < max(sizes) <= 1.1 * min(sizes)
    # A thousand rows of the change; of the slice that is compared in turn, sums alone.
    assert 1_000 * len("0" * 32) < max(answers) <= 1.1 * min(answers)


def test_a_large_change_travels_in_parts_and_goes_on_where_it_was_interrupted(prepared, spark, tmp_path, admin):
    history = History(prepared, spark, tmp_path, Layout(delivery="patch", limit_mb=1))
    rows_sql = "SELECT RANGE + 1000, 'x', '2025-04-01'::DATE, MD5(RANGE::VARCHAR), '2025-02-01'::TIMESTAMP_NTZ"
    history.sql(f"INSERT INTO {history.name} {rows_sql} FROM RANGE(2000)")
    history.refresh()
    longer = " || ".join(f"MD5(V || '{number}')" for number in range(30))
    history.sql(f"UPDATE {history.name} SET V = {longer}, W = '2025-02-02'::TIMESTAMP_NTZ WHERE K >= 1000")
    admin.fault("status", method="PATCH", path="/data$", skip=1, status=403, code="403004")
    with pytest.raises(DatasourceError, match=r"403004.* A part of the change may be there"):
        history.refresh()
    assert history.published_rows() != history.source_rows()
    admin.forget_calls()
    assert history.refresh().decision == "none", "what was left is sent first, and confirmed late"
    assert routes(admin).count("update_data") > 1
    assert history.published_rows() == history.source_rows()
    # Between two parts something else moves it, and nobody can tell what: the rows are compared at the end.
    history.sql(f"UPDATE {history.name} SET V = V || 'x', W = '2025-02-03'::TIMESTAMP_NTZ WHERE K >= 1000")
    edits = iter(["Ask Ann."])
    history.refresher.listen(lambda line: edit(history, admin, edits) if line.startswith("done") else None)
    assert history.refresh().decision == "incremental"
    assert "download" in routes(admin)
    assert history.published_rows() == history.source_rows()
    history.close()


def edit(history: History, admin: Admin, edits: Iterator[str]) -> None:
    for text in edits:
        admin.set(clock_offset_seconds=20)
        with history.sandbox.tableau() as server:
            item = server.datasources.get_by_id(history.confirmed.datasource_id)
            item.description = text
            server.datasources.update(item)


def test_an_edited_description_costs_one_download(patched_history, admin):
    edit(patched_history, admin, iter(["Ask Ann."]))
    for downloads in (1, 0):
        admin.forget_calls()
        patched_history.refresher = patched_history.new_refresher()
        assert patched_history.refresh().decision == "none"
        assert routes(admin).count("download") == downloads
    patched_history.act(("update", "1", "'b'"))
    admin.forget_calls()
    assert patched_history.refresh().decision == "incremental"
    assert not {"download", "publish"} & set(routes(admin))
    assert patched_history.published_rows() == patched_history.source_rows()


def test_rows_without_our_key_are_published_whole_once(patched_history, admin):
    """Somebody published the very same rows, without our column."""
    patched_history.publish(patched_history.refresher.versions.latest().extract)
    for sent in ("publish", "update_data"):
        patched_history.act(("update", "1", f"'{sent}'"))
        admin.forget_calls()
        assert patched_history.refresh().decision == "incremental"
        assert {"publish", "update_data"} & set(routes(admin)) == {sent}
        assert patched_history.published_rows() == patched_history.source_rows()


def test_rows_that_look_alike_in_sum_are_told_apart(prepared, spark, tmp_path, admin):
    """Two rows exchange their values: counts, sums and extremes of every column stay as they were."""
    history = History(prepared, spark, tmp_path, Layout(delivery="patch", whole_key=True, watermark=False))
    for key in (1, 2, 3):
        history.act(("insert", str(key), "'x'", "'2025-03-05'::DATE", f"'{key}'"))
    history.refresh()
    history.sql(f"UPDATE {history.name} SET V = IFF(K = 1, '2', '1') WHERE K < 3")
    admin.fault("fail_job", path=f"/{history.name}$")
    admin.fault("vanish_job", path="/jobs/")
    with pytest.raises(DatasourceError, match="are not what they must be after this refresh"):
        history.refresh()
    assert history.refresh().decision == "incremental"
    assert history.published_rows() == history.source_rows()
    before, now = history.refresher.versions.versions()[0], history.refresher.versions.latest()
    assert before.manifest["fingerprint"] != now.manifest["fingerprint"]
    # Somebody goes back to what was there before.
    history.publish(before.extract)
    assert not ExtractVerification(history.refresher.context, history.confirmed).server_holds_it().passed
    assert history.refresh().reason is Reason.FOREIGN_PUBLISH
    assert history.published_rows() == history.source_rows()
    # And into what was not confirmed yet somebody puts others.
    history.sql(f"UPDATE {history.name} SET V = 'z' WHERE K = 3")
    history.refresh(until="published")
    foreign_file = tmp_path / "theirs.hyper"
    shutil.copyfile(history.refresher.versions.latest().extract, foreign_file)
    run(foreign_file, """UPDATE "Extract"."Extract" SET "V" = CASE "K" WHEN 1 THEN '1' ELSE '2' END WHERE "K" < 3""")
    history.publish(foreign_file)
    assert history.refresh().reason is Reason.FOREIGN_PUBLISH
    assert history.published_rows() == history.source_rows()
    history.close()


@pytest.mark.long
def test_the_same_rows_in_other_types_are_published_whole_once(prepared, spark, tmp_path, admin):
    """A change that is made for our types would be refused by theirs."""
    history = next(loading := load(prepared, spark, tmp_path, Layout(delivery="patch", whole_key=True)))
    foreign_file = tmp_path / "theirs.hyper"
    shutil.copyfile(history.refresher.versions.latest().extract, foreign_file)
    table, other = '"Extract"."Extract"', '"Extract"."other"'
    run(
        foreign_file,
        f'CREATE TABLE {other} AS (SELECT CAST("K" AS INTEGER) AS "K", "L", "D", "V", "W" FROM {table})',
        f"DROP TABLE {table}",
        f'ALTER TABLE {other} RENAME TO "Extract"',
    )
    history.publish(foreign_file)
    history.act(("update", "1", "'b'"))
    admin.forget_calls()
    assert history.refresh().decision == "incremental"
    assert {"publish", "update_data"} & set(routes(admin)) == {"publish"}
    assert history.published_rows() == history.source_rows()
    loading.close()


@pytest.mark.long
def test_where_changes_are_always_refused_the_next_refresh_publishes_all(patched_history, admin):
    patched_history.act(("update", "1", "'b'"))
    admin.fault("status", method="PATCH", path="/data$", times=100, status=403, code="403004")
    with pytest.raises(DatasourceError, match="403004"):
        patched_history.refresh()
    assert patched_history.refresh().decision == "incremental"
    assert patched_history.published_rows() == patched_history.source_rows()


def test_deliveries_can_be_switched_on_one_datasource(patched_history, admin):
    for number, delivery in enumerate(["republish", "patch", "patch", "republish", "patch"]):
        patched_history.layout = replace(patched_history.layout, delivery=delivery)
        patched_history.refresher = patched_history.new_refresher()
        patched_history.act(("update", "1", f"'{number}'"))
        patched_history.act(("rekey", "3", "NULL") if number == 1 else ("rekey", "NULL", "3"))
        admin.forget_calls()
        plan = patched_history.refresh()
        assert (plan.decision, plan.reason) == ("incremental", None)
        # After a whole publish without our key column, a whole one brings it back; then the changes travel alone. What
        # was left of them when the delivery was switched is sent first.
        assert ("update_data" in routes(admin)) == (number in (2, 3))
        assert patched_history.published_rows() == patched_history.source_rows()
        if number == 2:
            patched_history.act(("update", "5", "'left'"))
            admin.fault("status", method="PATCH", path="/data$", status=403, code="403004")
            with pytest.raises(DatasourceError, match="403004"):
                patched_history.refresh()


def test_part_of_a_batch_is_healed_in_the_same_run(patched_history, admin):
    patched_history.act(("update", "1", "'b'"))
    admin.fault("torn_job", path=f"/{patched_history.name}$", actions=1)
    patched_history.refresh()
    assert admin.faults() == []
    assert patched_history.published_rows() == patched_history.source_rows()


def test_part_of_a_batch_is_healed_by_the_next_run(loaded, admin):
    torn = {"half": True} if loaded.layout.whole_key else {"actions": 1}
    loaded.act(("update", "1", "'b'"))
    loaded.act(("insert", "9", "'z'", "NULL", "'new'"))
    admin.fault("torn_job", path=f"/{loaded.name}$", times=2, **torn)
    with pytest.raises(DatasourceError, match=r"failed on the server.*A part of the change may be there"):
        loaded.refresh()
    assert loaded.published_rows() != loaded.source_rows()
    loaded.act(("delete", "1"))
    if not loaded.layout.whole_key:
        # That one is killed before it has published, and the one after it, too.
        admin.fault("status", method="POST", path="/(fileUploads|datasources)$", times=2, status=403, code="403004")
        with pytest.raises(DatasourceError, match="403004"):
            loaded.refresh()
        admin.clear_faults()
        loaded.refresh(until="verified")
    plan = loaded.refresh()
    assert plan.decision == "incremental"
    assert loaded.published_rows() == loaded.source_rows()
    assert loaded.refresh().decision == "none"


def test_a_change_that_landed_before_a_crash_is_confirmed_late(patched_history):
    patched_history.act(("update", "1", "'b'"))
    patched_history.refresh(until="published")
    assert patched_history.refresh().decision == "none", "it had landed, which is confirmed late"
    assert patched_history.published_rows() == patched_history.source_rows()


@pytest.mark.long
def test_what_somebody_published_is_not_changed(patched_history):
    patched_history.act(("update", "1", "'ours'"))
    looked, version = patched_history.ready_to_publish()
    patched_history.publish_foreign()
    foreign_rows = patched_history.published_rows()
    with pytest.raises(DatasourceError, match="Nothing was changed"):
        patched_history.refresher.publish(looked, version)
    assert patched_history.published_rows() == foreign_rows
    assert patched_history.refresh().reason is Reason.FOREIGN_PUBLISH
    assert patched_history.published_rows() == patched_history.source_rows()


def test_what_somebody_published_right_before_we_sent_is_left_alone(patched_history):
    patched_history.act(("update", "1", "'ours'"))
    patched_history.refresher.listen(
        lambda line: patched_history.publish_foreign() if line.startswith("sending") else None
    )
    with pytest.raises(DatasourceError, match="Nothing was changed"):
        patched_history.refresh()
    assert not patched_history.published_rows()
    patched_history.refresher.listen(lambda _: None)
    assert patched_history.refresh().reason is Reason.FOREIGN_PUBLISH
    assert patched_history.published_rows() == patched_history.source_rows()


def test_what_somebody_published_while_the_server_worked_is_noticed(prepared, spark, tmp_path, admin):
    history = next(loading := load(prepared, spark, tmp_path, Layout(delivery="patch", whole_key=True)))
    history.act(("update", "1", "'ours'"))
    admin.forget_calls()
    admin.fault("slow_job", path=f"/{history.name}$", seconds=2)
    with ThreadPoolExecutor(1) as others:
        published = others.submit(_publish_meanwhile, history, admin)
        with pytest.raises(DatasourceError, match=r"while its data was changed|failed on the server"):
            history.refresh()
        published.result()
    assert history.refresh().reason is Reason.FOREIGN_PUBLISH
    assert history.published_rows() == history.source_rows()
    loading.close()


def test_what_somebody_changed_while_the_server_asked_for_patience_is_left_alone(patched_history, admin):
    patched_history.act(("update", "1", "'ours'"))
    admin.fault("status", method="PATCH", path="/data$", status=429, retry_after=7)
    with pytest.raises(DatasourceError, match="Nothing was changed"):
        patched_history.refresh(listen=lambda seconds: delete_all(patched_history) if seconds == 7 else None)
    assert not patched_history.published_rows(), "theirs"
    assert patched_history.refresh().reason is Reason.FOREIGN_PUBLISH
    assert patched_history.published_rows() == patched_history.source_rows()


def delete_all(history: History) -> None:
    """Somebody else changes the rows in place, which makes no revision."""
    target = {"target-schema": "Extract", "target-table": "Extract"}
    rows = {"op": "eq", "target-col": "V", "const": {"type": "string", "v": "a"}}
    with history.sandbox.tableau() as server:
        (datasource,) = server.datasources.filter(name=history.name)
        actions = [{"action": "delete", **target, "condition": rows}]
        job = server.datasources.update_hyper_data(datasource, request_id=str(uuid.uuid4()), actions=actions)
        server.jobs.wait_for_job(job, timeout=60)


def test_a_change_that_may_still_come_is_outlasted_before_anything_else_is_published(patched_history, admin):
    patched_history.act(("update", "1", "'ours'"))
    admin.fault("slow_job", path=f"/{patched_history.name}$", seconds=6)
    admin.forget_calls()

    def stop(_: float) -> None:
        if any(call["route"] == "update_data" for call in admin.calls()):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        patched_history.refresh(listen=stop)
    patched_history.publish_foreign()
    seen: list[str] = []

    def listen(line: str) -> None:
        if line.startswith("publishing"):
            seen.append(status_of_job(patched_history))

    patched_history.refresher.listen(listen)
    assert patched_history.refresh().reason is Reason.FOREIGN_PUBLISH
    assert set(seen) <= {"Success", "Failed"}
    assert seen
    assert patched_history.published_rows() == patched_history.source_rows()
    assert patched_history.refresh().decision == "none", "nothing came late"


def status_of_job(history: History) -> str:
    with history.sandbox.tableau() as server:
        return next(iter(server.jobs.filter(title=history.name))).status


def _publish_meanwhile(history: History, admin: Admin) -> None:
    wait_for(lambda: [call for call in admin.calls() if call["route"] == "update_data"], "the change to be sent")
    history.publish_foreign()


def test_an_extract_of_a_database_is_refused_before_anything_is_read(prepared, spark, tmp_path, admin):
    history = History(prepared, spark, tmp_path, Layout(delivery="patch"))
    history.publish_database_extract()
    admin.forget_calls()
    with pytest.raises(
        DatasourceError, match=r"is an extract of a snowflake connection.*Choose the delivery `republish`"
    ):
        history.refresh()
    assert not {"download", "publish", "update_data"} & set(routes(admin))
    history.close()


def test_a_server_that_cannot_change_data_is_told(patched_history, admin):
    admin.set(rest_version="3.12")
    try:
        with pytest.raises(
            DatasourceError, match=r"takes REST 3\.13 .* speaks 3\.12\. Choose the delivery `republish`"
        ):
            patched_history.refresh()
    finally:
        admin.set(rest_version="3.26")


def test_a_refused_change_is_told_and_nothing_changes(patched_history, admin):
    for code, sentence in {
        403004: r"change the data of datasource .* refused \(403004\).* Give the user.* Nothing was changed\.$",
        413000: r"refused \(413000\).*lower `datasource\.patch_limit_mb`.* Nothing was changed\.$",
    }.items():
        before = patched_history.published_rows()
        patched_history.act(("update", "1", f"'{code}'"))
        admin.fault("status", method="PATCH", path="/data$", times=10, status=code // 1000, code=str(code))
        with pytest.raises(DatasourceError, match=sentence):
            patched_history.refresh()
        assert patched_history.published_rows() == before
        admin.clear_faults()
        assert patched_history.refresh().decision == "none", (
            "what was about to be sent is sent first, and confirmed late"
        )
        assert patched_history.published_rows() == patched_history.source_rows()


@pytest.mark.long
def test_a_datasource_that_is_gone_or_has_another_name_is_created_anew(patched_history):
    patched_history.act(("update", "1", "'b'"))
    looked, version = patched_history.ready_to_publish()
    with patched_history.sandbox.tableau() as server:
        server.datasources.delete(looked.server.datasource.id)
    with pytest.raises(DatasourceError, match=r"undisturbed.*it is gone\)\. Nothing was changed"):
        patched_history.refresher.publish(looked, version)
    assert patched_history.refresh().reason is Reason.FOREIGN_PUBLISH
    assert patched_history.published_rows() == patched_history.source_rows()
    patched_history.act(("update", "1", "'c'"))
    patched_history.refresh(until="published")
    with patched_history.sandbox.tableau() as server:
        item = server.datasources.get_by_id(patched_history.confirmed.datasource_id)
        item.name = f"{patched_history.name} of old"
        server.datasources.update(item)
    assert patched_history.refresh().reason is Reason.FOREIGN_PUBLISH
    assert patched_history.confirmed.datasource_id != item.id
    assert patched_history.published_rows() == patched_history.source_rows()
