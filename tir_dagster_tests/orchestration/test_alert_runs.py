"""Which runs, checks and commands become reports to people, and when. Dagster's history alone: no servers, no Spark."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from tir_dagster.alerts.events import Failure, Recovered, Report, Success
from tir_dagster.alerts.messages import success_event
from tir_dagster.alerts.storage import AlertStorage
from tir_dagster.changes.hints import HintError
from tir_dagster.changes.plan import SourceState
from tir_dagster.definitions import build_defs
from tir_dagster.errors import EQUALS_SOURCE, DatasourceError, GuardError, LoadError, SpecError, VerificationError
from tir_dagster.orchestration.alerts.commands import alert_storage, alerting, killed_reports
from tir_dagster.orchestration.alerts.history import (
    COMMAND_NEWS_SECONDS,
    UNREADABLE_SECONDS,
    Watermark,
    condition_reports,
    finished_run_reports,
)
from tir_dagster.orchestration.alerts.resources import channel_resources
from tir_dagster.orchestration.alerts.runs import unaffected, with_recipients
from tir_dagster.orchestration.alerts.sensor import build_alert_sensor, report, report_recovery, unless_blind
from tir_dagster.orchestration.checks import SERVER
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.io_managers import StateFolder
from tir_dagster.orchestration.metadata import CONFIRMATION, PLAN
from tir_dagster.orchestration.names import TOLD_BY_COMMAND, extract_keys
from tir_dagster.orchestration.sensing.watching import in_time
from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster.refresh.state.hold import HeldError
from tir_dagster.refresh.state.records import Confirmation, Intent
from tir_dagster.snowflake.connection import SnowflakeDownError
from tir_dagster.spec.alerts import Alerts, Cause, OthersAlerts
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import parse_declared
from tir_dagster.tableau.failures import ServerDownError, SignInError
from tir_dagster_tests.alerts.reports import Desk

SPECS = """\
extracts:
  - name: orders
    source: MYDB.MYSCHEMA.MYTABLE
    row_key: ORDER_ID
    datasource: {project: myproject, name: told}
    freshness: 1 hour
    checks: {server: true}
    alerts: {channels: [no:Body], patience: 0 seconds, slack: {channel: "#mychannel", on_success: always}}
loads:
  - name: order_files
    table: MYDB.MYSCHEMA.MYTABLE
    files: {path: "s3://landing/orders", format: csv}
    mode: append
"""
DECLARED = parse_declared(SPECS, "test.yaml")
(ORDERS,) = DECLARED.extracts
LOAD = with_recipients(DECLARED.loads[0], DECLARED.extracts)
PUBLISHED = extract_keys(ORDERS).published_datasource


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIR_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SNOWFLAKE_ACCOUNT", "acme")
    monkeypatch.setenv("TABLEAU_SERVER_URL", "https://tableau.example.com")
    return tmp_path / "state"


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


class Reader:
    """The sensor's reading of the history, tick by tick."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.mark = Watermark.parse(None, time.time() - 1)

    def tick(self, later: float = 0.0, most: int = 200, **more: Any) -> list[Report]:
        told = (ORDERS, LOAD)
        now = time.time() + later
        reports, self.mark = finished_run_reports(self.instance, told, self.mark, now, tir_home(), most=most, **more)
        return reports


LOADED = {"tir/files": ["a", "b"], "tir/rows_inserted": 1200}


def a_run(
    instance: dg.DagsterInstance,
    *keys: str,
    error: Exception | None = None,
    metadata: dict[str, Any] = LOADED,
    job: str = "by_hand",
    **tags: str,
) -> str:
    def made(key: str) -> Any:
        @dg.asset(key=key.split("/"))
        def asset() -> dg.MaterializeResult:
            if error is not None:
                raise error
            return dg.MaterializeResult(metadata=metadata)

        return asset

    assets = [made(key) for key in keys or ("orders/published_datasource",)]
    defined = dg.Definitions(assets=assets, jobs=[dg.define_asset_job(job, executor_def=dg.in_process_executor)])
    return (
        defined.resolve_job_def(job)
        .execute_in_process(
            instance=instance,
            raise_on_error=False,
            tags={name.replace("__", "/"): text for name, text in tags.items()},
        )
        .run_id
    )


# Loads


