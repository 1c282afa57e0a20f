"""People hear of what Dagster ran: from the sensor over its history, and from the end of every command."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner, Result

from tir_dagster.alerts.events import Problem
from tir_dagster.alerts.problems import AlertState
from tir_dagster.changes.plan import SourceState
from tir_dagster.cli.audit.verify import VerifyOutcome
from tir_dagster.cli.main import tir
from tir_dagster.cli.refresh import TriggerCommand
from tir_dagster.definitions import build_defs
from tir_dagster.errors import DatasourceError
from tir_dagster.orchestration.alerts.commands import alert_storage, tell_verified
from tir_dagster.orchestration.alerts.history import RETRY_WAIT_SECONDS, Watermark, finished_run_reports
from tir_dagster.orchestration.alerts.sensor import build_alert_sensor, report, report_recovery
from tir_dagster.orchestration.build import build_extract_defs
from tir_dagster.orchestration.home import dagster_instance, tir_home
from tir_dagster.orchestration.names import TOLD_BY_COMMAND
from tir_dagster.orchestration.resources import environment_resources
from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster.refresh.state.records import Intent
from tir_dagster.sandbox import sample
from tir_dagster.spec.alerts import Cause
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster.tableau.failures import RefusedError, ServerDownError
from tir_dagster.tableau.jobs import JobFailedError
from tir_dagster_tests.conftest import People, Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import Admin

ALERTS = {
    "slack": {"channel": "#mychannel"},
    "servicenow": {"group": "mygroup"},
    "timeout": "3 seconds",
    "patience": "0 seconds",
}
SENTENCE = "Job 7 failed on the server: the disk is <full>. Run again."


def an_extract(name: str = "orders", **more: Any) -> ExtractSpec:
    return spec_from_mapping(
        {
            "name": name,
            "source": sample.TABLE,
            "delivery": "trigger",
            "datasource": {"project": "myproject", "name": "told"},
            "thresholds": {"quiet_period": "0 seconds"},
            "alerts": ALERTS,
            **more,
        },
        "test",
    )


@pytest.fixture(autouse=True)
def environment(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in sandbox.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TIR_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    monkeypatch.setenv("TIR_DAGSTER_URL", "http://dagster.example")


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


class Watcher:
    """The alerts sensor, tick by tick, from its first look on."""

    def __init__(self, instance: dg.DagsterInstance, *specs: ExtractSpec) -> None:
        self.instance = instance
        self.sensor = build_alert_sensor(specs or (an_extract(),))
        self.cursor: str | None = None
        self.tick()

    def tick(self) -> str:
        context = dg.build_sensor_context(
            instance=self.instance,
            cursor=self.cursor,
            resources={
                name: resource
                for name, resource in environment_resources().items()
                if name in ("slack", "servicenow", "state")
            },
        )
        result = self.sensor(context)
        assert isinstance(result, dg.SensorResult)
        self.cursor = result.cursor
        return result.skip_reason.skip_message


def a_run(instance: dg.DagsterInstance, *extracts: str, error: Exception | None = None, **tags: str) -> str:
    """A run of the extracts' last asset that fails with this error, or publishes; its id."""

    def published(extract: str) -> Any:
        @dg.asset(key=[extract, "published_datasource"])
        def published_datasource() -> dg.MaterializeResult:
            if error is not None:
                raise error
            return dg.MaterializeResult(metadata={"tir/decision": "incremental", "dagster/row_count": 10})

        return published_datasource

    names = extracts or ("orders",)
    job = dg.define_asset_job(f"{names[0]}_refresh", selection="*", executor_def=dg.in_process_executor)
    definitions = dg.Definitions(assets=[published(name) for name in names], jobs=[job])
    done = definitions.resolve_job_def(job.name).execute_in_process(
        instance=instance, raise_on_error=False, tags={name.replace("__", "/"): text for name, text in tags.items()}
    )
    assert done.success is (error is None)
    return done.run_id


# The sensor over the history


