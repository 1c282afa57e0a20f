"""The sensors' decisions as tables and properties, and the sensors themselves against the sandbox's warehouse."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import dagster as dg
import pytest
import requests
from dagster_snowflake import SnowflakeResource
from hypothesis import given
from hypothesis import strategies as st
from pyspark import SparkContext

from tir_dagster.definitions import build_defs
from tir_dagster.orchestration.io_managers import StateFolder
from tir_dagster.orchestration.metadata import CONFIRMATION
from tir_dagster.orchestration.partitions import HELD, RANGE_END, RANGE_START, add_slices
from tir_dagster.orchestration.resources import TableauResource, environment_resources
from tir_dagster.orchestration.sensing.sensors import (
    BACK_OFF,
    CHANGE_SET_TAG,
    Attempts,
    Ready,
    Watch,
    back_off,
    budget_wait,
    refresh_due,
    watch_source,
)
from tir_dagster.refresh.state.call_budget import CallBudget
from tir_dagster.refresh.state.hold import Hold, HoldFile
from tir_dagster.spec.reading import parse_specs
from tir_dagster.spec.tables import Slices
from tir_dagster.tableau.calls import Budget
from tir_dagster_tests.orchestration.confirmations import confirmation, moment
from tir_dagster_tests.sandbox.tableau.helpers import Admin

SOURCE_TABLE, CHANGED_KEYS, PUBLISHED = (
    dg.AssetKey(["orders", name]) for name in ("source_table", "changed_keys", "published_datasource")
)


# The source sensor's decision


def seen_long_ago(token: str, **more) -> Watch:
    return Watch(token=token, since=0.0, **more)


@pytest.mark.parametrize(
    ("before", "last", "reason"),
    [
        (Watch(), "done", "quiet for 0 of 10 seconds"),
        (Watch(token="new", since=995.0), "done", "quiet for 5 of 10 seconds"),
        (Watch(token="newer", since=0.0), "done", "quiet for 0 of 10 seconds"),
        (seen_long_ago("new"), "done", ""),
        (seen_long_ago("new", requested="old"), "done", ""),
        (seen_long_ago("new", requested="old"), "failed", ""),
        (seen_long_ago("new", requested="old"), "running", "a detection is running"),
        (seen_long_ago("new", requested="new", asked=990.0), "running", "a detection is running"),
        (seen_long_ago("new", requested="new", asked=1.0), "done", "this change was already checked"),
        (seen_long_ago("new", requested="new", asked=990.0), "failed", "next attempt is in 50 seconds"),
        (seen_long_ago("new", requested="new", asked=900.0), "failed", ""),
        (seen_long_ago("new", requested="new", asked=900.0, attempt=1), "failed", "next attempt is in 20 seconds"),
    ],
)
def test_what_the_source_sensor_does(before, last, reason):
    _, waiting = watch_source(before, token="new", confirmed="old", last=last, now=1000.0, quiet=10.0)
    assert (waiting == "") == (reason == "")
    assert reason in waiting


def test_a_confirmed_source_is_left_alone_whatever_happened_before():
    before = seen_long_ago("same", requested="same", attempt=3)
    _, waiting = watch_source(before, token="same", confirmed="same", last="failed", now=1e6, quiet=1.0)
    assert "not changed since the last confirmation" in waiting


def test_each_attempt_waits_longer_and_a_new_change_starts_over():
    watch, now, asked = seen_long_ago("new"), 1000.0, []
    for _ in range(300):
        watch, waiting = watch_source(watch, token="new", confirmed=None, last="failed", now=now, quiet=1.0)
        asked += [] if waiting else [now]
        now += 30.0
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert gaps == [60, 120, 240, 480, 960, 1920, 3600]
    watch, _ = watch_source(watch, token="newer", confirmed=None, last="failed", now=now, quiet=1.0)
    watch, waiting = watch_source(watch, token="newer", confirmed=None, last="failed", now=now + 1, quiet=1.0)
    assert (waiting, watch.attempt) == ("", 0)


def test_the_back_off_never_exceeds_its_limit():
    assert [back_off(0), back_off(1), back_off(1000)] == [0.0, 60.0, BACK_OFF.most_seconds]


@given(
    ticks=st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0.1, 40.0), st.sampled_from(["running", "done", "failed"])),
        max_size=30,
    )
)
def test_never_starts_while_the_source_changes_and_a_burst_is_one_request(ticks):
    quiet, now, watch = 10.0, 1000.0, Watch()
    same_since, previous, asked = now, None, []
    for token, seconds, last in ticks:
        now += seconds
        same_since = same_since if token == previous else now
        previous = token
        watch, waiting = watch_source(watch, token=token, confirmed=None, last=last, now=now, quiet=quiet)
        if waiting == "":
            assert now - same_since >= quiet
            assert last != "running" or not asked
            # The same change again only after a failure, and not at once.
            assert not asked or asked[-1][0] != token or (last == "failed" and now - asked[-1][1] >= 60)
            asked.append((token, now))
        assert Watch.parse(watch.to_cursor()) == watch


@pytest.mark.parametrize("cursor", [None, "", "nonsense", "[]", '{"unknown": 1}'])
def test_a_lost_or_foreign_cursor_starts_from_nothing(cursor):
    assert Watch.parse(cursor) == Watch()


# The refresh sensor's decision


READY = Ready("cs2", moment(5), ("2025-02",))


@pytest.mark.parametrize(
    ("ready", "confirmed", "attempts", "busy", "expected"),
    [
        (None, None, Attempts(), False, (None, "no change set is ready")),
        (READY, None, Attempts(), False, ("cs2", "")),
        (READY, confirmation("cs1", minute=1), Attempts(), False, ("cs2", "")),
        (READY, confirmation("cs1", "cs2", minute=5), Attempts(), False, (None, "change set cs2 is published")),
        (READY, confirmation("cs3", minute=9), Attempts(), False, (None, "change set cs2 is published")),
        (READY, None, Attempts(), True, (None, "a refresh is running")),
        (READY, None, Attempts(1, "failed", 990.0), False, (None, "next attempt is in 50 seconds")),
        (READY, None, Attempts(1, "failed", 900.0), False, ("cs2-1", "")),
        (READY, None, Attempts(2, "failed", 900.0), False, (None, "next attempt is in 20 seconds")),
        (READY, None, Attempts(1, "done", 1.0), False, (None, "nothing to publish")),
    ],
)
def test_what_the_refresh_sensor_does(ready, confirmed, attempts, busy, expected):
    key, reason = refresh_due(ready, confirmed=confirmed, attempts=attempts, busy=busy, now=1000.0)
    assert key == expected[0]
    assert expected[1] in reason


def test_a_refresh_waits_for_the_calls_that_tableau_allows(tmp_path):
    cloud = TableauResource(
        server_url="https://10ax.online.tableau.com", token_name="t", token_secret="s", publishes_per_hour=2
    )
    state, spec = StateFolder(path=str(tmp_path)), an_extract()
    assert budget_wait(spec, cloud, state) == ""
    used = CallBudget(tmp_path, cloud.access(), "margins")
    for _ in range(2):
        used.count(Budget.PUBLISHES)
    assert "no more publishes and updates of datasources before" in budget_wait(spec, cloud, state)
    assert budget_wait(replace(spec, delivery="trigger"), cloud, state) == "", "it needs none of them"
    more = cloud.model_copy(update={"publishes_per_hour": 0})
    assert budget_wait(spec, more, state) == ""


# The sensors themselves

SPEC = """\
extracts:
  - name: orders
    source: MYDB.MYSCHEMA.SENSED
    row_key: ID
    slices: {column: DAY, by: month, start: 2025-01}
    datasource: {project: myproject, name: sensed}
    thresholds: {quiet_period: QUIET}
