"""Extracts that Tableau refreshes itself: a change starts the server's refresh once, and what it loaded is confirmed."""

from __future__ import annotations

import datetime as dt
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from click.testing import CliRunner, Result
from tableauhyperapi import HyperProcess, Telemetry

from tir_dagster.changes.plan import Reason, SourceState
from tir_dagster.changes.relation import watched_tables
from tir_dagster.cli.main import tir
from tir_dagster.definitions import build_defs
from tir_dagster.errors import SourceError
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.orchestration.metadata import last_confirmation
from tir_dagster.orchestration.resources import environment_resources
from tir_dagster.orchestration.sensing.sensors import Watch
from tir_dagster.refresh.context import refresh_context
from tir_dagster.refresh.deliveries.trigger import no_spark, plan_trigger, refresh_on_server, watch
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.survey import Watched, watch_tables
from tir_dagster.sandbox.tableau.packages import Column, SnowflakeConnection, build_tdsx
from tir_dagster.sandbox.tableau.settings import Settings
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.versions import SourceVersion, combined_token, probe
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster.tableau.access import TableauAccess
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.conftest import download
from tir_dagster_tests.packages import plain
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.sandbox.tableau.helpers import Admin, Looker

DATABASE, PROJECT = "TRIGGERS", "triggers"
JOINED = "SELECT O.ID, O.AMOUNT, C.NAME FROM {orders} O LEFT JOIN {customers} C ON O.CUSTOMER = C.ID"
FAILED, WRONG_USAGE = 1, 2


@dataclass
class Shop:
    """Two tables, a datasource whose extract joins them by custom SQL, and an extract declared on it."""

    sandbox: Sandbox
    folder: Path
    looker: Looker
    cursor: Any
    schema: str

    def __post_init__(self) -> None:
        self.name = self.schema.lower()
        self.orders, self.customers = (f"{DATABASE}.{self.schema}.{table}" for table in ("ORDERS", "CUSTOMERS"))
        # An array: no extract holds it, and Tableau never asks for it here.
        self.sql("CREATE TABLE {orders} (ID NUMBER(38,0), AMOUNT NUMBER(12,2), CUSTOMER NUMBER(38,0), MORE ARRAY)")
        self.sql("CREATE TABLE {customers} (ID NUMBER(38,0), NAME VARCHAR)")
        self.sql("INSERT INTO {orders} (ID, AMOUNT, CUSTOMER) VALUES (1, 1.5, 1), (2, 2.5, 2), (2, 2.5, 2)")
        self.sql("INSERT INTO {customers} VALUES (1, 'Ann')")
        self.declare()

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        return self.cursor.execute(statement.format(orders=self.orders, customers=self.customers)).fetchall()

    def declare(self, **more: Any) -> ExtractSpec:
        """Write the spec file; `more` replaces fields of it."""
        value = {
            "name": self.name,
            "source": self.orders,
            "watch": [self.customers],
            "delivery": "trigger",
            "datasource": {"project": PROJECT, "name": self.name},
            "thresholds": {"quiet_period": "0 seconds"},
            **more,
        }
        (self.folder / "specs.yaml").write_text(json.dumps({"extracts": [value]}), encoding="utf-8")
        self.spec = spec_from_mapping(value, "test")
        return self.spec

    def publish(self, **more: Any) -> None:
        columns = [Column("ID", "NUMBER(38,0)"), Column("AMOUNT", "NUMBER(12,2)"), Column("NAME", "VARCHAR")]
        identity = self.sandbox.identity
        connection = SnowflakeConnection(
            server=f"{identity.account}.snowflakecomputing.com",
            dbname=DATABASE,
            schema=self.schema,
            warehouse="WH",
            role="SYSADMIN",
            username=identity.snowflake_user,
        )
        package = build_tdsx(
            self.folder / f"{self.name}.tdsx",
            caption=self.name,
            columns=columns,
            snowflake=connection,
            table="Custom SQL Query",
            custom_sql=JOINED.format(orders=self.orders, customers=self.customers),
            hyper=self.looker.hyper,
            **more,
        )
        credentials = TSC.ConnectionCredentials(identity.snowflake_user, identity.snowflake_password, embed=True)
        with self.sandbox.tableau() as server:
            item = TSC.DatasourceItem(_project(server), self.name)
            server.datasources.publish(item, str(package), "Overwrite", connection_credentials=credentials)

    def tir(self, command: str, *options: str) -> Result:
        return CliRunner().invoke(tir, [command, self.name, *options])

    def refresh(self, *options: str) -> dict[str, Any]:
        done = self.tir("refresh", "--json", *options)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def failed(self) -> str:
        done = self.tir("refresh", "--json")
        assert (done.exit_code, done.stdout) == (FAILED, "")
        assert isinstance(done.exception, SystemExit), "told in a sentence, without a traceback"
        return done.stderr.strip().splitlines()[-1]

    def source_rows(self) -> Counter:
        return Counter(tuple(map(plain, row)) for row in self.sql(JOINED))

    def published_rows(self) -> Counter:
        package = download(self.sandbox, self.name, self.folder / "seen")
        rows = self.looker.rows(package, 'SELECT "ID", "AMOUNT", "NAME" FROM "Extract"."Extract"')
        return Counter(tuple(map(plain, row)) for row in rows)

    def confirmation(self) -> Confirmation | None:
        with dagster_instance() as instance:
            return last_confirmation(instance, self.published)

    @property
    def published(self) -> dg.AssetKey:
        return dg.AssetKey([self.name, "published_datasource"])

    def refreshes(self) -> list[str]:
        """What the server ran on the datasource, newest first."""
        with self.sandbox.tableau() as server:
            return [job.type for job in server.jobs.filter(title=self.name) if "extracts" in job.type]