def test_a_load_that_fails_is_told_to_its_people_and_so_is_one_that_works(instance):
    reader = Reader(instance)
    a_run(instance, "order_files/source_table", error=LoadError("day1.csv: 5 of 6 rows are bad. Send it again."))
    a_run(instance, "order_files/source_table")
    failure, success = reader.tick()
    assert isinstance(failure, Failure)
    assert (failure.extract, failure.cause, failure.ends_with) == ("order_files", Cause.LOAD_FAILED, "load")
    assert failure.sentence == "day1.csv: 5 of 6 rows are bad. Send it again."
    assert (failure.step, failure.datasource) == ("order_files / source_table", "MYDB.MYSCHEMA.MYTABLE")
    assert isinstance(success, Success)
    assert success.facts == {"Files": "2", "Rows": "1,200 inserted"}


def test_a_load_that_cannot_reach_snowflake_belongs_to_the_servers_story(instance):
    reader = Reader(instance)
    a_run(instance, "order_files/source_table", error=SnowflakeDownError("Snowflake cannot be reached."))
    (failure,) = reader.tick()
    assert (failure.cause, failure.scope) == (Cause.WAREHOUSE_DOWN, "Snowflake acme")


def test_a_load_has_its_own_people_or_those_of_the_extract_that_reads_its_table():
    assert LOAD.alerts == OthersAlerts(**vars(ORDERS.alerts))
    own = replace(LOAD, alerts=Alerts(channels=("my:Own",)))
    assert with_recipients(own, DECLARED.extracts) == own
    assert with_recipients(replace(LOAD, alerts=None, table="A.B.C"), DECLARED.extracts).alerts is None
    defs = build_defs(specs=(), loads=(own,))
    assert "alerts" in [sensor.name for sensor in defs.sensors]


# Runs


def test_the_cause_is_known_from_the_errors_type_and_the_sentence_is_its_own(instance):
    causes = {
        GuardError("The source is empty."): Cause.GUARD,
        DatasourceError("Refused."): Cause.STEP_FAILED,
        SpecError("orders: changes.watermark names X, which T does not have."): Cause.SPEC_UNFIT,
        VerificationError("slice 2025-03 differs", check=EQUALS_SOURCE): Cause.CHECK_FAILED,
        SignInError("The token has expired.", code="401001"): Cause.SERVER_DOWN,
        ServerDownError("Cannot be reached."): Cause.SERVER_DOWN,
        SnowflakeDownError("Cannot be reached."): Cause.WAREHOUSE_DOWN,
    }
    reader = Reader(instance)
    for error in [*causes, ValueError("a bug")]:
        a_run(instance, error=error)
    *failures, bug = reader.tick()
    assert [(failure.cause, failure.sentence) for failure in failures] == [
        (cause, str(error)) for error, cause in causes.items()
    ]
    assert (bug.cause, bug.sentence) == (Cause.STEP_FAILED, "ValueError: a bug")
    assert [failure.scope for failure in failures[-2:]] == ["tableau.example.com", "Snowflake acme"]


def test_an_extract_is_known_by_keys_of_its_own(instance):
    named = replace(ORDERS, asset_keys={"published_datasource": "sales_all"})
    before = Watermark.parse(None, time.time() - 1)
    a_run(instance, "sales_all", error=ValueError("no"))
    (failure,), _ = finished_run_reports(instance, [named], before, time.time(), tir_home())
    assert (failure.extract, failure.step) == ("orders", "sales_all")


def test_what_another_steps_failure_did_not_keep_from_being_published_is_told_as_through(instance):
    """All of a page materialized at once: one run, of which one part fails."""

    @dg.asset(key=PUBLISHED)
    def published_datasource() -> dg.MaterializeResult:
        return dg.MaterializeResult(metadata={"tir/decision": "full"})

    @dg.asset(key=["order_files", "source_table"])
    def source_table() -> None:
        raise LoadError("a.csv: not CSV.")

    reader = Reader(instance)
    dg.materialize([published_datasource, source_table], instance=instance, raise_on_error=False)
    failure, success = reader.tick()
    assert (failure.extract, isinstance(failure, Failure)) == ("order_files", True)
    assert (success.extract, isinstance(success, Success) and success.published) == ("orders", True)


def test_warnings_of_the_detection_and_of_the_publish_are_told_together(instance):
    staged = {"tir/warnings": ["two rows of one key"]}
    event = dg.AssetMaterialization(extract_keys(ORDERS).changed_keys, partition="cs", metadata=staged)
    instance.report_runless_asset_event(event)
    reader, metadata = Reader(instance), {"tir/change_set": "cs", "tir/warnings": ["the tags did not come back"]}
    a_run(instance, "orders/purged_extract", "orders/published_datasource", metadata=metadata)
    (success,) = reader.tick()
    assert success.warnings == ("two rows of one key", "the tags did not come back")