"""


def an_extract(quiet: str = "0 seconds", source: str = "SENSED"):
    (spec,) = parse_specs(SPEC.replace("QUIET", quiet).replace("SENSED", source), "test.yaml")
    return spec


@pytest.fixture
def warehouse(seeded, monkeypatch, tmp_path):
    """The sandbox with a table of this test's own."""
    for name, value in seeded.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TIR_HOME", str(tmp_path))
    with seeded.snowflake(database="MYDB", schema="MYSCHEMA") as connection:
        connection.cursor().execute("CREATE OR REPLACE TABLE SENSED (ID INT NOT NULL, DAY DATE, NOTE VARCHAR)")
        connection.cursor().execute("INSERT INTO SENSED VALUES (1, '2025-02-01', 'a'), (2, NULL, 'b')")
        yield connection.cursor()


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


def source_tick(instance, spec, cursor: str | None = None):
    """One evaluation. Called as a function: evaluate_tick cannot resolve a partition that the same tick adds."""
    sensor = build_defs(specs=(spec,)).get_repository_def().get_sensor_def("orders_source")
    resources = {name: environment_resources()[name] for name in ("snowflake", "state")}
    return sensor(dg.build_sensor_context(instance=instance, cursor=cursor, resources=resources))


def refresh_tick(instance, spec):
    repository = build_defs(specs=(spec,)).get_repository_def()
    resources = {name: environment_resources()[name] for name in ("tableau", "state")}
    context = dg.build_sensor_context(instance=instance, repository_def=repository, resources=resources)
    return repository.get_sensor_def("orders_refresh").evaluate_tick(context)


