"""Refreshes that Tableau tells of: from its webhook over HTTP to an observation, and what strangers get for an answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from click.testing import CliRunner, Result
from tableauhyperapi import HyperProcess, Telemetry

from tir_dagster.changes.plan import SourceState
from tir_dagster.cli.main import tir
from tir_dagster.cli.webhook_receiver import LARGEST_BODY, Receiver
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.orchestration.metadata import CONFIRMATION
from tir_dagster.orchestration.sensing.webhooks import AT, DURING, EVENT, Observer, refreshed_elsewhere
from tir_dagster.refresh.state.lease import lease
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.sandbox.tableau.packages import Column
from tir_dagster.sandbox.tableau.settings import Settings
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import parse_specs
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.sandbox.tableau.helpers import Admin, Publisher, Source

SECRET = "not-the-secret-of-anybody-else-0123456789"
SUCCEEDED, FAILED = "DatasourceRefreshSucceeded", "DatasourceRefreshFailed"
PUBLISHED = dg.AssetKey(["orders", "published_datasource"])
PAGE = "https://tableau.example.com/#/datasources/7"


def confirm(instance: dg.DagsterInstance, datasource_id: str, key: dg.AssetKey = PUBLISHED) -> None:
    """As a refresh of the extract `orders` ends."""
    confirmation = Confirmation(
        extract="orders",
        version="v00000001",
        source_version="2026-01-01T00:00:00.000000+00:00",
        known=SourceState("d", "s", "i", "t"),
        watermark=None,
        datasource_id=datasource_id,
        server_version="1",
        fingerprint="f",
        rows=1,
        change_sets=(),
    )
    metadata = {CONFIRMATION: confirmation.to_json(), "dagster/uri": dg.MetadataValue.url(PAGE)}
    instance.report_runless_asset_event(dg.AssetMaterialization(key, metadata=metadata))


def observed(instance: dg.DagsterInstance, key: dg.AssetKey = PUBLISHED) -> list[dict[str, Any]]:
    """What the observations say, oldest first."""
    records = instance.fetch_observations(key, limit=100, ascending=True).records
    events = [record.asset_observation for record in records]
    return [{name: value.value for name, value in event.metadata.items()} for event in events if event]


# The receiver alone


@dataclass
class Listening:
    """A receiver in this process, with a history of its own in which datasource "7" is confirmed."""

    instance: dg.DagsterInstance
    home: Path
    url: str = ""
    said: list[str] = field(default_factory=list)

    def post(self, body: Any, secret: str = SECRET, **more: Any) -> int:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return requests.post(f"{self.url}/any/prefix/{secret}", data, timeout=30, **more).status_code


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    with dg.DagsterInstance.ephemeral() as instance:
        confirm(instance, "7")
        made = Listening(instance, tmp_path)
        note = Observer(instance, tmp_path).note
        with Receiver(("127.0.0.1", 0), SECRET, note=note, say=made.said.append) as receiver:
            made.url = f"http://127.0.0.1:{receiver.server_port}"
            thread = threading.Thread(target=receiver.serve_forever, args=(0.02,))
            thread.start()
            yield made
            receiver.shutdown()
            thread.join()


def event(**more: Any) -> dict[str, Any]:
    known = {"resource": "EXTRACTS", "event_type": SUCCEEDED, "resource_name": "Orders", "site_luid": "s"}
    return {**known, "resource_luid": "7", "created_at": "2026-02-03T04:05:06Z", **more}


def test_an_event_becomes_one_observation_however_often_it_comes(listening: Listening) -> None:
    assert [listening.post(event()) for _ in range(3)] == [200, 200, 200]
    (noted,) = observed(listening.instance)
    assert noted == {
        EVENT: SUCCEEDED,
        AT: "2026-02-03T04:05:06+00:00",
        "tir/resource_name": "Orders",
        "tir/datasource_id": "7",
        "dagster/uri": PAGE,
        DURING: False,
    }
    assert "recorded before" in listening.said[-1]
    assert listening.post(event(event_type=FAILED)) == 200
    assert listening.post(event(created_at="2026-02-03T04:05:07Z")) == 200
    assert [event[EVENT] for event in observed(listening.instance)] == [SUCCEEDED, FAILED, SUCCEEDED]


def test_an_extract_is_known_under_a_key_of_ones_own(listening: Listening) -> None:
    key = dg.AssetKey(["sales", "orders_in_tableau"])
    listening.instance.report_runless_asset_event(dg.AssetMaterialization(["somebody", "elses"]))
    confirm(listening.instance, "9", key)
    assert listening.post(event(resource_luid="9")) == 200
    assert [event[EVENT] for event in observed(listening.instance, key)] == [SUCCEEDED]
    assert observed(listening.instance) == []


def test_a_refresh_while_we_are_at_work_is_marked(listening: Listening) -> None:
    with lease(listening.home / "extracts" / "orders" / "lease.json", purpose="a test"):
        listening.post(event())
    (noted,) = observed(listening.instance)
    assert noted[DURING] is True


@pytest.mark.parametrize(
    "body", [event(resource_luid="8"), event(event_type="WorkbookDeleted"), {}], ids=["unknown", "other", "test"]
)
def test_what_concerns_others_is_answered_with_success_and_left_alone(listening: Listening, body: Any) -> None:
    assert listening.post(body) == 200
    assert observed(listening.instance) == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"nonsense", 400),
        (b"", 400),
        (b"[" * 50_000, 400),
        (event(created_at=5), 400),
        (event(resource_luid={"a": 1}), 400),
        (b" " * (LARGEST_BODY + 1), 413),
        (b" " * 1_000_000, 413),
    ],
    ids=range(7),
)
def test_garbage_is_refused_and_the_receiver_goes_on(listening: Listening, body: Any, status: int) -> None:
    assert listening.post(body) == status
    assert observed(listening.instance) == []
    assert listening.post(event()) == 200


@pytest.mark.parametrize("secret", ["", SECRET[:-1], f"{SECRET}x", f"{SECRET}/", "%73", "ü" * 40], ids=range(6))
def test_who_does_not_know_the_secret_finds_nothing(listening: Listening, secret: str) -> None:
    assert listening.post(event(), secret) == 404
    assert requests.get(f"{listening.url}/{SECRET}", timeout=30).status_code == 404
    assert observed(listening.instance) == []
    assert SECRET not in "".join(listening.said)


def test_a_call_without_a_length_is_refused(listening: Listening) -> None:
    assert listening.post(b"", headers={"Content-Length": "-1"}) == 400


def test_a_caller_that_hangs_up_does_not_hurt(listening: Listening) -> None:
    host, _, port = listening.url.removeprefix("http://").partition(":")
    for start in (b"POST /", f"POST /{SECRET} HTTP/1.1\r\nContent-Length: 500\r\n\r\n{{".encode()):
        with socket.create_connection((host, int(port)), timeout=30) as caller:
            caller.sendall(start)
    assert listening.post(event()) == 200


def test_what_cannot_be_noted_is_left_for_tableau_to_send_again() -> None:
    def fail(_: Any) -> str:
        raise OSError("the disk is full")

    with Receiver(("127.0.0.1", 0), SECRET, note=fail, say=lambda _: None) as receiver:
        assert receiver.answer(json.dumps(event()).encode())[0] == 500


# What the source sensor makes of it


@pytest.mark.parametrize(
    ("delivery", "during", "kind", "follows"),
    [
        ("republish", False, SUCCEEDED, True),
        ("republish", True, SUCCEEDED, True),
        ("republish", False, FAILED, False),
        ("server", False, SUCCEEDED, True),
        ("server", True, SUCCEEDED, False),
        ("trigger", False, SUCCEEDED, False),
    ],
)
def test_a_refresh_of_somebody_else_is_followed_up(delivery: str, during: bool, kind: str, follows: bool) -> None:
    spec, since = extract(delivery), datetime.now(UTC) - timedelta(minutes=1)
    with dg.DagsterInstance.ephemeral() as instance:
        assert refreshed_elsewhere(instance, spec, PUBLISHED, since=since) is None
        metadata = {EVENT: kind, AT: "2026-02-03T04:05:06+00:00", DURING: during}
        instance.report_runless_asset_event(dg.AssetObservation(PUBLISHED, metadata=metadata))
        # By hand: it says nothing.
        instance.report_runless_asset_event(dg.AssetObservation(PUBLISHED))
        news = refreshed_elsewhere(instance, spec, PUBLISHED, since=since)
        assert news == ("refreshed@2026-02-03T04:05:06+00:00" if follows else None)
        later = datetime.now(UTC) + timedelta(minutes=1)
        assert refreshed_elsewhere(instance, spec, PUBLISHED, since=later) is None, (
            "it was before what the extract shows"
        )


def extract(delivery: str) -> ExtractSpec:
    text = f"""\