def test_a_failed_run_is_told_with_cause_step_what_is_unaffected_and_its_link(instance, people: People):
    watcher = Watcher(instance)
    run_id = a_run(instance, error=JobFailedError(SENTENCE))
    watcher.tick()
    (message,) = people.messages()
    text = json.dumps(message["blocks"])
    for expected in (
        "orders: a Tableau job failed",
        "the disk is &lt;full&gt;. Run again.",
        "orders / published_datasource",
        "the published datasource is unchanged",
        f"<http://dagster.example/runs/{run_id}|Open the run>",
    ):
        assert expected in text
    (incident,) = people.incidents()
    assert (incident["assignment_group"], incident["correlation_id"]) == ("mygroup", "tir/orders/refresh")
    assert SENTENCE in incident["description"]


def test_a_blocking_check_that_fails_is_told_as_one(instance, people: People):
    @dg.asset(key=["orders", "purged_extract"])
    def purged_extract() -> None: ...

    @dg.asset_check(asset=purged_extract, blocking=True)
    def equal_to_the_source() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=False, description="slice 2025-03 differs")

    watcher = Watcher(instance)
    done = dg.materialize([purged_extract, equal_to_the_source], instance=instance, raise_on_error=False)
    assert not done.success
    watcher.tick()
    (message,) = people.messages()
    assert Cause.CHECK_FAILED.value in message["text"]
    assert "equal_to_the_source" in message["text"]


def test_a_tick_that_is_repeated_tells_nothing_twice(instance, people: People):
    watcher = Watcher(instance)
    before = watcher.cursor
    a_run(instance, error=JobFailedError(SENTENCE))
    watcher.tick()
    watcher.tick()
    watcher.cursor = before
    watcher.tick()
    assert (len(people.messages()), len(people.incidents()[0]["notes"])) == (1, 0)


def test_what_ended_before_the_first_look_is_history(instance, people: People):
    a_run(instance, error=JobFailedError(SENTENCE))
    Watcher(instance).tick()
    assert people.messages() == []


def test_three_failed_runs_and_a_good_one_are_one_thread_and_one_incident(instance, people: People):
    watcher = Watcher(instance)
    for _ in range(3):
        a_run(instance, error=JobFailedError(SENTENCE))
        watcher.tick()
    a_run(instance)
    watcher.tick()
    first, *answers = people.messages()
    assert [answer["thread_ts"] for answer in answers] == [first["ts"]] * 3
    (incident,) = people.incidents()
    assert (len(incident["notes"]), incident["state"]) == (2, "6")


def test_a_server_that_is_down_is_one_message_for_all_extracts(instance, people: People):
    names = ("orders", "customers", "items")
    watcher = Watcher(instance, *map(an_extract, names))
    for name in names:
        a_run(instance, name, error=ServerDownError("Tableau Server cannot be reached."))
    watcher.tick()
    (message,) = people.messages()
    assert "orders, customers, items" in json.dumps(message["blocks"])
    assert len(people.incidents()) == 1


def test_a_run_over_several_extracts_is_told_for_each(instance, people: People):
    watcher = Watcher(instance, an_extract("orders"), an_extract("customers"))
    a_run(instance, "orders", "customers", error=DatasourceError("Refused."))
    watcher.tick()
    assert len(people.messages()) == 2


def test_an_extract_without_alerts_is_nobodys_business(instance, people: People):
    watcher = Watcher(instance, an_extract("orders"), an_extract("customers", alerts=None))
    a_run(instance, "customers", error=DatasourceError("Refused."))
    watcher.tick()
    assert people.messages() == []


@pytest.fixture(scope="module")
def retrying() -> Iterator[dg.DagsterInstance]:
    """An instance that runs failed runs again, if they ask for it."""
    with dg.instance_for_test(overrides={"run_retries": {"enabled": True}}) as with_retries:
        yield with_retries