def _project(server: TSC.Server) -> str:
    projects = [item for item in TSC.Pager(server.projects) if item.name == PROJECT]
    return str((projects[0] if projects else server.projects.create(TSC.ProjectItem(name=PROJECT))).id)


@pytest.fixture(scope="module")
def hyper() -> Iterator[Any]:
    with HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process:
        yield process.endpoint


@pytest.fixture
def shop(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hyper: Any) -> Iterator[Shop]:
    name, secret = sandbox.new_token()
    settings = {
        **sandbox.env,
        "TABLEAU_TOKEN_NAME": name,
        "TABLEAU_TOKEN_SECRET": secret,
        "TIR_HOME": str(tmp_path / "home"),
        "DAGSTER_HOME": str(tmp_path / "dagster"),
        "TIR_SPECS": str(tmp_path / "specs.yaml"),
    }
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    schema = f"SHOP_{uuid.uuid4().hex[:8].upper()}"
    with sandbox.snowflake() as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE IF NOT EXISTS {DATABASE}")
        cursor.execute(f"CREATE SCHEMA {DATABASE}.{schema}")
        new_shop = Shop(sandbox, tmp_path, Looker(hyper, tmp_path), cursor, schema)
        new_shop.publish()
        yield new_shop


@pytest.fixture
def admin(sandbox: Sandbox) -> Iterator[Admin]:
    admin = Admin(sandbox.tableau_url)
    yield admin
    admin.clear_faults()
    admin.set(**asdict(Settings()))


# The refresh from end to end


def test_a_change_of_any_watched_table_is_refreshed_by_the_server_once(shop: Shop, admin: Admin) -> None:
    first = shop.refresh()
    assert (first["decision"], first["reason"], first["published"]) == ("full", None, True)
    assert (first["rows_purged"], first["rows_appended"], first["slices"]) == (0, 3, [])
    assert shop.published_rows() == shop.source_rows()

    shop.sql("INSERT INTO {customers} VALUES (2, 'Bob')")
    second = shop.refresh()
    assert (second["decision"], second["rows_appended"], len(second["run_ids"])) == ("full", 3, 1)
    assert second["stages"].keys() == {"survey", "look", "refresh"}
    assert shop.published_rows() == shop.source_rows()
    assert ("int 2", "Decimal 2.5", "str Bob") in shop.published_rows(), "the joined table's change is there"

    admin.forget_calls()
    third = shop.refresh()
    assert (third["decision"], third["published"], len(third["run_ids"])) == ("none", False, 1)
    assert third["source_version"] == second["source_version"]
    assert shop.tir("plan").stdout == f"{shop.name}: nothing to do, the source has not changed.\n"
    assert admin.calls() == [], "nothing is asked of Tableau when nothing changed"
    assert shop.refreshes() == ["refresh_extracts"] * 2


def test_one_event_is_the_confirmation_and_shows_how_it_came_about(shop: Shop) -> None:
    outcome = shop.refresh()
    with dagster_instance() as instance:
        (record,) = instance.fetch_materializations(shop.published, limit=9).records
    metadata = {name: entry.value for name, entry in record.asset_materialization.metadata.items()}
    assert (metadata["tir/decision"], metadata["tir/reason"], metadata["dagster/row_count"]) == ("full", "", 3)
    assert metadata["tir/plan"] == f"{shop.name}: full refresh by Tableau itself, because the source changed."
    assert metadata["dagster/uri"].startswith(shop.sandbox.tableau_url)
    assert "refresh" in metadata["tir/stages"]
    with shop.sandbox.tableau() as server:
        assert server.jobs.get_by_id(metadata["tir/job_id"]).datasource_id == outcome["datasource_id"]
    confirmed = shop.confirmation()
    assert confirmed is not None
    assert (confirmed.version, confirmed.fingerprint, confirmed.change_sets) == ("", "", ())
    assert (confirmed.datasource_id, confirmed.rows) == (outcome["datasource_id"], 3)