def test_a_changed_and_quiet_source_starts_one_detection_and_is_observed(warehouse, instance):
    result = source_tick(instance, an_extract())
    (request,) = result.run_requests
    (added,) = result.dynamic_partitions_requests
    assert added.partition_keys == [request.partition_key]
    (observed,) = result.asset_events
    assert observed.metadata["dagster/row_count"].value == 2
    columns = observed.metadata["dagster/column_schema"].schema.columns
    assert [(column.name, column.type, column.constraints.nullable) for column in columns] == [
        ("ID", "BIGINT", False),
        ("DAY", "DATE", True),
        ("NOTE", "TEXT", True),
    ]
    token = observed.metadata["tir/token"].value
    assert request.run_key.startswith(f"orders-{token}/"), "the token, and what the spec says"
    assert request.run_key == f"orders-{Watch.parse(result.cursor).requested}"


def test_dagsters_own_snowflake_resource_may_stand_in_the_place_of_ours(warehouse, instance, seeded):
    env = seeded.env
    resources = {
        "snowflake": SnowflakeResource(
            account=env["SNOWFLAKE_ACCOUNT"],
            user=env["SNOWFLAKE_USER"],
            password=dg.EnvVar("SNOWFLAKE_PASSWORD"),
            additional_snowflake_connection_args={
                "host": env["SNOWFLAKE_HOST"],
                "port": int(env["SNOWFLAKE_PORT"]),
                "protocol": env["SNOWFLAKE_PROTOCOL"],
            },
        )
    }
    spec = an_extract()
    sensor = (
        build_defs(specs=(spec,), resource_overrides=resources).get_repository_def().get_sensor_def("orders_source")
    )
    state = {"state": environment_resources()["state"]}
    by_theirs = sensor(dg.build_sensor_context(instance=instance, resources={**resources, **state}))
    by_ours = source_tick(instance, spec)
    assert [request.run_key for request in by_theirs.run_requests] == [
        request.run_key for request in by_ours.run_requests
    ]


def test_a_source_that_just_changed_is_waited_for(warehouse, instance):
    spec = an_extract("1 hour")
    result = source_tick(instance, spec)
    assert (result.run_requests or []) == []
    assert "quiet for 0 of 3600 seconds" in result.skip_reason.skip_message
    earlier = replace(Watch.parse(result.cursor), since=time.time() - 3601)
    warehouse.execute("INSERT INTO SENSED VALUES (3, NULL, 'c')")
    again = source_tick(instance, spec, earlier.to_cursor())
    assert "quiet for 0 of 3600 seconds" in again.skip_reason.skip_message
    settled = replace(Watch.parse(again.cursor), since=time.time() - 3601)
    assert len(source_tick(instance, spec, settled.to_cursor()).run_requests) == 1


def test_a_confirmed_source_asks_for_nothing(warehouse, instance):
    confirm_what_is_there(instance, an_extract())
    result = source_tick(instance, an_extract())
    assert "has not changed since the last confirmation" in result.skip_reason.skip_message


def test_a_refresh_that_tableau_told_of_asks_for_one_detection_though_the_source_is_the_same(warehouse, instance):
    token, _, definition = str(Watch.parse(source_tick(instance, an_extract()).cursor).token).partition("/")
    confirmed = confirmation("cs1", token=token, definition=definition).to_json()
    instance.report_runless_asset_event(dg.AssetMaterialization(PUBLISHED, metadata={CONFIRMATION: confirmed}))
    event = {"tir/webhook_event": "DatasourceRefreshSucceeded", "tir/webhook_at": moment(9)}
    instance.report_runless_asset_event(dg.AssetObservation(PUBLISHED, metadata=event))
    result = source_tick(instance, an_extract())
    assert [request.run_key for request in result.run_requests] == [
        f"orders-{token}/{definition}/refreshed@{moment(9)}"
    ]
    looked_at = replace(Watch.parse(result.cursor), change_set=None)
    again = source_tick(instance, an_extract(), looked_at.to_cursor())
    assert "already checked" in again.skip_reason.skip_message