def test_an_asset_beside_the_extracts_own_ones_ends_none_of_its_troubles(instance):
    reader = Reader(instance)
    a_run(instance, "orders/ledger")
    assert reader.tick() == []


@pytest.mark.parametrize("damaged", ["intent.json", "cs/change_set.json"])
def test_an_extract_whose_state_is_damaged_keeps_nobody_from_hearing_of_the_others(instance, home, damaged):
    file = home / "extracts" / "orders" / "change_sets" / damaged
    file.parent.mkdir(parents=True)
    file.write_text("{}", encoding="utf-8")
    reader = Reader(instance)
    a_run(instance, "orders/purged_extract")
    a_run(instance, error=ValueError("no"))
    a_run(instance, "order_files/source_table", error=LoadError("a.csv: not CSV."))
    *_, orders, load = reader.tick()
    assert ("is not known" in orders.unaffected) is (damaged == "intent.json")
    assert load.cause is Cause.LOAD_FAILED


def test_a_run_that_cannot_be_read_is_tried_again_for_a_while(instance):
    reader = Reader(instance)
    a_run(instance, "order_files/source_table")
    odd = a_run(instance, "order_files/source_table", metadata={"tir/rows_inserted": "many"})
    (good,) = reader.tick()
    assert (good.run_id != odd, reader.mark.waiting) == (True, [odd])
    assert reader.tick(later=UNREADABLE_SECONDS + 1) == []
    assert reader.mark.waiting == []


def test_what_a_run_published_before_it_failed_is_not_called_unchanged(instance):
    @dg.asset(key=PUBLISHED)
    def published_datasource() -> None: ...

    @dg.asset_check(asset=published_datasource, blocking=True)
    def as_the_ledger_says() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=False)

    reader = Reader(instance)
    dg.materialize([published_datasource, as_the_ledger_says], instance=instance, raise_on_error=False)
    (failure,) = reader.tick()
    assert (failure.cause, failure.unaffected.split(",")[0]) == (
        Cause.CHECK_FAILED,
        "this run had published the datasource before it failed",
    )


def test_a_refresh_by_tableau_that_may_go_on_is_not_called_unchanged(instance, home):
    triggered = replace(ORDERS, delivery="trigger")
    for names in ([], ["JobTimeoutError"], ["JobVanishedError"], ["UnknownOutcomeError"]):
        assert "may still be under way" in unaffected(instance, triggered, home, names), names
    for names in (["JobFailedError"], ["RefusedError"], ["SnowflakeDownError"]):
        assert "is unchanged" in unaffected(instance, triggered, home, names), names


def test_a_patch_whose_first_parts_may_be_there_is_not_called_unchanged(instance, home):
    known = SourceState(definition="d", schema="s", identity="i", token="t")
    store = ChangeSetStore(home / "extracts" / "orders" / "change_sets")
    for patch, sentence in ((False, "is unchanged"), (True, "a publish was under way")):
        store.intend(Intent("orders", "cs", "v", None, "f", known, patch=patch))
        assert sentence in unaffected(instance, ORDERS, home, ["RefusedError"])


def test_runs_of_a_long_outage_are_read_in_parts_and_none_twice(instance):
    reader = Reader(instance)
    runs = [a_run(instance, error=ValueError("no")) for _ in range(5)]
    # A history that answers slowly is read at least one run at a time.
    parts = [reader.tick(most=2), reader.tick(most=2, seconds=0.0), reader.tick(most=2), reader.tick()]
    assert [[run.run_id for run in part] for part in parts] == [runs[:2], runs[2:3], runs[3:], []]


def test_the_cursor_of_an_earlier_release_is_understood():
    mark = Watermark.parse('{"start": 1.0, "after": 5.0, "seen": ["a"], "waiting": []}', 9.0)
    assert (mark.start, mark.seen) == (1.0, {"a": 5.0})


def test_where_retries_are_off_a_tag_that_promises_one_is_not_waited_for(instance):
    reader = Reader(instance)
    a_run(instance, error=ValueError("no"), dagster__will_retry="true")
    assert len(reader.tick()) == 1


def test_a_run_that_could_not_even_be_started_is_told(instance):
    reader = Reader(instance)
    run = instance.create_run_for_job(dg.job(name="orders_detect")(lambda: None))
    instance.report_run_failed(run, "The code location did not answer.")
    (failure,) = reader.tick()
    assert (failure.extract, failure.run_id) == ("orders", run.run_id)


