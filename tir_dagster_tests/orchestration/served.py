"""One extract that Tableau loads itself: a small table, a datasource with incremental refresh on it, and its refresher."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from pyspark.sql import SparkSession

from tir_dagster.changes.plan import Mode, Plan
from tir_dagster.refresh.state.change_sets import new_id
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.retries import RetryPolicy
from tir_dagster.sandbox.tableau.packages import Column, SnowflakeConnection, build_tdsx
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import paced
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.conftest import download
from tir_dagster_tests.orchestration.pace import nap
from tir_dagster_tests.packages import check_package, document_of, plain
from tir_dagster_tests.sandbox.tableau.helpers import Admin
from tir_dagster_tests.stages import Refresher

DATABASE, PROJECT = "SERVED", "served"
_START = datetime.fromisoformat("2025-03-01 00:00:00")
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Key:
    """A type of increment key: its values in their order as SQL, and how an extract on it is sliced."""

    type: str
    value: Callable[[int], str]
    slices: Mapping[str, Any]


def _date(number: int) -> str:
    return f"'{_START + timedelta(days=5 * number):%Y-%m-%d}'::DATE"


def _moment(number: int) -> str:
    """Four to a second, of which one is whole: neighbours differ in microseconds only."""
    fraction = (0, 1, 2, 999_999)[number % 4]
    return f"'{_START + timedelta(seconds=number // 4, microseconds=fraction)}'::TIMESTAMP_NTZ"


KEYS = {
    "date": Key("DATE", _date, {"column": "I", "by": "month", "start": "2025-03"}),
    "datetime": Key("TIMESTAMP_NTZ", _moment, {"column": "I", "by": "day", "start": "2025-03-01"}),
    "integer": Key("NUMBER(38,0)", lambda number: str(number - 3), {}),
}


@dataclass(frozen=True)
class Done:
    """What a refresh did; the reason is the plan's, or why the server had to load everything."""

    plan: Plan
    reason: str | None = None
    confirmation: Confirmation | None = None

    @property
    def decision(self) -> str:
        return "full" if self.reason else self.plan.decision


@dataclass
class Clock:
    """The time of the server and of whoever waits for it: a sleep moves both ahead, and hardly takes any time."""

    url: str
    ahead: float = 0.0
    # By how much more than the server's this machine's time went on, once.
    late: float = 0.0
    # Told of each sleep before the time moves.
    listen: Callable[[float], None] = lambda _: None

    @staticmethod
    def of_server(url: str) -> Clock:
        """Go on from where other files of this process left the server's clock: no job may be older than the ones before it."""
        settings = requests.get(f"{url}/sandbox/settings", timeout=30).json()
        return Clock(url, ahead=settings["clock_offset_seconds"])

    def sleep(self, seconds: float) -> None:
        self.listen(seconds)
        self.ahead += max(seconds, 0.0)
        Admin(self.url).set(clock_offset_seconds=self.ahead)
        nap(seconds)

    def now(self) -> datetime:
        late, self.late = self.late, 0.0
        return datetime.now(UTC) + timedelta(seconds=self.ahead + late)

    def policy(self) -> RetryPolicy:
        return RetryPolicy(sleep=self.sleep, clock=lambda: time.monotonic() + self.ahead)