extracts:
  - name: orders
    source: D.S.T
    row_key: ID
    delivery: {delivery}
    datasource: {{project: p, name: n}}
"""
    if delivery == "trigger":
        text = text.replace("    row_key: ID\n", "")
    (spec,) = parse_specs(text, "test.yaml")
    return spec


# From Tableau to the history


@pytest.fixture(scope="module")
def home(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The environment of somebody who uses the sandbox, with a secret."""
    folder, token = tmp_path_factory.mktemp("webhooks"), sandbox.new_token()
    own = {"TIR_HOME": str(folder / "home"), "DAGSTER_HOME": str(folder / "dagster"), "TIR_WEBHOOK_SECRET": SECRET}
    signed = dict(zip(("TABLEAU_TOKEN_NAME", "TABLEAU_TOKEN_SECRET"), token, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**sandbox.env, **signed, **own}.items():
            patch.setenv(name, value)
        yield folder


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(tir, ["webhooks", *arguments], prog_name="tir")
    assert SECRET not in result.output
    return result


@contextmanager
def listener() -> Iterator[Callable[[], str]]:
    """The command as a process of its own; what is given waits until it listens, and tells where."""
    command = [sys.executable, "-m", "tir_dagster.cli.main", "webhooks", "listen", "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        output = process.stdout
        assert output is not None
        try:
            yield lambda: output.readline().split()[2].rstrip("/")
        finally:
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=30)
    assert (process.returncode, SECRET in said) == (0, False)


@contextmanager
def published(sandbox: Sandbox, folder: Path) -> Iterator[tuple[Publisher, Any]]:
    """A datasource of somebody else, over a table with one row."""
    schema = f"S{uuid.uuid4().hex[:12].upper()}"
    with (
        HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as hyper,
        sandbox.snowflake() as connection,
        sandbox.tableau() as server,
    ):
        source = Source(sandbox, connection.cursor(), "WEBHOOK_TESTS", schema, folder, hyper.endpoint)
        source.sql("CREATE DATABASE IF NOT EXISTS WEBHOOK_TESTS")
        source.sql(f"CREATE SCHEMA WEBHOOK_TESTS.{schema}")
        source.sql("CREATE TABLE {t} AS SELECT 1::NUMBER(38,0) AS ID")
        project = server.projects.create(TSC.ProjectItem(name=f"project-{uuid.uuid4().hex}"))
        publisher = Publisher(sandbox, server, project, folder)
        package = source.package(Column("ID", "NUMBER(38,0)"))
        yield publisher, publisher.publish(package, "Told", connection_credentials=publisher.credentials)


@pytest.fixture
def admin(sandbox: Sandbox) -> Iterator[Admin]:
    admin = Admin(sandbox.tableau_url)
    admin.set(job_seconds=0.01, webhook_retry_seconds=0.05)
    yield admin
    admin.clear_faults()
    admin.set(**asdict(Settings()))


def test_a_refresh_started_by_somebody_else_is_observed(sandbox: Sandbox, home: Path, admin: Admin) -> None:
    with (
        dagster_instance() as instance,
        listener() as url,
        published(sandbox, home) as (publisher, datasource),
    ):
        confirm(instance, datasource.id)
        assert run("register", "--url", url()).exit_code == 0
        publisher.refresh(datasource)
        (first,) = wait_for(lambda: observed(instance), "the observation")
        admin.fault("fail_job", path=datasource.id)
        publisher.refresh(datasource)
        _, second = wait_for(lambda: noted if len(noted := observed(instance)) > 1 else None, "another one")
        assert run("remove").stdout == "2 webhooks removed.\n"
    assert [(event[EVENT], event["tir/resource_name"]) for event in (first, second)] == [
        (SUCCEEDED, "Told"),
        (FAILED, "Told"),
    ]


def test_the_webhooks_are_listed_without_the_secret(home: Path) -> None:
    assert run("list").stdout == "No webhooks are registered.\n"
    output = run("register", "--url", "https://hooks.example.com/tir/").stdout
    assert output.splitlines() == [f"{kind}: https://hooks.example.com/tir/***" for kind in (SUCCEEDED, FAILED)]
    assert run("list").stdout == output
    webhooks_listed = json.loads(run("list", "--json").stdout)["webhooks"]
    assert [(webhook["event"], webhook["url"], webhook["enabled"]) for webhook in webhooks_listed] == [
        (kind, "https://hooks.example.com/tir/***", True) for kind in (SUCCEEDED, FAILED)
    ]
    assert run("remove").exit_code == 0
    assert run("remove").stdout == "No webhooks were registered.\n"


@pytest.mark.parametrize("command", [["listen"], ["register", "--url", "https://hooks.example.com"]])
def test_nothing_works_without_a_secret(home: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.delenv("TIR_WEBHOOK_SECRET")
    result = run(*command)
    assert result.exit_code == 1
    assert "openssl rand -hex 32" in result.stderr


def test_a_port_that_is_taken_is_told(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("listen", "--port", str(port))
    assert result.exit_code == 1
    assert f"Cannot listen on 127.0.0.1:{port}" in result.stderr