def confirm_what_is_there(instance, spec) -> None:
    token, _, definition = str(Watch.parse(source_tick(instance, spec).cursor).token).partition("/")
    confirmed = confirmation("cs1", token=token, definition=definition).to_json()
    instance.report_runless_asset_event(dg.AssetMaterialization(PUBLISHED, metadata={CONFIRMATION: confirmed}))


def asked_of_the_warehouse(sandbox) -> list[str]:
    url = f"http://{sandbox.env['SNOWFLAKE_HOST']}:{sandbox.env['SNOWFLAKE_PORT']}/sandbox/queries"
    asked = [row["sql"] for row in requests.get(url, timeout=30).json()["queries"]]
    requests.delete(url, timeout=30).raise_for_status()
    return asked


def test_a_hundred_ticks_without_a_change_ask_one_query_each_and_nobody_else(seeded, warehouse, instance):
    spec = an_extract()
    confirm_what_is_there(instance, spec)
    sensor = build_defs(specs=(spec,)).get_repository_def().get_sensor_def("orders_source")
    resources = {name: environment_resources()[name] for name in ("snowflake", "state")}
    tableau, spark = Admin(seeded.tableau_url), SparkContext._active_spark_context
    tableau.forget_calls()
    asked_of_the_warehouse(seeded)
    cursor = None
    for _ in range(100):
        result = sensor(dg.build_sensor_context(instance=instance, cursor=cursor, resources=resources))
        assert "has not changed since the last confirmation" in result.skip_reason.skip_message
        cursor = result.cursor
    asked = asked_of_the_warehouse(seeded)
    assert len(asked) == 100
    assert all("SYSTEM$LAST_CHANGE_COMMIT_TIME" in sql for sql in asked)
    assert tableau.calls() == []
    assert SparkContext._active_spark_context is spark


def test_two_extracts_of_one_table_probe_it_once_and_both_learn_of_a_change(seeded, warehouse, instance):
    spec = an_extract()
    both = (spec, replace(spec, name="orders_too"))
    repository = build_defs(specs=both).get_repository_def()
    resources = {name: environment_resources()[name] for name in ("snowflake", "state")}
    for _ in range(2):
        asked_of_the_warehouse(seeded)
        warehouse.execute("INSERT INTO SENSED VALUES (3, NULL, 'c')")
        for name in ("orders", "orders_too"):
            sensor = repository.get_sensor_def(f"{name}_source")
            result = sensor(dg.build_sensor_context(instance=instance, resources=resources))
            assert len(result.run_requests) == 1
        probes = [sql for sql in asked_of_the_warehouse(seeded) if "SYSTEM$LAST_CHANGE_COMMIT_TIME" in sql]
        assert len(probes) == 1, "and each round sees its own change"


def test_by_condition_a_change_is_reported_as_an_update_of_the_source_once(warehouse, instance):
    spec = replace(an_extract(), automation="condition")
    first = source_tick(instance, spec)
    (event,) = first.asset_events
    assert isinstance(event, dg.AssetMaterialization)
    assert (event.asset_key, event.metadata["dagster/row_count"].value) == (SOURCE_TABLE, 2)
    assert (first.run_requests or []) == []
    again = source_tick(instance, spec, first.cursor)
    assert "already checked" in again.skip_reason.skip_message


def test_a_changed_spec_asks_for_a_detection_though_the_source_is_the_same(warehouse, instance):
    token, _, _ = str(Watch.parse(source_tick(instance, an_extract()).cursor).token).partition("/")
    confirmed = confirmation("cs1", token=token, definition="another").to_json()
    instance.report_runless_asset_event(dg.AssetMaterialization(PUBLISHED, metadata={CONFIRMATION: confirmed}))
    assert len(source_tick(instance, an_extract()).run_requests) == 1


def test_a_source_that_cannot_be_read_is_skipped_with_the_reason(warehouse, instance):
    result = source_tick(instance, an_extract(source="NOT_THERE"))
    assert isinstance(result, dg.SkipReason)
    assert "could not be read" in result.skip_message
    assert "NOT_THERE" in result.skip_message


def test_a_failed_detection_is_asked_for_again_later_under_another_key(warehouse, instance, monkeypatch):
    spec = an_extract()
    first = source_tick(instance, spec)
    (request,) = first.run_requests
    run_detection(instance, spec, request, monkeypatch)
    waiting = source_tick(instance, spec, first.cursor)
    assert "the detection failed; the next attempt is in" in waiting.skip_reason.skip_message
    later = replace(Watch.parse(waiting.cursor), asked=time.time() - 61)
    again = source_tick(instance, spec, later.to_cursor())
    assert [one.run_key for one in again.run_requests] == [f"{request.run_key}-1"]
    assert again.run_requests[0].partition_key != request.partition_key