def test_increments_append_and_a_full_refresh_that_was_asked_for_brings_the_rest(shop: Shop) -> None:
    shop.publish(increment_key="ID")
    shop.declare(datasource={"project": PROJECT, "name": shop.name, "refresh": "incremental"})
    shop.refresh("--full")
    shop.sql("INSERT INTO {orders} (ID, AMOUNT, CUSTOMER) VALUES (3, 3.5, 1)")
    shop.sql("UPDATE {orders} SET AMOUNT = 9 WHERE ID = 1")
    outcome = shop.refresh()
    assert (outcome["decision"], outcome["reason"], outcome["rows_appended"]) == ("incremental", None, 1)
    assert shop.refreshes() == ["increment_extracts", "refresh_extracts"]
    assert len(shop.source_rows() - shop.published_rows()) == 1, "Tableau's increments see no updates"
    with dagster_instance() as instance:
        newest = instance.fetch_materializations(shop.published, limit=1).records[0].asset_materialization
    assert "dagster/row_count" not in newest.metadata, "the server told only what it appended"
    asked = shop.refresh("--full")
    assert (asked["decision"], asked["reason"], asked["published"]) == ("full", "REQUESTED", True)
    assert shop.published_rows() == shop.source_rows()


def test_a_failed_job_is_told_with_its_notes_and_tried_again(shop: Shop, admin: Admin) -> None:
    admin.fault("fail_job", path=f"/{shop.name}$", notes="The warehouse is suspended.")
    error = shop.failed()
    assert "failed on the server: The warehouse is suspended." in error
    assert shop.confirmation() is None
    assert shop.refresh()["published"]
    assert shop.published_rows() == shop.source_rows()


@pytest.mark.long
def test_a_job_that_vanished_without_a_trace_confirms_nothing(shop: Shop, admin: Admin) -> None:
    shop.refresh()
    confirmed = shop.confirmation()
    shop.sql("DELETE FROM {orders} WHERE ID = 2")
    admin.fault("slow_job", path=f"/{shop.name}$", seconds=3)
    admin.fault("vanish_job", path="/jobs/")
    assert "whether the refresh took place is unknown" in shop.failed()
    assert shop.confirmation() == confirmed
    # The job went on unseen. Nobody could know, so the next refresh runs once more.
    wait_for(lambda: shop.published_rows() == shop.source_rows(), "the vanished job to end")
    assert shop.refresh()["published"]


def test_a_change_during_the_refresh_is_seen_next_time(shop: Shop) -> None:
    context = refresh_context(
        shop.spec,
        snowflake=SnowflakeAccess.from_environment(os.environ),
        tableau=TableauAccess.from_environment(os.environ),
        spark=no_spark,
        home=shop.folder,
    )
    watched = watch(context)
    shop.sql("DELETE FROM {orders} WHERE ID = 2")
    done = refresh_on_server(context, plan_trigger(shop.spec, watched, None, "changes"), watched)
    assert plan_trigger(shop.spec, watched, done.confirmation, "changes").decision == "none"
    assert plan_trigger(shop.spec, watch(context), done.confirmation, "changes").decision == "full"


@pytest.mark.parametrize("command", ["plan", "refresh"])
def test_slices_are_wrong_usage(shop: Shop, command: str) -> None:
    for slices in ({}, {"by": "month", "column": "DAY", "start": "2025-01"}):
        shop.declare(slices=slices)
        done = shop.tir(command, "--slices", "2025-03")
        assert done.exit_code == WRONG_USAGE
        assert "Leave --slices out" in done.stderr


def test_a_datasource_that_is_not_there_is_told_by_the_plan_already(shop: Shop) -> None:
    shop.declare(datasource={"project": PROJECT, "name": f"{shop.name}x"})
    done = shop.tir("plan")
    assert done.exit_code == FAILED
    assert f"There is no datasource '{shop.name}x'" in done.stderr
    assert f"Similar names: '{shop.name}'" in done.stderr


