"""Servers, disks and others at work: what is refused, cut, full, held or not there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tir_dagster import files
from tir_dagster.alerts.events import Event
from tir_dagster.alerts.retries import Persistence
from tir_dagster.alerts.sending import channels_of
from tir_dagster.alerts.servicenow import ServiceNowAccess, ServiceNowChannel
from tir_dagster.alerts.slack import SlackChannel
from tir_dagster.orchestration.alerts.resources import ServiceNowResource, SlackAppResource
from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster.refresh.state.hold import Hold, HoldFile
from tir_dagster.refresh.state.lease import lease
from tir_dagster.retries import RetryPolicy
from tir_dagster.sandbox.home import SandboxHome
from tir_dagster.sandbox.tableau.packages import Column
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.alerts import Alerts, ServiceNowAlerts
from tir_dagster.tableau.access import TableauAccess, TableauToken
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import find_datasource, find_project, list_projects
from tir_dagster.tableau.publishing import publish
from tir_dagster.tableau.transfer import download
from tir_dagster_tests.bad_inputs.case import Case, Edits, Scene
from tir_dagster_tests.conftest import People
from tir_dagster_tests.orchestration.shell import sample_columns
from tir_dagster_tests.sandbox.tableau.helpers import LIVE_ONLY
from tir_dagster_tests.tunnel import self_signed, tunnelled

DATASOURCE = ("the datasource", "versions and change sets")
OTHER_NAME = (("name: mydatasource", "name: dx"),)


def refresh(*arguments: str, edit: Edits = (), **env: str | None) -> Callable[[Scene], str]:
    return lambda scene: scene.tir("refresh", "orders", *arguments, edit=edit, **env)


# The source


def source_cases() -> list[Case]:
    area = "The source"

    def edited(done: str, *edit: tuple[str, str]) -> Case:
        return Case(area, done, refresh(edit=edit), DATASOURCE)

    def queried(query: str) -> Case:
        edit = (
            ("source: MYDB.MYSCHEMA.MYTABLE", f"query: {query}"),
            ("name: mydatasource", "name: by_query\n      create: true"),
        )
        return Case(area, f"`query: {query}`", refresh(edit=edit), DATASOURCE)

    def asked(done: str, sql: str) -> Case:
        return Case(
            area,
            done,
            lambda scene: SnowflakeAccess.from_environment(scene.place.sandbox.env).query(sql),
            ("the datasource",),
        )

    return [
        edited("`row_key: ORDER_IDX`, a column that is not there", ("row_key: ORDER_ID", "row_key: ORDER_IDX")),
        edited("`slices.column: DAY`, a column that is not there", ("column: ORDER_DATE", "column: DAY")),
        edited("`watermark: UPDATED`, a column that is not there", ("watermark: UPDATED_AT", "watermark: UPDATED")),
        edited("a table that is not there", ("MYSCHEMA.MYTABLE", "MYSCHEMA.NOTHING")),
        edited("a schema that is not there", ("MYDB.MYSCHEMA.MYTABLE", "MYDB.NOTHING.MYTABLE")),
        edited("a database that is not there", ("MYDB.MYSCHEMA.MYTABLE", "NOTHING.MYSCHEMA.MYTABLE")),
        queried("SELECT ORDER_ID, ORDER_DAT FROM MYDB.MYSCHEMA.MYTABLE"),
        queried("SELECT ORDER_ID, ORDER_DATE FROM MYDB.MYSCHEMA.NOTABLE"),
        queried("SELECT CUSTOMER, ORDER_DATE FROM MYDB.MYSCHEMA.MYTABLE"),
        asked(
            "a version before Time Travel",
            "SELECT * FROM MYDB.MYSCHEMA.MYTABLE AT(TIMESTAMP => '2001-01-01T00:00:00+00:00'::TIMESTAMP_TZ)",
        ),
        asked(
            "changes of a table that does not track them",
            "SELECT * FROM MYDB.MYSCHEMA.REFUSED CHANGES(INFORMATION => DEFAULT) AT(OFFSET => 0)",
        ),
    ]


# Tableau


def project_of(client: TableauClient) -> Any:
    return find_project(client, "myproject")


@contextmanager
def client_of(scene: Scene, *, fault: dict[str, Any] | None = None, **access: Any) -> Iterator[TableauClient]:
    """A client that tries once; the server has this fault as long as it is used."""
    # A token of its own: commands sign in with the other one.
    token = TableauToken(*scene.place.sandbox.new_token())
    known = replace(TableauAccess.from_environment(scene.place.sandbox.env), identity=token)
    with ExitStack() as stack:
        if fault:
            scene.admin.fault(**{"times": 100, **fault})
            stack.callback(scene.admin.clear_faults)
        yield stack.enter_context(TableauClient(replace(known, **access), retry=RetryPolicy(tries=1)))


def listing(**options: Any) -> Callable[[Scene], Any]:
    def provoke(scene: Scene) -> None:
        with client_of(scene, **options) as client:
            list_projects(client)

    return provoke


def tableau_cases() -> list[Case]:
    area = "Tableau"

    def published_as(done: str, build: Callable[[Scene], Path]) -> Case:
        return Case(
            area,
            done,
            refresh(edit=OTHER_NAME),
            DATASOURCE,
            prepare=lambda scene: scene.built.publish("dx", build(scene)),
        )

    def live(scene: Scene) -> Path:
        return scene.file("live.tds", LIVE_ONLY)

    def fewer(scene: Scene) -> Path:
        columns = [column for column in sample_columns() if column.remote_name != "ORDER_DATE"]
        return scene.built.build("fewer.tdsx", columns, table="MYTABLE")

    def more(scene: Scene) -> Path:
        return scene.built.build("more.tdsx", [*sample_columns(), Column("EXTRA", "VARCHAR")], table="MYTABLE")

    def custom(scene: Scene) -> Path:
        return scene.built.build("sql.tdsx", sample_columns(), custom_sql="SELECT * FROM MYTABLE WHERE QUANTITY > 1")

    def bad_package(scene: Scene) -> None:
        with client_of(scene) as client:
            publish(client, scene.file("orders.tdsx", "no package"), project=project_of(client), name="new")

    def wrong_file(scene: Scene) -> None:
        with client_of(scene) as client:
            publish(client, scene.folder / "orders.csv", project=project_of(client), name="new")

    def no_room(scene: Scene) -> None:
        with client_of(scene) as client:
            found = find_datasource(client, project=project_of(client), name="mydatasource")
            taken = scene.file("taken")
            download(client, found, taken / "orders.tdsx")

    return [
        Case(area, "a project that is not there", refresh(edit=(("myproject", "myprojekt"),)), DATASOURCE),
        Case(area, "a datasource that is not there", refresh(edit=(("name: mydatasource", "name: nodatasource"),)), DATASOURCE),
        published_as("a datasource of another table", lambda scene: scene.built.edited("[MYSCHEMA].[MYTABLE]", "[MYSCHEMA].[OTHERS]")),
        published_as("a datasource of custom SQL", custom),
        published_as(
            "a datasource whose extract is filtered",
            lambda scene: scene.built.edited("<extract ", "<filter class='categorical' column='[REGION]' /><extract "),
        ),
        published_as("a datasource whose extract is limited", lambda scene: scene.built.edited('count="-1"', 'count="100"')),
        published_as("a datasource that lacks a column", fewer),
        published_as("a datasource with a column that the source does not have", more),
        published_as("a live datasource", live),
        Case(
            area,
            "no `credentials` for a datasource with an embedded password",
            refresh(edit=(("      credentials: {username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD}\n", ""),)),
            DATASOURCE,
        ),
        Case(
            area,
            "`password_env` names a variable that is not set",
            refresh(edit=(("password_env: SNOWFLAKE_PASSWORD", "password_env: NOT_SET"),)),
            DATASOURCE,
        ),
        Case(area, "a wrong `TABLEAU_TOKEN_SECRET`", refresh(TABLEAU_TOKEN_SECRET="wrong"), DATASOURCE),
        Case(area, "a site that is not there", refresh(TABLEAU_SITE="nosite"), DATASOURCE),
        Case(area, "a file that is no package is published", bad_package, ("the datasource",)),
        Case(area, "a CSV file is published", wrong_file, ("the datasource",)),
        Case(area, "a download to a path that cannot be", no_room, ("the datasource",)),
    ]  # fmt: skip


# The network


def network_cases() -> list[Case]:
    area = "The network"
    server = ("the datasource",)

    def untrusted(use: Callable[[Scene, str], Any], address: Callable[[Scene], str]) -> Callable[[Scene], Any]:
        def provoke(scene: Scene) -> None:
            with tunnelled(address(scene), self_signed(scene.folder)) as tunnel:
                use(scene, tunnel.url)

        return provoke

    def snowflake(scene: Scene, **changes: Any) -> None:
        replace(SnowflakeAccess.from_environment(scene.place.sandbox.env), login_timeout=2, **changes).query("SELECT 1")

    def closed_port() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return [
        Case(area, "nobody listens at `TABLEAU_SERVER_URL`", listing(server_url=f"http://127.0.0.1:{closed_port()}"), server),
        Case(area, "`TABLEAU_SERVER_URL` with a name that is not known", listing(server_url="http://tableau.invalid"), server),
        Case(area, "https where the server speaks http", lambda scene: listing(server_url=scene.place.sandbox.tableau_url.replace("http:", "https:"))(scene), server),
        Case(area, "Tableau with a certificate that nobody trusts", untrusted(lambda scene, url: listing(server_url=url)(scene), lambda scene: scene.place.sandbox.tableau_url), server),
        Case(area, "`TABLEAU_SERVER_URL` of something else", lambda scene: listing(server_url=scene.place.sandbox.people_url)(scene), server),
        Case(area, "Tableau answers 503", listing(fault={"kind": "status", "path": "/projects", "status": 503}), server),
        Case(area, "Tableau asks for fewer calls (429)", listing(fault={"kind": "status", "path": "/projects", "status": 429}), server),
        Case(area, "the connection to Tableau is cut", listing(fault={"kind": "cut", "when": "after", "path": "/projects"}), server),
        Case(area, "the session ends again and again", listing(fault={"kind": "expire_session", "path": "/projects"}), server),
        Case(area, "nobody listens at `SNOWFLAKE_PORT`", lambda scene: snowflake(scene, port=closed_port()), server),
        Case(area, "a wrong `SNOWFLAKE_PASSWORD`", lambda scene: snowflake(scene, password="wrong"), server),
        Case(area, "Snowflake with a certificate that nobody trusts", untrusted(lambda scene, url: snowflake(scene, protocol="https", port=int(url.rpartition(":")[2])), lambda scene: f"http://127.0.0.1:{scene.place.sandbox.env['SNOWFLAKE_PORT']}"), server),
    ]  # fmt: skip


# The disk


@contextmanager
def holding(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lease until the block ends."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom tir_dagster.refresh.state.lease import lease\n"
        "with lease(Path(sys.argv[1]), purpose='a nightly run'):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.stdin.close()


def disk_cases() -> list[Case]:
    area = "The disk and the state"
    damaged = "orders/change_sets/20260101T000000-abc/change_set.json"

    def changed_while_sent(scene: Scene) -> None:
        file = scene.file("extract.hyper", "1234")
        sent = files.VirtualFile.of(file)
        os.utime(file, ns=(1, 1))
        sent.check()

    def identity(scene: Scene) -> None:
        SandboxHome(scene.file("identity.json", "{}").parent).identity()

    return [
        Case(area, "a disk without room for the extract", lambda scene: files.need_space(scene.folder, 1 << 60)),
        Case(area, "an extract that somebody writes to while it is sent", changed_while_sent),
        Case(
            area,
            "a damaged change set",
            lambda scene: ChangeSetStore(scene.folder / "orders" / "change_sets").pending(),
            FILE,
            prepare=lambda scene: scene.file(damaged, "{"),
        ),
        Case(
            area,
            "a damaged intent",
            lambda scene: ChangeSetStore(scene.folder / "orders" / "change_sets").intent(),
            FILE,
            prepare=lambda scene: scene.file("orders/change_sets/intent.json", "{"),
        ),
        Case(
            area,
            "a file where `TIR_HOME` should be a folder",
            lambda scene: scene.tir("plan", "orders", TIR_HOME=str(scene.file("home"))),
            ("the datasource",),
        ),
        Case(area, "a damaged `identity.json` of the sandbox", identity),
        Case(
            area,
            "`tir sandbox env` where no sandbox runs",
            lambda scene: scene.tir("sandbox", "env", TIR_HOME=str(scene.folder)),
        ),
    ]


FILE = ("the file",)


# Others at work


def concurrency_cases() -> list[Case]:
    area = "Two at once, holds and rollbacks"

    def held_lease(scene: Scene) -> None:
        path = scene.folder / "orders" / "lease.json"
        with holding(path), lease(path, purpose="me"):
            pass

    def lost_lease(scene: Scene) -> None:
        path = scene.folder / "orders" / "lease.json"
        with lease(path, purpose="me") as held:
            other = {
                "id": "x",
                "host": "elsewhere",
                "pid": 7,
                "purpose": "a nightly run",
                "since": "2026-01-01 00:00:00 UTC",
            }
            path.write_text(json.dumps(other), encoding="utf-8")
            held.check()

    def on_hold(scene: Scene) -> str:
        hold = HoldFile(Path(os.environ["TIR_HOME"]) / "extracts" / "orders")
        hold.put(Hold("2026-01-01 00:00 UTC", "ada", "prices of Tuesday were wrong"))
        try:
            return scene.tir("refresh", "orders", "--full")
        finally:
            hold.release()

    def latest(scene: Scene) -> str:
        home = Path(os.environ["TIR_HOME"]) / "extracts" / "orders" / "versions"
        return scene.tir("rollback", "orders", "--to", max(path.name for path in home.glob("v*")), "--dry-run")

    def one_token_two_sites(scene: Scene) -> None:
        access = TableauAccess.from_environment(scene.place.sandbox.env)
        with TableauClient(access), TableauClient(replace(access, site="other")):
            pass

    def asked(*command: str) -> Case:
        return Case(area, f"`tir {' '.join(command)}`", lambda scene: scene.tir(*command), DATASOURCE)

    return [
        Case(area, "a refresh while another process refreshes the extract", held_lease),
        Case(area, "a process that slept, and whose lease another one took", lost_lease),
        Case(area, "`tir refresh orders --full` on hold", on_hold, DATASOURCE),
        asked("rollback", "orders", "--to", "v00000099"),
        asked("rollback", "orders", "--to", "v00000099", "--dry-run"),
        asked("rollback", "orders", "--to", "previous"),
        Case(area, "a rollback to the version that is published", latest, DATASOURCE),
        asked("why", "orders", "--key", "first"),
        asked("why", "orders", "--key", "1", "--key", "2"),
        asked("why", "orders", "--key", "1", "--column", "COLOUR"),
        Case(area, "one token for two sites at once", one_token_two_sites, ("the datasource",)),
    ]


# Alerts

EVENT = Event("failure", "run-1", "bad inputs", ("orders",), "A title", "A text")
ONCE = Persistence(attempts=1, seconds=2.0)


def alert_cases() -> list[Case]:
    area = "Alerts"
    people = ("people's messages",)

    def slack(scene: Scene, *, token: str = "", channel: str = "#mychannel", **fault: Any) -> None:
        sandbox = scene.place.sandbox
        with people_fault(scene, fault):
            client = SlackAppResource(
                token=token or sandbox.identity.slack_token, api_url=sandbox.env["SLACK_API_URL"]
            ).get_client()
            SlackChannel(client, channel, ONCE).told(EVENT)

    def servicenow(scene: Scene, *, password: str = "", url: str = "", **fault: Any) -> None:
        sandbox = scene.place.sandbox
        with people_fault(scene, fault):
            access = ServiceNowResource(
                url=url or sandbox.people_url,
                username=sandbox.identity.servicenow_user,
                password=password or sandbox.identity.servicenow_password,
            ).access()
            ServiceNowChannel(access, ServiceNowAlerts(group="mygroup"), ONCE).told(EVENT)

    def unconfigured(_: Scene) -> None:
        alerts = Alerts(servicenow=ServiceNowAlerts(group="mygroup"))
        (make,) = channels_of(alerts, ONCE, slack=lambda: None, servicenow=ServiceNowAccess("")).values()
        make()

    def own_channel(_: Scene) -> None:
        alerts = Alerts(channels=("no_such_module:Mail",))
        (make,) = channels_of(alerts, ONCE, slack=lambda: None, servicenow=ServiceNowAccess("")).values()
        make()

    return [
        Case(area, "no `SLACK_BOT_TOKEN`", lambda _: SlackAppResource().get_client(), people),
        Case(area, "a wrong `SLACK_BOT_TOKEN`", lambda scene: slack(scene, token="xoxb-wrong"), people),
        Case(area, "a Slack channel that is not there", lambda scene: slack(scene, channel="#no such channel"), people),
        Case(area, "Slack asks for fewer calls (429)", lambda scene: slack(scene, kind="status", path="/slack", status=429), people),
        Case(area, "no variables of ServiceNow", unconfigured, people),
        Case(area, "a wrong `SERVICENOW_PASSWORD`", lambda scene: servicenow(scene, password="wrong"), people),
        Case(area, "ServiceNow answers 500", lambda scene: servicenow(scene, kind="status", path="/api/now", status=500), people),
        Case(area, "nobody listens at `SERVICENOW_URL`", lambda scene: servicenow(scene, url="http://127.0.0.1:9"), people),
        Case(area, "a custom channel whose module is not there", own_channel, people),
    ]  # fmt: skip


@contextmanager
def people_fault(scene: Scene, fault: dict[str, Any]) -> Iterator[None]:
    people = People(scene.place.sandbox.people_url)
    if fault:
        people.fault(**{"times": 10, **fault})
    try:
        yield
    finally:
        people.heal()


CASES = [
    *source_cases(),
    *tableau_cases(),
    *network_cases(),
    *disk_cases(),
    *concurrency_cases(),
    *alert_cases(),
]