def test_people_hear_of_the_last_retry_only(retrying, people: People):
    watcher = Watcher(retrying)
    first = a_run(retrying, error=JobFailedError(SENTENCE), dagster__max_retries="1")
    assert retrying.get_run_by_id(first).tags["dagster/will_retry"] == "true"
    watcher.tick()
    last = a_run(retrying, error=JobFailedError(SENTENCE))
    retrying.add_run_tags(first, {"dagster/auto_retry_run_id": last})
    watcher.tick()
    watcher.tick()
    (message,) = people.messages()
    assert last in json.dumps(message)


def test_a_retry_that_dagster_could_not_start_is_told_after_all(retrying, people: People):
    watcher = Watcher(retrying)
    run_id = a_run(retrying, error=JobFailedError(SENTENCE), dagster__max_retries="1")
    watcher.tick()
    assert people.messages() == []
    retrying.add_run_tags(run_id, {"dagster/will_retry": "false"})
    watcher.tick()
    watcher.tick()
    assert len(people.messages()) == 1


def test_a_run_that_nobody_retries_though_dagster_said_so_is_told_after_a_while(retrying):
    mark, specs = Watermark.parse(None, time.time() - 1), [an_extract()]
    run_id = a_run(retrying, error=JobFailedError(SENTENCE), dagster__max_retries="1")
    early, mark = finished_run_reports(retrying, specs, mark, time.time() + RETRY_WAIT_SECONDS - 60, tir_home())
    late, _ = finished_run_reports(retrying, specs, mark, time.time() + RETRY_WAIT_SECONDS + 1, tir_home())
    assert run_id not in [run.run_id for run in early]
    assert run_id in [run.run_id for run in late]


def test_a_run_of_a_command_is_left_to_it_but_its_re_execution_is_not(instance, people: People):
    watcher = Watcher(instance)
    first = a_run(instance, error=JobFailedError(SENTENCE))
    instance.add_run_tags(first, {TOLD_BY_COMMAND: first})
    watcher.tick()
    assert people.messages() == []
    a_run(instance, error=JobFailedError(SENTENCE), **{TOLD_BY_COMMAND.replace("/", "__"): first})
    watcher.tick()
    assert len(people.messages()) == 1


def test_what_could_not_be_told_is_a_note_on_the_run(instance, people: People):
    watcher = Watcher(instance)
    run_id = a_run(instance, error=JobFailedError(SENTENCE))
    people.fault("status", path="^/(slack|api)/", status=500, times=50)
    said = watcher.tick()
    assert "slack:#mychannel did not get" in said
    events = [record.event_log_entry.message for record in instance.get_records_for_run(run_id).records]
    assert sum("did not get 'orders: a Tableau job failed'" in message for message in events) == 2


@pytest.mark.parametrize(
    ("hole", "error", "sentence"),
    [
        (None, DatasourceError("The connection broke."), "a publish was under way, and the next refresh finds out"),
        (None, RefusedError("No.", code="403004"), "the published datasource is unchanged"),
        ("2025-03-01", RefusedError("No.", code="403004"), "the datasource may lack rows until the next refresh"),
    ],
)
def test_a_publish_that_was_under_way_is_not_called_unchanged(instance, people: People, hole, error, sentence):
    store = ChangeSetStore(tir_home() / "extracts" / "orders" / "change_sets")
    known = SourceState(definition="d", schema="s", identity="i", token="t")
    store.intend(Intent("orders", "cs", "v", None, "f", known, hole))
    watcher = Watcher(instance)
    a_run(instance, error=error)
    watcher.tick()
    (message,) = people.messages()
    assert sentence in json.dumps(message["blocks"])


# What others report


def test_drift_that_a_check_reports_is_told_once_and_ended_by_its_recovery(instance, people: People):
    spec = an_extract()
    watcher = Watcher(instance, spec)
    for _ in range(2):
        report(spec, Cause.DRIFT, "slice 2025-03 differs", ident="check-1")
        watcher.tick()
    report_recovery(spec, "drift")
    watcher.tick()
    failure, recovery = people.messages()
    assert "slice 2025-03 differs" in failure["text"]
    assert recovery["thread_ts"] == failure["ts"]
    report_recovery(spec, "drift")
    watcher.tick()
    assert len(people.messages()) == 2