def test_schedules_of_tableau_are_warned_of_by_plan_and_refresh(shop: Shop) -> None:
    with shop.sandbox.tableau() as server:
        (item,) = [datasource for datasource in TSC.Pager(server.datasources) if datasource.name == shop.name]
        daily = TSC.ScheduleItem(f"nights of {shop.name}", 50, "Extract", "Parallel", TSC.DailyInterval(dt.time(3)))
        server.schedules.add_to_schedule(server.schedules.create(daily).id, datasource=item)
    (planned,) = json.loads(shop.tir("plan", "--json").stdout)["warnings"]
    assert f"Tableau also runs a full refresh of datasource '{shop.name}'" in planned
    assert shop.refresh()["warnings"] == [planned]


# The decision


def a_spec(**more: Any) -> ExtractSpec:
    refresh = more.pop("refresh", "full")
    value = {"name": "x", "source": "D.S.T", "delivery": "trigger", **more}
    return spec_from_mapping({**value, "datasource": {"project": "p", "name": "n", "refresh": refresh}}, "test")


NOW = Watched(SourceState("d", "", "", "t1,t2"), SourceVersion.parse("2026-01-01T00:00:00+00:00"))
SAME = Confirmation("x", "", str(NOW.version), NOW.known, None, "1", "1", "", 1, ())
OLD_TOKEN = replace(SAME, known=replace(NOW.known, token="t1,t1"))
OLD_SPEC = replace(SAME, known=replace(NOW.known, definition="e"))


@pytest.mark.parametrize(
    ("spec", "confirmed", "mode", "expected"),
    [
        (a_spec(), SAME, "changes", ("none", None)),
        (a_spec(), None, "changes", ("full", None)),
        (a_spec(), OLD_TOKEN, "changes", ("full", None)),
        (a_spec(), OLD_SPEC, "changes", ("full", None)),
        (a_spec(), SAME, "full", ("full", Reason.REQUESTED)),
        (a_spec(refresh="incremental"), OLD_TOKEN, "changes", ("incremental", None)),
        (a_spec(refresh="incremental"), None, "changes", ("incremental", None)),
        (a_spec(refresh="incremental"), SAME, "full", ("full", Reason.REQUESTED)),
        (a_spec(refresh="incremental", policy="full"), OLD_TOKEN, "changes", ("full", Reason.REQUESTED)),
        (a_spec(policy="full"), SAME, "changes", ("none", None)),
    ],
)
def test_what_is_planned(spec, confirmed, mode, expected):
    plan = plan_trigger(spec, NOW, confirmed, mode)
    assert (plan.decision, plan.reason) == expected


# The tables that are watched


@pytest.mark.long
def test_a_table_that_changes_while_another_is_waited_for_is_looked_at_again(shop: Shop) -> None:
    # Longer than a busy machine takes from the change to the look.
    shop.declare(thresholds={"quiet_period": "6 seconds"})
    access = SnowflakeAccess.from_environment(shop.sandbox.env)
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        if not naps:
            shop.sql("DELETE FROM {orders} WHERE ID = 1")
        naps.append(seconds)
        time.sleep(seconds)

    watch_tables(replace(shop.spec, watch=()), access, log=lambda _: None)
    # The source is quiet now. While its companion is waited for, it changes.
    shop.sql("INSERT INTO {customers} VALUES (3, 'Cid')")
    watched = watch_tables(shop.spec, access, log=lambda _: None, sleep=sleep)
    assert naps, "the companion was waited for"
    assert watched.known.token == combined_token(probe(access, watched_tables(shop.spec)).items())


def test_a_watched_table_that_is_gone_is_named(shop: Shop) -> None:
    shop.declare(watch=[shop.customers, f"{DATABASE}.{shop.schema}.GONE"])
    with pytest.raises(SourceError, match="GONE"):
        watch_tables(shop.spec, SnowflakeAccess.from_environment(shop.sandbox.env), log=lambda _: None)
    assert "GONE" in shop.failed()


# Dagster


@pytest.fixture
def tick(shop: Shop) -> Iterator[Callable[..., Any]]:
    """Evaluate the sensor once, on the history that the commands share."""
    with dagster_instance() as instance:

        def evaluate(cursor: str | None = None) -> Any:
            sensor = build_defs(specs=(shop.spec,)).get_repository_def().get_sensor_def(f"{shop.name}_source")
            resources = {name: environment_resources()[name] for name in ("snowflake", "tableau", "state")}
            return sensor(dg.build_sensor_context(instance=instance, cursor=cursor, resources=resources))

        yield evaluate