def test_a_failed_run_of_a_command_that_died_before_it_told_is_told_in_its_place(instance):
    reader = Reader(instance)
    run_id = a_run(instance, error=ValueError("no"))
    instance.add_run_tags(run_id, {TOLD_BY_COMMAND: run_id})
    assert reader.tick() == []
    (failure,) = reader.tick(later=COMMAND_NEWS_SECONDS + 1)
    assert failure.id == f"{run_id}/orders", "the command's own report has the same id, and is not told twice"


# Commands


def test_a_command_that_was_killed_is_told_with_its_run(instance, home):
    """Its process is gone, and Dagster takes its run for one at work, for ever."""
    begun = time.time()
    run = started_run(instance, "orders_refresh")
    killed_command(home, begun)
    started_run(instance, "orders_refresh")  # by the next command
    ((killed, failure),) = killed_reports(instance, [ORDERS, LOAD])
    assert (failure.extract, failure.run_id, failure.id) == ("orders", run.run_id, f"{run.run_id}/orders")
    assert "killed" in failure.sentence
    assert abs(failure.at - time.time()) < 60
    killed.forget()
    assert killed_reports(instance, [ORDERS, LOAD]) == []


def started_run(instance: dg.DagsterInstance, job: str) -> dg.DagsterRun:
    job_def = dg.job(name=job)(lambda: None)
    return instance.create_run_for_job(job_def, status=dg.DagsterRunStatus.STARTED, tags={TOLD_BY_COMMAND: "x"})


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_a_command_that_was_killed_while_it_told_people_did_what_its_run_says(instance, home, error):
    reader, begun = Reader(instance), time.time()
    run_id = a_run(instance, error=error, job="orders_refresh", **{TOLD_BY_COMMAND.replace("/", "__"): "x"})
    killed_command(home, begun)
    ((_, failure),) = killed_reports(instance, [ORDERS])
    assert failure is None
    assert [run.run_id for run in reader.tick()] == [run_id]


def test_a_command_that_was_killed_between_its_runs_is_told(instance, home):
    begun = time.time()
    a_run(instance, "orders/changed_keys", job="orders_detect", **{TOLD_BY_COMMAND.replace("/", "__"): "x"})
    killed_command(home, begun)
    ((_, failure),) = killed_reports(instance, [ORDERS])
    assert failure.id == f"{round(begun, 3)}/orders"


def killed_command(home: Path, begun: float | None = None) -> None:
    """Leaves behind what a command does whose process ends without a word."""
    holds = (
        "import sys, os, pathlib; from tir_dagster.alerts.storage import AlertStorage\n"
        "with AlertStorage(pathlib.Path(sys.argv[1])).command_running('orders', float(sys.argv[2])): os._exit(9)"
    )
    command = [sys.executable, "-c", holds, str(home / "alerts"), str(begun or time.time())]
    assert subprocess.run(command, check=False, timeout=60).returncode == 9


def test_a_command_that_is_at_work_or_ended_by_itself_was_not_killed(tmp_path):
    storage = AlertStorage(tmp_path)
    with storage.command_running("orders", 1.5):
        assert storage.killed_commands(["orders"]) == []
        (path,) = (tmp_path / "commands").glob("orders@*")
        os.utime(path, (1.0, 1.0))
        assert storage.killed_commands(["orders"]) == [], "its machine may have been suspended"
    assert storage.killed_commands(["orders"]) == []


@dataclass
class Ended:
    """A command's outcome as far as people are concerned."""

    run_ids: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def causes_after(spec: ExtractSpec, instance: dg.DagsterInstance, error: Exception) -> list[str]:
    under = tir_home() / "alerts" / "commands"

    def fail() -> None:
        assert list(under.glob(f"{spec.name}@*")), "killed here, it would be told by the sensor"
        raise error

    with pytest.raises(type(error)), alerting(spec, instance, Ended(), lambda _: None):
        fail()
    assert list(under.glob("*")) == []
    return [problem.cause for problem in alert_storage().problems()]


def test_a_spec_that_worked_and_does_not_fit_its_source_any_more_is_told(instance):
    gone = SpecError("orders: changes.watermark names X, which T does not have.")
    assert causes_after(ORDERS, instance, gone) == [], "who writes a new spec sees it"
    confirm(instance)
    assert causes_after(ORDERS, instance, gone) == ["SPEC_UNFIT"]