def test_what_a_command_verified_is_told_at_once_and_ends_when_nothing_is_known_to_differ(instance, people: People):
    spec, outcome = an_extract(), VerifyOutcome("orders", "v00000001", "now")
    for found in (["The server holds other rows than were confirmed."], [], []):
        tell_verified(spec, instance, outcome, print, found=found)
    failure, recovery = people.messages()
    assert "The server holds other rows" in failure["text"]
    assert recovery["thread_ts"] == failure["ts"]
    assert outcome.warnings == []


def test_a_sensor_that_cannot_read_is_told_and_so_is_that_it_reads_again(instance, people: People, seeded: Sandbox):
    gone = an_extract(source="MYDB.MYSCHEMA.NOT_THERE")
    watcher = Watcher(instance, gone)
    source_tick(instance, gone)
    watcher.tick()
    source_tick(instance, an_extract())
    watcher.tick()
    failure, recovery = people.messages()
    assert Cause.SENSOR_BLIND.value in failure["text"]
    assert "NOT_THERE" in failure["text"]
    assert "the sensor reads again" in recovery["text"]


def source_tick(instance: dg.DagsterInstance, spec: ExtractSpec) -> None:
    sensor = build_defs(specs=(spec,)).get_repository_def().get_sensor_def("orders_source")
    resources = {name: environment_resources()[name] for name in ("snowflake", "tableau", "state")}
    sensor(dg.build_sensor_context(instance=instance, resources=resources))


# Definitions


def test_all_extracts_share_one_sensor_that_runs_by_itself():
    defs = build_defs(specs=(an_extract("orders"), an_extract("customers")))
    (sensor,) = [sensor_def for sensor_def in defs.sensors if "alerts" in sensor_def.name]
    assert (sensor.name, sensor.default_status) == ("alerts", dg.DefaultSensorStatus.RUNNING)
    assert "alerts" not in [sensor_def.name for sensor_def in build_defs(specs=(an_extract(alerts=None),)).sensors]


def test_the_definitions_of_one_extract_bring_a_sensor_of_their_own():
    assert "orders_alerts" in [sensor_def.name for sensor_def in build_extract_defs(an_extract()).sensors]
    assert len(build_extract_defs(an_extract(alerts=None)).sensors) == 1


# The end of a command


@pytest.fixture(scope="module")
def datasource(seeded: Sandbox) -> Sandbox:
    """A datasource of these tests, which Tableau refreshes itself: no Spark is needed."""
    sample.seed_datasource(seeded.env, timeout=120, name="told")
    return seeded


