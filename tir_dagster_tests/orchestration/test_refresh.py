"""The refresh from end to end: Spark, Hyper, the sandbox's servers, and Dagster's history. The tests tell one story."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import dagster as dg
import pytest

from tir_dagster.definitions import build_defs
from tir_dagster.errors import GuardError, TirError
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.orchestration.metadata import last_confirmation
from tir_dagster.orchestration.resources import environment_resources
from tir_dagster.orchestration.sensing.sensors import Watch
from tir_dagster.retries import RetryPolicy
from tir_dagster.sandbox import sample
from tir_dagster.tableau.client import paced
from tir_dagster_tests.orchestration.reporting import post_as_curl_would, post_by_python, serving, shown_request
from tir_dagster_tests.sandbox.tableau.helpers import Admin


def tag(place, label: str) -> None:
    with place.sandbox.tableau() as server:
        (found,) = server.datasources.filter(name=place.spec.datasource.name)
        server.datasources.add_tags(found, label)


def test_the_first_refresh_loads_everything_and_says_why(place):
    tag(place, "dear")
    Admin(place.sandbox.tableau_url).fault("status", method="PUT", path="/tags$", status=500)
    with paced(RetryPolicy(tries=1)):
        outcome = place.refresh()
    assert (outcome.decision, outcome.reason, outcome.published) == ("full", "FIRST_LOAD", True)
    assert outcome.warnings[-1].endswith(
        "The next refresh puts back the tags of datasource 'mydatasource' in project 'myproject'."
    )
    assert place.published_rows() == place.source_rows()


def test_a_second_refresh_does_nothing_but_look_and_still_warns_of_what_the_first_one_took(place):
    Admin(place.sandbox.tableau_url).fault("status", method="PUT", path="/tags$", status=403, code="403004")
    outcome = place.refresh()
    assert (outcome.decision, outcome.published, len(outcome.run_ids)) == ("none", False, 1)
    assert "spark" not in outcome.stages
    (warning,) = outcome.warnings
    assert "Could not put back the tags (dear)" in warning
    assert warning.endswith("must be set again by hand.")


def test_changes_of_all_kinds_move_only_their_keys(place):
    mix = sample.Mix(inserts=20, updates=15, moves=5, deletes=10)
    sample.change_table(place.sandbox.env, mix=mix, seed=3)
    outcome = place.refresh()
    assert (outcome.decision, outcome.rows_purged, outcome.rows_appended) == ("incremental", 30, 40)
    assert 0 < outcome.stages["publish_server"] < outcome.stages["publish"], "what is waited for is a part of the whole"
    assert place.published_rows() == place.source_rows()


def test_t10_slices_changed_behind_the_watermarks_back_are_equal_again_after_a_resync(place):
    months = sorted(
        row[0]
        for row in place.sql(
            "SELECT DISTINCT TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') FROM MYTABLE WHERE ORDER_DATE IS NOT NULL"
        )
    )
    march, may = months[3], months[5]
    place.sql(
        f"UPDATE MYTABLE SET NOTE = 'behind' WHERE TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') = '{march}' AND ORDER_ID % 3 = 0"
    )
    place.sql(f"DELETE FROM MYTABLE WHERE TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') = '{march}' AND ORDER_ID % 3 = 1")
    place.sql(
        f"UPDATE MYTABLE SET ORDER_DATE = '{may}-02'::DATE WHERE TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') = '{march}' "
        "AND ORDER_ID % 3 = 2 AND ORDER_ID % 2 = 0"
    )
    outcome = place.refresh("slices", (march,))
    assert outcome.decision == "incremental"
    assert place.published_rows() == place.source_rows()


def test_every_refresh_is_in_the_history_with_one_confirmation_each(place):
    key = dg.AssetKey(["orders", "published_datasource"])
    with dagster_instance() as instance:
        events = instance.fetch_materializations(key, limit=10).records
        confirmed = last_confirmation(instance, key)
    assert len(events) == 3
    assert confirmed is not None
    assert confirmed.rows == sum(place.source_rows().values())


def test_an_event_reported_by_hand_does_not_hide_the_confirmation(place):
    key = dg.AssetKey(["orders", "published_datasource"])
    with dagster_instance() as instance:
        before = last_confirmation(instance, key)
        instance.report_runless_asset_event(dg.AssetMaterialization(key, metadata={"note": "by hand"}))
        assert last_confirmation(instance, key) == before


def test_a_deleted_run_is_not_taken_for_somebody_elses_publish(place):
    key = dg.AssetKey(["orders", "published_datasource"])
    with dagster_instance() as instance:
        last = last_confirmation(instance, key)
        (record,) = instance.fetch_materializations(key, limit=2).records[1:]
        instance.delete_run(record.run_id)
        assert last_confirmation(instance, key) != last
    heard: list[str] = []
    outcome = place.refresh(listen=heard.append)
    assert (outcome.decision, outcome.published) == ("none", False)
    assert "an earlier publish of this extract was not recorded; it is confirmed now" in heard
    with dagster_instance() as instance:
        assert last_confirmation(instance, key) == last


def behind_the_watermark(place, note: str) -> dict:
    """A change that no stamp tells of; and the hint that does."""
    ((key,),) = place.sql("SELECT MIN(ORDER_ID) FROM MYTABLE")
    place.sql(f"UPDATE MYTABLE SET NOTE = '{note}' WHERE ORDER_ID = {key}")
    return {"table": place.spec.source, "type": "UPDATE_ROWS", "scope": {"keys": [{"ORDER_ID": int(key)}]}}


def test_a_hint_on_the_command_line_is_looked_at(place):
    hint = behind_the_watermark(place, "hinted")
    outcome = place.run(lambda command: command.refresh("changes", (), allow_empty=False, hints=[json.dumps(hint)]))
    assert (outcome.decision, outcome.rows_appended) == ("incremental", 1)
    assert place.published_rows() == place.source_rows()


@pytest.fixture(scope="module")
def webserver(place) -> Iterator[str]:
    with serving(place.spec_text, place.folder) as url:
        yield url


def asked_of_the_sensor(place, instance) -> str:
    """The run key that a tick asks for, once the source was quiet for long."""
    sensor = build_defs(specs=(place.spec,)).get_repository_def().get_sensor_def("orders_source")
    resources = {"snowflake": environment_resources()["snowflake"]}
    first = sensor(dg.build_sensor_context(instance=instance, resources=resources))
    cursor = replace(Watch.parse(first.cursor), since=0.0).to_cursor()
    (request,) = sensor(dg.build_sensor_context(instance=instance, resources=resources, cursor=cursor)).run_requests
    return str(request.run_key)


def test_hints_that_loads_report_to_dagster_reach_the_next_refresh(place, webserver):
    keys = [str(row[0]) for row in place.sql("SELECT DISTINCT ORDER_ID FROM MYTABLE ORDER BY 1 LIMIT 3")]
    # No stamp tells of it.
    place.sql(f"UPDATE MYTABLE SET NOTE = 'reported' WHERE ORDER_ID IN ({', '.join(keys)})")
    post_as_curl_would(shown_request("curl ").replace("17", keys[0]), webserver)
    post_by_python(shown_request("import os, requests").replace("18", keys[1]), webserver)
    with dagster_instance() as instance:
        # At another extract's table: whoever reads it is reached.
        hint = {"table": place.spec.source, "type": "UPDATE_ROWS", "scope": {"equal": {"ORDER_ID": int(keys[2])}}}
        instance.report_runless_asset_event(
            dg.AssetMaterialization(["elsewhere", "source_table"], metadata={"tir/hint": hint})
        )
        assert "orders/source_table@" in asked_of_the_sensor(place, instance), "a hint is news"
    outcome = place.refresh()
    assert (outcome.decision, outcome.rows_appended) == ("incremental", 3)
    assert place.published_rows() == place.source_rows()
    assert place.refresh().decision == "none"


def test_hints_that_were_used_say_nothing_of_the_next_change(place):
    ((key, newest),) = place.sql("SELECT MAX(ORDER_ID), MAX(UPDATED_AT) FROM MYTABLE")
    place.sql(f"UPDATE MYTABLE SET NOTE = 'stamped', UPDATED_AT = '{newest}' WHERE ORDER_ID = {key}")
    outcome = place.refresh()
    assert (outcome.decision, outcome.warnings) == ("incremental", [])
    assert place.published_rows() == place.source_rows()


def test_a_reported_hint_that_finds_nothing_is_looked_at_once(place, monkeypatch):
    hint = {"table": place.spec.source, "type": "MIXED_CHANGES", "scope": {"equal": {"NOTE": "reported"}}}
    with dagster_instance() as instance:
        event = dg.AssetMaterialization(["orders", "source_table"], metadata={"tir/hint": hint})
        instance.report_runless_asset_event(event)
    with monkeypatch.context() as broken:
        broken.setenv("JAVA_HOME", str(place.folder / "nowhere"))
        broken.setenv("TIR_SPARK_ROWS", "0")
        with pytest.raises(TirError, match="JAVA_HOME"):
            place.refresh()
    after_the_failure, once_more = place.refresh(), place.refresh()
    assert (after_the_failure.decision, "detect" in after_the_failure.stages) == ("none", True), "it was not lost"
    assert "spark" not in after_the_failure.stages, "so few rows need none"
    assert (once_more.decision, len(once_more.run_ids)) == ("none", 1)


def test_t11_a_source_that_lost_most_of_its_rows_stops_the_refresh_and_nothing_changes(place):
    before = place.published_rows()
    place.sql("CREATE TABLE KEPT_ASIDE AS SELECT * FROM MYTABLE")
    place.sql("DELETE FROM MYTABLE WHERE ORDER_ID % 2 = 0")
    with pytest.raises(GuardError, match="rows would vanish"):
        place.refresh()
    place.sql("TRUNCATE TABLE MYTABLE")
    with pytest.raises(GuardError, match="the source is empty"):
        place.refresh()
    assert place.published_rows() == before
    place.sql("INSERT INTO MYTABLE SELECT * FROM KEPT_ASIDE")
    assert place.refresh().decision == "none"
    assert place.published_rows() == before


def test_somebody_elses_refresh_is_noticed_and_replaced_by_a_full_one(place):
    with place.sandbox.tableau() as server:
        (found,) = [item for item in server.datasources.get()[0] if item.name == "mydatasource"]
        place.sql("UPDATE MYTABLE SET NOTE = 'theirs' WHERE ORDER_ID % 100 = 0")
        job = server.datasources.refresh(found)
        server.jobs.wait_for_job(job)
    outcome = place.refresh()
    assert outcome.decision in ("full", "incremental")
    assert place.published_rows() == place.source_rows()


def test_t9_nulls_and_duplicates_in_the_row_key_are_replaced_as_bags_with_a_warning(place):
    columns = "ORDER_ID, ORDER_DATE, CUSTOMER, QUANTITY, UPDATED_AT"
    stamp = "DATEADD('day', 400, CURRENT_TIMESTAMP()::TIMESTAMP_NTZ)"
    place.sql("ALTER TABLE MYTABLE ALTER COLUMN ORDER_ID DROP NOT NULL")
    place.sql(f"INSERT INTO MYTABLE ({columns}) SELECT NULL, NULL, 'nobody', 1, {stamp}")
    place.sql(
        f"INSERT INTO MYTABLE ({columns}) SELECT ORDER_ID, ORDER_DATE, 'twin', 2, {stamp} FROM MYTABLE "
        "WHERE ORDER_ID = (SELECT MAX(ORDER_ID) FROM MYTABLE)"
    )
    outcome = place.refresh()
    assert place.published_rows() == place.source_rows()
    assert any("NULL in the row key" in warning for warning in outcome.warnings)
    assert any("more than one row" in warning for warning in outcome.warnings)