def test_a_hint_that_nobody_can_read_is_the_business_of_who_typed_it(instance):
    confirm(instance)
    assert causes_after(ORDERS, instance, HintError("--hint: not JSON.")) == []


def test_a_refresh_that_a_hold_refuses_is_no_failure_of_a_run_or_a_command(instance):
    confirm(instance)
    reader = Reader(instance)
    held = HeldError("orders is on hold since Monday. Release it: tir release orders. Nothing was touched.")
    a_run(instance, error=held)
    assert reader.tick() == []
    assert causes_after(ORDERS, instance, held) == []


def test_a_rollback_says_what_is_published_again_and_that_it_is_on_hold(instance):
    reader = Reader(instance)
    plan = "orders: rolled back to version v00000003. On hold until tir release orders: wrong prices."
    a_run(instance, "orders/published_datasource", metadata={"tir/decision": "rollback", PLAN: plan})
    (success,) = reader.tick()
    assert (success.published, success.why) == (True, plan)
    event = success_event(success, None)
    assert (event.title, event.text) == (
        "orders: rolled back",
        "To version v00000003. On hold until tir release orders: wrong prices.",
    )
    assert "Changed" not in event.facts, "all rows were published again, none was changed by key"


def confirm(instance: dg.DagsterInstance) -> None:
    known = SourceState(definition="d", schema="s", identity="i", token="t")
    confirmation = Confirmation("orders", "v", "2025-03-01T00:00:00+00:00", known, None, "ds", "1", "f", 1, ())
    event = dg.AssetMaterialization(PUBLISHED, metadata={CONFIRMATION: confirmation.to_json()})
    instance.report_runless_asset_event(event)


# What stands


def checked(instance: dg.DagsterInstance, name: str, *, passed: bool, warn: bool = False) -> None:
    severity = dg.AssetCheckSeverity.WARN if warn else dg.AssetCheckSeverity.ERROR
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=PUBLISHED, check_name=name, passed=passed, severity=severity, metadata={}, description=f"{name}!"
        )
    )


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "desk", extracts=("orders",), now=time.time())


def stands(instance: dg.DagsterInstance, storage: AlertStorage, later: float = 0.0) -> list[Report]:
    return condition_reports(instance, [ORDERS], storage.problems(), since=0.0, now=time.time() + later)


def test_drift_that_the_verification_found_is_one_report_until_it_finds_none(instance, desk):
    checked(instance, EQUALS_SOURCE, passed=False)
    checked(instance, SERVER, passed=False)
    (drift,) = stands(instance, desk.storage)
    assert (drift.cause, drift.sentence) == (Cause.DRIFT, "equals_source! server_holds_it!")
    desk.tell(drift)
    assert stands(instance, desk.storage) == []
    checked(instance, EQUALS_SOURCE, passed=True)
    assert stands(instance, desk.storage) == [], "the other check still fails"
    checked(instance, SERVER, passed=True)
    (recovered,) = stands(instance, desk.storage)
    desk.tell(recovered)
    assert desk.listener.kinds == ["failure", "recovery"]
    assert stands(instance, desk.storage) == []


def test_a_check_that_could_not_be_made_is_neither_drift_nor_its_end(instance, desk):
    checked(instance, EQUALS_SOURCE, passed=False, warn=True)
    assert stands(instance, desk.storage) == []


def test_drift_from_before_people_asked_to_be_told_is_history(instance, desk):
    checked(instance, EQUALS_SOURCE, passed=False)
    assert condition_reports(instance, [ORDERS], [], since=time.time() + 1, now=time.time()) == []


def test_a_verification_that_could_not_be_made_is_told_and_so_is_one_that_could(instance):
    confirm(instance)
    reader = Reader(instance)
    for error in (OSError("no room on the disk"), SnowflakeDownError("Snowflake is down."), None):
        verify(instance, error)
    failure, unseen, recovered = reader.tick()
    assert (unseen.cause, unseen.sentence, unseen.unaffected) == (Cause.UNVERIFIED, "Snowflake is down.", "")
    assert (failure.cause, failure.ends_with, failure.extract) == (Cause.UNVERIFIED, "verification", "orders")
    assert isinstance(recovered, Recovered)
    assert recovered.topic == "verification"