@pytest.fixture
def tableau(datasource: Sandbox) -> Iterator[Admin]:
    admin = Admin(datasource.tableau_url)
    yield admin
    admin.clear_faults()


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One history for all commands: to make its tables takes longer than a refresh."""
    return tmp_path_factory.mktemp("history")


@pytest.fixture
def specs(tmp_path: Path, history: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAGSTER_HOME", str(history))
    file = tmp_path / "specs.yaml"
    value = {
        "name": "orders",
        "source": sample.TABLE,
        "delivery": "trigger",
        "datasource": {"project": "myproject", "name": "told"},
        "thresholds": {"quiet_period": "0 seconds"},
        "alerts": ALERTS,
    }
    file.write_text(json.dumps({"extracts": [value]}), encoding="utf-8")
    monkeypatch.setenv("TIR_SPECS", str(file))
    return file


def refresh(*options: str) -> Result:
    return CliRunner().invoke(tir, ["refresh", "orders", *options])


def test_a_failed_command_and_a_good_one_are_one_thread_and_one_incident(specs, tableau: Admin, people: People):
    tableau.fault("fail_job", notes="The disk is <full> & more.")
    assert refresh("--full").exit_code == 1
    done = refresh("--full")
    assert done.exit_code == 0, done.output
    first, answer = people.messages()
    assert answer["thread_ts"] == first["ts"]
    assert "The disk is &lt;full&gt; &amp; more" in first["text"]
    assert "orders / published_datasource" in json.dumps(first["blocks"])
    (incident,) = people.incidents()
    assert (incident["notes"], incident["state"], bool(incident["resolved_at"])) == ([], "6", True)


def test_a_good_command_is_told_with_its_run_and_the_sensor_adds_nothing(specs, tableau: Admin, people: People):
    with dagster_instance() as instance:
        watcher = Watcher(instance)
        done = json.loads(refresh("--full", "--json").stdout)
        watcher.tick()
    (message,) = people.messages()
    text = json.dumps(message["blocks"])
    assert "orders: refreshed (full, REQUESTED)" in text
    assert f"http://dagster.example/runs/{done['run_ids'][-1]}" in text
    assert "myproject/told" in text


def test_a_load_that_fails_is_told_by_its_command_and_ended_by_the_next(specs, seeded: Sandbox, people: People):
    """Without people of its own: those of the extract on its table hear of failures and their end."""
    folder = specs.parent / "landing"
    files = {"path": f"file://{folder}", "format": "csv"}
    load = {"name": "order_files", "table": sample.TABLE, "files": files, "mode": "append"}
    specs.write_text(json.dumps({**json.loads(specs.read_text()), "loads": [load]}), encoding="utf-8")
    assert CliRunner().invoke(tir, ["load", "order_files"]).exit_code == 1
    folder.mkdir()
    for _ in range(2):
        done = CliRunner().invoke(tir, ["load", "order_files"])
        assert done.exit_code == 0, done.output
    failure, recovery = people.messages()
    assert "order_files: the load failed" in failure["text"]
    assert "is not a folder" in failure["text"]
    assert (recovery["thread_ts"], "the load works again" in recovery["text"]) == (failure["ts"], True)
    assert [incident["correlation_id"] for incident in people.incidents()] == ["tir/order_files/load"]


def test_a_wrong_command_is_nobody_elses_business(specs, tableau: Admin, people: People):
    assert refresh("--slices", "2025-03").exit_code == 2
    assert people.messages() == []


# What both endpoints do, at their first and their second try.
HTML = {"kind": "status", "status": 502, "message": "<html>bad gateway</html>"}
BUSY, BROKEN = {"kind": "status", "status": 429, "retry_after": 0.1}, {"kind": "status", "status": 500}
TROUBLES: dict[str, dict[str, list[dict[str, Any]]]] = {
    "down": {},
    "slow": {"^/(slack|api)/": [{"kind": "delay", "seconds": 30}] * 9},
    "answering 429, 500 and HTML": {"^/slack/": [BUSY, BROKEN], "^/api/": [BROKEN, HTML]},
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_people_who_cannot_be_reached_change_nothing_about_a_refresh(
    specs, tableau: Admin, people: People, monkeypatch, trouble: str
):
    for path, faults in TROUBLES[trouble].items():
        for fault in faults:
            people.fault(**fault, path=path)
    if trouble == "down":
        monkeypatch.setenv("SLACK_API_URL", "http://127.0.0.1:9/")
        monkeypatch.setenv("SERVICENOW_URL", "http://127.0.0.1:9")
    # A recovery concerns both of them.
    problem = Problem("orders/refresh", "STEP_FAILED", time.time(), time.time(), 1, {"orders": "refresh"})
    alert_storage().save(AlertState(), AlertState(problems={problem.key: problem}))
    with dagster_instance() as instance:
        running = TriggerCommand(an_extract(), instance, lambda _: None)
        begun = time.monotonic()
        outcome = running.refresh("full", (), allow_empty=False)
        took = time.monotonic() - begun
    assert outcome.published
    assert sum("did not get" in warning for warning in outcome.warnings) == 2
    assert took - outcome.seconds < an_extract().alerts.timeout


def test_a_failure_that_nobody_could_be_told_of_is_told_by_the_command(specs, tableau: Admin, people: People):
    people.fault("status", status=500, path="^/(slack|api)/", times=50)
    tableau.fault("fail_job", notes="no")
    failed = refresh("--full", "--json")
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert "servicenow:mygroup did not get" in failed.stderr
    assert "slack:#mychannel did not get" in failed.stderr
