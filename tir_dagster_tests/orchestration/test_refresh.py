"""The refresh from end to end: Spark, Hyper, the sandbox's servers, and Dagster's history."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest

from tir_dagster.definitions import build_defs
from tir_dagster.errors import GuardError, TirError
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.orchestration.resources import environment_resources
from tir_dagster.orchestration.sensing.sensors import Watch
from tir_dagster.retries import RetryPolicy
from tir_dagster.sandbox import sample
from tir_dagster.tableau.client import paced
from tir_dagster_tests.orchestration.conftest import Place
from tir_dagster_tests.orchestration.reporting import post_as_curl_would, post_by_python, serving, shown_request
from tir_dagster_tests.sandbox.tableau.helpers import Admin

ASSET = dg.AssetKey(["orders", "published_datasource"])


@pytest.fixture
def unloaded(place):
    """The extract as declared: no state of its own and no history, whatever tests before this one made."""
    shutil.rmtree(place.folder / "state" / "extracts", ignore_errors=True)
    with dagster_instance() as instance:
        instance.wipe()
    return place


def test_the_first_refresh_loads_everything_and_the_second_only_looks_and_warns_of_what_the_first_one_took(unloaded):
    unloaded.tag("dear")
    admin = Admin(unloaded.sandbox.tableau_url)
    admin.fault("status", method="PUT", path="/tags$", status=500)
    with paced(RetryPolicy(tries=1)):
        first = unloaded.refresh()
    assert (first.decision, first.reason, first.published) == ("full", "FIRST_LOAD", True)
    assert first.warnings[-1].endswith(
        "The next refresh puts back the tags of datasource 'mydatasource' in project 'myproject'."
    )
    assert unloaded.published_rows() == unloaded.source_rows()

    admin.fault("status", method="PUT", path="/tags$", status=403, code="403004")
    second = unloaded.refresh()
    assert (second.decision, second.published, len(second.run_ids)) == ("none", False, 1)
    assert "spark" not in second.stages
    (warning,) = second.warnings
    assert "Could not put back the tags (dear)" in warning
    assert warning.endswith("must be set again by hand.")


def test_a_refresh_too_small_for_spark_removes_what_a_crash_left_in_the_staging_place(place, tmp_path, monkeypatch):
    left = tmp_path / f"tir-{datetime.now(UTC) - timedelta(days=2):%Y%m%dT%H%M%S}Z-0123456789ab" / "part-1.parquet"
    left.parent.mkdir()
    left.write_bytes(b"rows")
    monkeypatch.setenv("TIR_STAGING", str(tmp_path))

    outcome = place.refresh()

    assert "spark" not in outcome.stages
    assert list(tmp_path.iterdir()) == []


def confirmations() -> int:
    """How many events of the history confirm a publish."""
    with dagster_instance() as instance:
        return len(instance.fetch_materializations(ASSET, limit=100).records)


def test_changes_of_all_kinds_move_only_their_keys_and_are_confirmed_once(loaded):
    before = confirmations()
    mix = sample.Mix(inserts=20, updates=15, moves=5, deletes=10)
    sample.change_table(loaded.sandbox.env, mix=mix, seed=3)
    outcome = loaded.refresh()
    assert (outcome.decision, outcome.rows_purged, outcome.rows_appended) == ("incremental", 30, 40)
    assert 0 < outcome.stages["publish_server"] < outcome.stages["publish"], "what is waited for is a part of the whole"
    assert loaded.published_rows() == loaded.source_rows()
    assert confirmations() == before + 1
    assert loaded.confirmation().rows == sum(loaded.source_rows().values())


def test_t10_slices_changed_behind_the_watermarks_back_are_equal_again_after_a_resync(loaded):
    months = sorted(
        row[0]
        for row in loaded.sql(
            "SELECT DISTINCT TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') FROM MYTABLE WHERE ORDER_DATE IS NOT NULL"
        )
    )
    march, may = months[3], months[5]
    loaded.sql(
        f"UPDATE MYTABLE SET NOTE = 'behind' WHERE TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') = '{march}' AND ORDER_ID % 3 = 0"
    )
    loaded.sql(f"DELETE FROM MYTABLE WHERE TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') = '{march}' AND ORDER_ID % 3 = 1")
    loaded.sql(
        f"UPDATE MYTABLE SET ORDER_DATE = '{may}-02'::DATE WHERE TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') = '{march}' "
        "AND ORDER_ID % 3 = 2 AND ORDER_ID % 2 = 0"
    )
    outcome = loaded.refresh("slices", (march,))
    assert outcome.decision == "incremental"
    assert loaded.published_rows() == loaded.source_rows()


def test_an_event_reported_by_hand_does_not_hide_the_confirmation(loaded):
    before = loaded.confirmation()
    with dagster_instance() as instance:
        instance.report_runless_asset_event(dg.AssetMaterialization(ASSET, metadata={"note": "by hand"}))
    assert loaded.confirmation() == before


def test_a_deleted_run_is_not_taken_for_somebody_elses_publish(loaded):
    last = loaded.confirmation()
    with dagster_instance() as instance:
        records = instance.fetch_materializations(ASSET, limit=100).records
        instance.delete_run(next(record.run_id for record in records if record.run_id))
    assert loaded.confirmation() != last
    heard: list[str] = []
    outcome = loaded.refresh(listen=heard.append)
    assert (outcome.decision, outcome.published) == ("none", False)
    assert "an earlier publish of this extract was not recorded; it is confirmed now" in heard
    # How far the server's jobs are known is newer.
    assert replace(loaded.confirmation(), jobs_until=last.jobs_until) == last


def behind_the_watermark(place: Place, note: str) -> dict:
    """A change that no stamp tells of; and the hint that does."""
    ((key,),) = place.sql("SELECT MIN(ORDER_ID) FROM MYTABLE")
    place.sql(f"UPDATE MYTABLE SET NOTE = '{note}' WHERE ORDER_ID = {key}")
    return {"table": place.spec.source, "type": "UPDATE_ROWS", "scope": {"keys": [{"ORDER_ID": int(key)}]}}


def test_a_hint_on_the_command_line_is_looked_at(loaded):
    hint = behind_the_watermark(loaded, "hinted")
    outcome = loaded.run(lambda command: command.refresh("changes", (), allow_empty=False, hints=[json.dumps(hint)]))
    assert (outcome.decision, outcome.rows_appended) == ("incremental", 1)
    assert loaded.published_rows() == loaded.source_rows()


@pytest.fixture(scope="module")
def webserver(place) -> Iterator[str]:
    with serving(place.spec_text, place.folder) as url:
        yield url


def asked_of_the_sensor(place: Place, instance) -> str:
    """The run key that a tick asks for, once the source was quiet for long."""
    sensor = build_defs(specs=(place.spec,)).get_repository_def().get_sensor_def("orders_source")
    resources = {name: environment_resources()[name] for name in ("snowflake", "state")}
    first = sensor(dg.build_sensor_context(instance=instance, resources=resources))
    cursor = replace(Watch.parse(first.cursor), since=0.0).to_cursor()
    (request,) = sensor(dg.build_sensor_context(instance=instance, resources=resources, cursor=cursor)).run_requests
    return str(request.run_key)


def test_hints_that_loads_report_to_dagster_reach_the_next_refresh_and_no_later_one(loaded, webserver):
    keys = [str(row[0]) for row in loaded.sql("SELECT DISTINCT ORDER_ID FROM MYTABLE ORDER BY 1 LIMIT 3")]
    # No stamp tells of it.
    loaded.sql(f"UPDATE MYTABLE SET NOTE = 'reported' WHERE ORDER_ID IN ({', '.join(keys)})")
    post_as_curl_would(shown_request("curl ").replace("17", keys[0]), webserver)
    post_by_python(shown_request("import os, requests").replace("18", keys[1]), webserver)
    with dagster_instance() as instance:
        # At another extract's table: whoever reads it is reached.
        hint = {"table": loaded.spec.source, "type": "UPDATE_ROWS", "scope": {"equal": {"ORDER_ID": int(keys[2])}}}
        instance.report_runless_asset_event(
            dg.AssetMaterialization(["elsewhere", "source_table"], metadata={"tir/hint": hint})
        )
        assert "orders/source_table@" in asked_of_the_sensor(loaded, instance), "a hint is news"
    outcome = loaded.refresh()
    assert (outcome.decision, outcome.rows_appended) == ("incremental", 3)
    assert loaded.published_rows() == loaded.source_rows()
    assert loaded.refresh().decision == "none"

    # Hints that were used say nothing of the next change.
    ((key, newest),) = loaded.sql("SELECT MAX(ORDER_ID), MAX(UPDATED_AT) FROM MYTABLE")
    loaded.sql(f"UPDATE MYTABLE SET NOTE = 'stamped', UPDATED_AT = '{newest}' WHERE ORDER_ID = {key}")
    later = loaded.refresh()
    assert (later.decision, later.warnings) == ("incremental", [])
    assert loaded.published_rows() == loaded.source_rows()


def test_a_reported_hint_that_finds_nothing_is_looked_at_once(loaded, monkeypatch):
    ((note,),) = loaded.sql("SELECT MIN(NOTE) FROM MYTABLE")
    hint = {"table": loaded.spec.source, "type": "MIXED_CHANGES", "scope": {"equal": {"NOTE": note}}}
    with dagster_instance() as instance:
        event = dg.AssetMaterialization(["orders", "source_table"], metadata={"tir/hint": hint})
        instance.report_runless_asset_event(event)
    with monkeypatch.context() as broken:
        broken.setenv("JAVA_HOME", str(loaded.folder / "nowhere"))
        broken.setenv("TIR_SPARK_ROWS", "0")
        with pytest.raises(TirError, match="JAVA_HOME"):
            loaded.refresh()
    after_the_failure, once_more = loaded.refresh(), loaded.refresh()
    assert (after_the_failure.decision, "detect" in after_the_failure.stages) == ("none", True), "it was not lost"
    assert "spark" not in after_the_failure.stages, "so few rows need none"
    assert (once_more.decision, len(once_more.run_ids)) == ("none", 1)


def test_t11_a_source_that_lost_most_of_its_rows_stops_the_refresh_and_nothing_changes(restored):
    before = restored.published_rows()
    restored.sql("DELETE FROM MYTABLE WHERE ORDER_ID % 2 = 0")
    with pytest.raises(GuardError, match="rows would vanish"):
        restored.refresh()
    restored.sql("TRUNCATE TABLE MYTABLE")
    with pytest.raises(GuardError, match="the source is empty"):
        restored.refresh()
    assert restored.published_rows() == before
    restored.sql("INSERT INTO MYTABLE SELECT * FROM KEPT_ASIDE")
    assert restored.refresh().decision == "none"
    assert restored.published_rows() == before


def test_somebody_elses_refresh_is_noticed_and_replaced_by_a_full_one(loaded):
    with loaded.sandbox.tableau() as server:
        (datasource,) = [item for item in server.datasources.get()[0] if item.name == "mydatasource"]
        loaded.sql("UPDATE MYTABLE SET NOTE = 'theirs' WHERE ORDER_ID % 100 = 0")
        job = server.datasources.refresh(datasource)
        server.jobs.wait_for_job(job)
    outcome = loaded.refresh()
    assert outcome.decision in ("full", "incremental")
    assert loaded.published_rows() == loaded.source_rows()


def test_t9_nulls_and_duplicates_in_the_row_key_are_replaced_as_bags_with_a_warning(restored):
    columns = "ORDER_ID, ORDER_DATE, CUSTOMER, QUANTITY, UPDATED_AT"
    stamp = "DATEADD('day', 400, CURRENT_TIMESTAMP()::TIMESTAMP_NTZ)"
    restored.sql("ALTER TABLE MYTABLE ALTER COLUMN ORDER_ID DROP NOT NULL")
    restored.sql(f"INSERT INTO MYTABLE ({columns}) SELECT NULL, NULL, 'nobody', 1, {stamp}")
    restored.sql(
        f"INSERT INTO MYTABLE ({columns}) SELECT ORDER_ID, ORDER_DATE, 'twin', 2, {stamp} FROM MYTABLE "
        "WHERE ORDER_ID = (SELECT MAX(ORDER_ID) FROM MYTABLE)"
    )
    outcome = restored.refresh()
    assert restored.published_rows() == restored.source_rows()
    assert any("NULL in the row key" in warning for warning in outcome.warnings)
    assert any("more than one row" in warning for warning in outcome.warnings)