def run_job(shop: Shop, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
    job = build_defs(specs=(shop.spec,)).resolve_job_def(f"{shop.name}_refresh")
    with dagster_instance() as instance:
        return job.execute_in_process(instance=instance, tags=request.tags, raise_on_error=False)


def test_there_are_two_assets_one_job_and_one_sensor(shop: Shop) -> None:
    repository = build_defs(specs=(shop.spec,)).get_repository_def()
    keys = {key.path[-1] for key in repository.asset_graph.get_all_asset_keys()}
    assert keys == {"source_table", "published_datasource"}
    assert repository.asset_graph.get(shop.published).parent_keys == {dg.AssetKey([shop.name, "source_table"])}
    assert [job.name for job in repository.get_all_jobs() if not job.name.startswith("__")] == [f"{shop.name}_refresh"]
    assert [sensor.name for sensor in repository.sensor_defs] == [f"{shop.name}_source"]


def test_the_sensor_asks_for_a_change_once_and_its_run_settles_it(shop: Shop, tick: Callable[..., Any]) -> None:
    first = tick()
    (request,) = first.run_requests
    assert request.run_key == f"{shop.name}-{Watch.parse(first.cursor).token}"
    (observed,) = first.asset_events
    assert observed.metadata["tir/token"].value.count(",") == 1
    assert run_job(shop, request).success
    assert shop.published_rows() == shop.source_rows()
    again = tick(first.cursor)
    assert "has not changed since the last confirmation" in again.skip_reason.skip_message
    shop.sql("INSERT INTO {customers} VALUES (2, 'Bob')")
    (other,) = tick(again.cursor).run_requests
    assert other.run_key != request.run_key


def test_a_failed_refresh_is_asked_for_again_later(shop: Shop, tick: Callable[..., Any], admin: Admin) -> None:
    first = tick()
    (request,) = first.run_requests
    admin.fault("fail_job", path=f"/{shop.name}$")
    assert not run_job(shop, request).success
    waiting = tick(first.cursor)
    assert "the refresh failed; the next attempt is in" in waiting.skip_reason.skip_message
    later = replace(Watch.parse(waiting.cursor), asked=time.time() - 61)
    (again,) = tick(later.to_cursor()).run_requests
    assert again.run_key == f"{request.run_key}-1"


def test_a_run_by_hand_without_a_change_leaves_tableau_alone_and_says_so(shop: Shop) -> None:
    shop.refresh()
    assert run_job(shop, dg.RunRequest()).success
    assert shop.refreshes() == ["refresh_extracts"]
    with dagster_instance() as instance:
        (seen,) = instance.fetch_observations(shop.published, limit=9).records
    assert seen.asset_observation.metadata["tir/plan"].value.endswith("nothing to do, the source has not changed.")


# Tableau Cloud allows so many refreshes an hour


def test_without_a_count_the_server_refuses_and_says_when_to_come_back(shop: Shop, admin: Admin) -> None:
    admin.set(refreshes_per_hour=1)
    shop.refresh()
    shop.sql("INSERT INTO {customers} VALUES (2, 'Bob')")
    told = shop.failed()
    assert "Too many requests for 'api.rest.refresh_extracts'. Please retry after 60 minutes" in told
    assert "Run again in 60 minutes" in told


def test_a_refresh_beyond_the_hours_calls_is_refused_before_the_server_is_asked_and_postponed_by_the_sensor(
    shop: Shop, admin: Admin, tick: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TABLEAU_REFRESHES_PER_HOUR", "1")
    shop.refresh()
    shop.sql("INSERT INTO {customers} VALUES (2, 'Bob')")
    admin.forget_calls()
    assert f"allows 1 refresh starts an hour, and 1 are used ({shop.name} 1)" in shop.failed()
    assert "refresh" not in {call["route"] for call in admin.calls()}
    postponed = tick()
    assert (postponed.run_requests or []) == []
    assert "no more refresh starts before" in postponed.skip_reason.skip_message
    assert Watch.parse(postponed.cursor).requested is None, "nothing was asked for, so nothing failed"
    monkeypatch.setenv("TABLEAU_REFRESHES_PER_HOUR", "2")
    assert len(tick(postponed.cursor).run_requests) == 1


def test_a_refusal_by_the_server_postpones_the_next_refresh(
    shop: Shop, tick: Callable[..., Any], admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TABLEAU_REFRESHES_PER_HOUR", "60")
    admin.set(refreshes_per_hour=1)
    shop.refresh()
    shop.sql("INSERT INTO {customers} VALUES (2, 'Bob')")
    assert "Please retry after 60 minutes" in shop.failed()
    assert "no more refresh starts before" in tick().skip_reason.skip_message
    assert "the server asked to wait" in shop.failed()