def run_detection(instance, spec, request, monkeypatch):
    """The detection that was asked for, which fails at once: nobody said where Tableau is."""
    with monkeypatch.context() as patch:
        patch.delenv("TABLEAU_SERVER_URL")
        instance.add_dynamic_partitions("orders_change_sets", [request.partition_key])
        job = build_defs(specs=(spec,)).resolve_job_def("orders_detect")
        done = job.execute_in_process(
            instance=instance, partition_key=request.partition_key, tags=request.tags, raise_on_error=False
        )
    assert not done.success


def staged(instance, ident: str, *, minute: int, touched: list[str]) -> None:
    metadata = {"tir/touched": touched, "tir/source_version": moment(minute)}
    instance.report_runless_asset_event(dg.AssetMaterialization(CHANGED_KEYS, partition=ident, metadata=metadata))


def test_a_finished_change_set_starts_its_refresh_over_the_covering_range(instance):
    staged(instance, "cs1", minute=1, touched=["2025-02", "2025-05"])
    (request,) = refresh_tick(instance, an_extract()).run_requests
    assert request.run_key == "cs1"
    assert request.tags[RANGE_START] == "2025-02"
    assert request.tags[RANGE_END] == "2025-05"
    assert request.tags[CHANGE_SET_TAG] == "cs1"
    assert request.run_config == {"ops": {"orders__purged_extract": {"config": {"change_set": "cs1"}}}}


def test_values_that_a_change_set_touches_become_partitions_and_those_without_rows_go(instance):
    spec = replace(an_extract(), slices=Slices("value", "NOTE"))
    add_slices(instance, spec, ["old", "kept"])
    held = {CONFIRMATION: confirmation("cs0").to_json(), HELD: ["kept"]}
    instance.report_runless_asset_event(dg.AssetMaterialization(PUBLISHED, metadata=held))
    staged(instance, "cs1", minute=1, touched=["new", "kept"])
    tick = refresh_tick(instance, spec)
    (request,) = tick.run_requests
    assert (request.tags[RANGE_START], request.tags[RANGE_END]) == ("kept", "new")
    asked = {type(request).__name__: list(request.partition_keys) for request in tick.dynamic_partitions_requests}
    assert asked == {"AddDynamicPartitionsRequest": ["new"], "DeleteDynamicPartitionsRequest": ["old"]}


def test_of_several_change_sets_only_the_newest_is_asked_for(instance):
    staged(instance, "cs1", minute=1, touched=["2025-02"])
    staged(instance, "cs2", minute=2, touched=["2025-03"])
    # Reported by hand: it is no change set of ours.
    instance.report_runless_asset_event(dg.AssetMaterialization(CHANGED_KEYS, partition="by_hand"))
    assert [request.run_key for request in refresh_tick(instance, an_extract()).run_requests] == ["cs2"]


def test_a_failed_refresh_is_asked_for_again_later(instance, monkeypatch, tmp_path):
    for name in ("TABLEAU_SERVER_URL", "SNOWFLAKE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SNOWFLAKE_ACCOUNT", "SNOWFLAKE_USER", "SNOWFLAKE_PASSWORD"):
        monkeypatch.setenv(name, "nobody")
    monkeypatch.setenv("TIR_HOME", str(tmp_path))
    spec = an_extract()
    staged(instance, "cs1", minute=1, touched=["2025-02"])
    (request,) = refresh_tick(instance, spec).run_requests
    job = build_defs(specs=(spec,)).resolve_job_def("orders_refresh")
    done = job.execute_in_process(
        instance=instance, tags=request.tags, run_config=request.run_config, raise_on_error=False
    )
    assert not done.success
    again = refresh_tick(instance, spec)
    assert again.run_requests == []
    assert "the refresh failed; the next attempt is in" in again.skip_message


def test_while_an_extract_is_on_hold_no_sensor_starts_anything(warehouse, instance, tmp_path, monkeypatch):
    monkeypatch.setenv("TIR_HOME", str(tmp_path))
    HoldFile(tmp_path / "extracts" / "orders").put(Hold("yesterday", "somebody", "a mistake in the load"))
    for skipped in (source_tick(instance, an_extract()), refresh_tick(instance, an_extract())):
        text = getattr(skipped, "skip_message", None) or str(skipped)
        assert "on hold since yesterday by somebody (a mistake in the load)" in text