def verify(instance: dg.DagsterInstance, error: Exception | None) -> None:
    """The verification's job, with a step that fails or finds nothing wrong."""

    @dg.multi_asset_check(specs=[dg.AssetCheckSpec(EQUALS_SOURCE, asset=PUBLISHED)], name="orders_verification")
    def verification() -> Iterator[dg.AssetCheckResult]:
        if isinstance(error, OSError):
            raise error
        description, warn = str(error), dg.AssetCheckSeverity.WARN
        yield dg.AssetCheckResult(passed=not error, check_name=EQUALS_SOURCE, description=description, severity=warn)

    job = dg.define_asset_job("orders_verify", selection=dg.AssetSelection.checks_for_assets(PUBLISHED))
    defs = dg.Definitions(assets=[dg.AssetSpec(PUBLISHED)], asset_checks=[verification], jobs=[job])
    defs.resolve_job_def("orders_verify").execute_in_process(instance=instance, raise_on_error=False)


def test_a_datasource_that_is_not_as_fresh_as_promised_is_told_once_until_something_is_published(instance, desk):
    assert stands(instance, desk.storage) == [], "nothing is known of what was never published"
    instance.report_runless_asset_event(dg.AssetMaterialization(PUBLISHED))
    assert stands(instance, desk.storage, later=3500) == []
    (stale,) = stands(instance, desk.storage, later=3700)
    assert (stale.cause, stale.sentence.endswith("`freshness` allows 60 min.")) == (Cause.STALE, True)
    desk.tell(replace(stale, at=time.time()))
    assert stands(instance, desk.storage, later=3800) == []
    instance.report_runless_asset_event(dg.AssetMaterialization(PUBLISHED))
    desk.tell(*stands(instance, desk.storage))
    assert desk.listener.kinds == ["failure", "recovery"]


# Sensors that cannot read


def test_a_snowflake_that_hangs_is_told_before_dagster_ends_the_tick():
    released = threading.Event()
    with pytest.raises(SnowflakeDownError, match=r"did not answer within 0\.05 seconds"):
        in_time(lambda: released.wait(30), seconds=0.05)
    released.set()
    assert in_time(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 // 0)


def looks(spec, error):
    """A sensor's look at its source, which fails if there is an error."""

    def look() -> str:
        if error is not None:
            raise error
        return "seen"

    seen = unless_blind(spec, "the source could not be read", look)
    return getattr(seen, "skip_message", seen)


def test_one_good_read_shows_that_snowflake_answers_all(instance):
    down = SnowflakeDownError("Snowflake cannot be reached.")
    assert str(looks(ORDERS, down)) == "the source could not be read: Snowflake cannot be reached."
    looks(LOAD, down)
    sensor = Sensor(instance)
    assert sensor.tick() == [{"order_files": "sensor", "orders": "sensor"}]
    assert looks(LOAD, None) == "seen"
    assert sensor.tick() == []


def test_what_is_over_before_the_sensor_heard_of_it_leaves_no_trouble(instance):
    sensor = Sensor(instance)
    report(ORDERS, Cause.DRIFT, "the totals differ", ident="check-1")
    report_recovery(ORDERS, "drift")
    assert sensor.tick() == []


# All of it, by the sensor


class Sensor:
    """The alerts sensor. The state is elsewhere; the alerts are where commands and other sensors look for them."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._sensor = build_alert_sensor([ORDERS], loads=[LOAD])
        self._instance = instance
        self._cursor: str | None = None
        self._resources = {**channel_resources(), "state": StateFolder(path="/elsewhere")}

    def tick(self) -> list[dict[str, str]]:
        """Whom troubles affect after it, and what ends them."""
        context = dg.build_sensor_context(instance=self._instance, cursor=self._cursor, resources=self._resources)
        result: Any = self._sensor(context)
        self._cursor = result.cursor
        return [dict(sorted(problem.affected.items())) for problem in alert_storage().problems()]


def test_the_sensor_takes_failed_loads_killed_commands_and_what_stands(instance, home):
    sensor = Sensor(instance)
    assert sensor.tick() == []
    a_run(instance, "order_files/source_table", error=LoadError("a.csv: not CSV. Send it again."))
    checked(instance, EQUALS_SOURCE, passed=False)
    killed_command(home)
    wrong = [{"order_files": "load"}, {"orders": "drift"}, {"orders": "refresh"}]
    assert sorted(map(str, sensor.tick())) == sorted(map(str, wrong))
    assert alert_storage().killed_commands(["orders"]) == []
    a_run(instance, "order_files/source_table")
    checked(instance, EQUALS_SOURCE, passed=True)
    a_run(instance)
    assert sensor.tick() == []