@dataclass
class Served:
    """The table, its datasource and its refresher; each step is one that a user, Tableau or a crash could take.

    `key` is the type of the increment key, `settings` go into the spec and `datasource` into its datasource. With a
    `server_clock` nothing sleeps in a refresh.
    """

    sandbox: Sandbox
    spark: SparkSession
    folder: Path
    key: str = "date"
    rows: int = 24
    settings: Mapping[str, Any] = field(default_factory=dict)
    datasource: Mapping[str, Any] = field(default_factory=dict)
    # Whether Tableau has loaded the datasource once, as it has when people built it.
    extracted: bool = True
    # Whether people built it; else the first refresh creates it.
    built: bool = True
    server_clock: Clock | None = None
    name: str = field(default_factory=lambda: f"s{next(_numbers)}")
    confirmed: Confirmation | None = None
    clock: int = 0
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sandbox.prepare(DATABASE, PROJECT)
        self.connection = self.sandbox.snowflake(database=DATABASE, schema="PUBLIC")
        name, secret = self.sandbox.new_token()
        self.env = {**self.sandbox.env, "TABLEAU_TOKEN_NAME": name, "TABLEAU_TOKEN_SECRET": secret}
        self._make_table()
        self.refresher = self._refresher()
        if self.built:
            self._make_datasource()
            self.before = document_of(download(self.sandbox, self.name, self.folder / "before"))

    def close(self) -> None:
        self.connection.close()

    def value(self, number: int) -> str:
        """The increment key's value of that number as SQL; greater numbers are greater values."""
        return KEYS[self.key].value(number)

    @property
    def url(self) -> str:
        return self.sandbox.tableau_url

    # How it is made

    def _make_table(self) -> None:
        self.sql(f"CREATE TABLE {self.name} (K NUMBER(38,0), I {KEYS[self.key].type}, V VARCHAR, W TIMESTAMP_NTZ)")
        # Two rows to a value: ties are as usual as they are in life.
        rows = ", ".join(f"({at}, {self.value(at // 2)}, 'first')" for at in range(self.rows))
        if rows:
            stamp = "'2025-01-01'::TIMESTAMP_NTZ"
            self.sql(f"INSERT INTO {self.name} SELECT *, {stamp} FROM VALUES {rows}")

    def _make_datasource(self) -> None:
        with self.sandbox.tableau() as server, tempfile.TemporaryDirectory(prefix="tir-served-") as folder:
            package = self._package(Path(folder) / f"{self.name}.tdsx")
            user, password = self.env["SNOWFLAKE_USER"], self.env["SNOWFLAKE_PASSWORD"]
            (project,) = server.projects.filter(name=PROJECT)
            datasource = server.datasources.publish(
                TSC.DatasourceItem(project.id, name=self.name),
                str(package),
                mode=TSC.Server.PublishMode.CreateNew,
                connection_credentials=TSC.ConnectionCredentials(user, password, embed=True),
            )
            self.datasource_id = str(datasource.id)
            if self.extracted:
                server.jobs.wait_for_job(server.datasources.refresh(datasource), timeout=60)

    def _package(self, path: Path) -> Path:
        connection = SnowflakeConnection(
            server=f"{self.env['SNOWFLAKE_ACCOUNT']}.snowflakecomputing.com",
            dbname=DATABASE,
            schema="PUBLIC",
            warehouse="WH",
            role="SYSADMIN",
            username=self.env["SNOWFLAKE_USER"],
        )
        columns = [
            Column("K", "NUMBER(38,0)"),
            Column("I", KEYS[self.key].type),
            Column("V", "VARCHAR"),
            Column("W", "TIMESTAMP_NTZ"),
        ]
        return build_tdsx(
            path,
            caption=self.name,
            columns=columns,
            snowflake=connection,
            table=self.name.upper(),
            increment_key="I",
        )

    def _refresher(self) -> Refresher:
        return Refresher(
            self.spec(),
            now=self.server_clock.now if self.server_clock else lambda: datetime.now(UTC),
            snowflake=SnowflakeAccess.from_environment(self.env),
            tableau=TableauAccess.from_environment(self.env),
            spark=lambda: self.spark,
            home=self.folder,
            log=self.lines.append,
            env=self.env,
        )

    def declare(
        self, *, settings: Mapping[str, Any] | None = None, datasource: Mapping[str, Any] | None = None
    ) -> None:
        """The same extract under another spec."""
        self.settings, self.datasource = settings or {}, datasource or {}
        self.refresher = self._refresher()

    def spec(self) -> ExtractSpec:
        slices = KEYS[self.key].slices
        credentials = {"username_env": "SNOWFLAKE_USER", "password_env": "SNOWFLAKE_PASSWORD"}
        return spec_from_mapping(
            {
                "name": self.name,
                "source": f"{DATABASE}.PUBLIC.{self.name}",
                "row_key": ["K"],
                **({"slices": slices} if slices else {}),
                "changes": {"watermark": "W", "look_back": "1 second"},
                "datasource": {
                    "project": PROJECT,
                    "name": self.name,
                    "credentials": credentials,
                    # Waited for on the test's clock, and yet every look is a call.
                    "job_timeout": "20 minutes",
                    **self.datasource,
                },
                "delivery": "server",
                "thresholds": {"quiet_period": "0 seconds", "full_share": 1.0},
                **self.settings,
            },
            "a served extract",
        )

    # What happens to the table

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """`{t}` is the table, `{stamp}` a later time than every stamp before."""
        self.clock += 1
        stamp = f"DATEADD('minute', {self.clock}, '2025-01-01'::TIMESTAMP_NTZ)"
        text = statement.replace("{t}", self.name).replace("{stamp}", stamp)
        return self.connection.cursor().execute(text).fetchall()

    def act(self, step: Sequence[Any]) -> None:
        """One statement, its arguments as SQL: keys, increment values, texts."""
        kind, *args = step
        statements = {
            "insert": "INSERT INTO {t} SELECT {0}, {1}, {2}, {stamp}",
            "update": "UPDATE {t} SET V = {1}, W = {stamp} WHERE K = {0}",
            "rekey": "UPDATE {t} SET K = {1}, W = {stamp} WHERE K = {0}",
            "move": "UPDATE {t} SET I = {1}, W = {stamp} WHERE K = {0}",
            "touch": "UPDATE {t} SET W = {stamp} WHERE K = {0}",
            "delete": "DELETE FROM {t} WHERE K = {0}",
            "delete from": "DELETE FROM {t} WHERE I >= {0}",
            "empty": "DELETE FROM {t}",
        }
        text = statements[kind]
        for at, value in enumerate(args):
            text = text.replace(f"{{{at}}}", str(value))
        self.sql(text)

    # What happens to the extract

    def refresh(
        self, mode: Mode = "changes", *, until: str = "confirmed", listen: Callable[[str], None] = lambda _: None
    ) -> Done:
        """One refresh, ended after a step as a crash would end it; `listen` hears each line of its log."""

        def log(line: str) -> None:
            self.lines.append(line)
            listen(line)

        self.lines.clear()
        self.refresher.begin()
        self.refresher.listen(log)
        with paced(self.server_clock.policy()) if self.server_clock else nullcontext():
            return self._refresh(mode, until)

    def _refresh(self, mode: Mode, until: str) -> Done:
        refresher = self.refresher
        looked = refresher.look(self.confirmed)
        if looked.late is not None:
            self._confirm(looked.late)
        surveyed = refresher.survey(looked)
        plan = refresher.plan(looked, surveyed, mode)
        if plan.decision == "none":
            return Done(plan)
        plan, change_set = refresher.detect(looked, surveyed, plan, ident=new_id(), resync=[], allow_empty=True)
        if change_set is None or until == "staged":
            return Done(plan, change_set.reason if change_set else None)
        version = refresher.apply(looked, change_set)
        if until == "verified":
            return Done(plan, change_set.reason)
        confirmation = refresher.publish(looked, version).confirmation
        if until != "published":
            self._confirm(confirmation)
        return Done(plan, refresher.full_reason or change_set.reason, confirmation)

    def _confirm(self, confirmation: Confirmation) -> None:
        self.confirmed = confirmation
        self.refresher.settle(confirmation)

    # What people see

    def source_rows(self) -> Counter:
        return Counter(tuple(map(plain, row)) for row in self.sql("SELECT I, K, V, W FROM {t}"))

    def published_rows(self) -> Counter:
        """The rows as anybody would download them, in a package that is as it must be."""
        package = download(self.sandbox, self.name, self.folder / "seen")
        rows = check_package(package, self.folder / "seen", before=self.before)
        return Counter(tuple(map(plain, row)) for row in rows)
