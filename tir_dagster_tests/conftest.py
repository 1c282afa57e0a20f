"""One sandbox for the whole test run: real servers, real clients, over HTTP."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.sandbox import processes, sample
from tir_dagster.sandbox.home import Identity, SandboxHome
from tir_dagster.sandbox.serve import OWNER_VARIABLE
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName
from tir_dagster_tests import jvm
from tir_dagster_tests.rest_calls import check_product

SEEDED_ROWS = 5_000
os.environ.setdefault("SPARK_SUBMIT_OPTS", jvm.options())
# However a run of the tests ends, no server of it is left behind.
os.environ[OWNER_VARIABLE] = str(os.getpid())
# Files that take minutes begin first: processes share the files out in this order, and none shall wait at the end for one of them.
LONG = (
    "test_faults",
    "test_views",
    "test_time_travel",
    "test_view_histories",
    "test_crashes",
    "test_torture",
    "test_demo",
    "test_patch",
    "test_bench",
    "test_histories",
    "test_server_histories",
    "test_browser",
    "test_server_delivery",
    "test_server_ways",
    "test_refresh",
    "test_assets",
    "test_ranges",
    "test_load_histories",
    "test_size",
    "test_many_extracts",
    "test_mirror",
    "test_spark_server",
    "test_audit",
    "test_check",
    "test_examples",
    "test_dg",
    "test_distribution",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, variable in (("long", "TIR_LONG"), ("client", "TIR_CLIENTS")):
        if variable not in os.environ:
            config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(marker)])
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@dataclass(frozen=True)
class Sandbox:
    """A running sandbox as its clients see it."""

    home: SandboxHome
    env: dict[str, str]

    @property
    def identity(self) -> Identity:
        return self.home.identity()

    @property
    def tableau_url(self) -> str:
        return self.env["TABLEAU_SERVER_URL"]

    @property
    def people_url(self) -> str:
        return self.env["SERVICENOW_URL"]

    def snowflake(self, **overrides: Any) -> Any:
        """An open connection of the real connector; the caller closes it."""
        return sample.connect(self.env, **overrides)

    @contextmanager
    def tableau(self, *, user: str | None = None, site: str | None = None) -> Iterator[TSC.Server]:
        """A signed-in client with a token of its own: a second sign-in with one token would end the first session."""
        name, secret = self.new_token(user)
        auth = TSC.PersonalAccessTokenAuth(name, secret, site_id=site or self.identity.site)
        server = TSC.Server(self.tableau_url, use_server_version=True)
        with server.auth.sign_in(auth):
            yield server

    def prepare(self, database: str, project: str) -> None:
        """Make the database and the project that several files of tests share, unless they are there."""
        with self.snowflake() as connection:
            connection.cursor().execute(f"CREATE DATABASE IF NOT EXISTS {database}")
        with self.tableau() as server:
            if not list(server.projects.filter(name=project)):
                server.projects.create(TSC.ProjectItem(project))

    def new_token(self, user: str | None = None) -> tuple[str, str]:
        wanted = {"user": user or self.identity.tableau_user, "name": f"test-{next(_numbers)}"}
        answer = requests.post(f"{self.tableau_url}/sandbox/tokens", json=wanted, timeout=30)
        assert answer.ok, f"no token for {wanted}: {answer.status_code} {answer.text}"
        return answer.json()["name"], answer.json()["secret"]


_numbers = itertools.count(1)


@contextmanager
def running_sandbox(folder: Path) -> Iterator[Sandbox]:
    """A sandbox in this folder, stopped at the end whatever happens; the product made no call there that it does not list."""
    home = SandboxHome(folder / "sandbox")
    try:
        processes.start(home)
        running = Sandbox(home, processes.environment(home))
        yield running
        check_product(running.tableau_url)
    finally:
        processes.stop(home)


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """The sandbox of this test run; tests share it and use names of their own."""
    with running_sandbox(tmp_path_factory.mktemp("tir-home")) as running:
        yield running


@pytest.fixture(scope="session")
def seeded(sandbox: Sandbox) -> Sandbox:
    """The same sandbox with the sample in it: for reading; a test that changes the sample makes its own sandbox."""
    sample.seed_table(sandbox.env, rows=SEEDED_ROWS, seed=1, until=sample.parse_month(None))
    sample.seed_datasource(sandbox.env, timeout=120)
    return sandbox


@dataclass(frozen=True)
class People:
    """What the sandbox's Slack and ServiceNow got, and how to make them fail."""

    url: str

    def messages(self) -> list[dict[str, Any]]:
        return requests.get(f"{self.url}/sandbox/messages", timeout=30).json()["messages"]

    def incidents(self) -> list[dict[str, Any]]:
        return requests.get(f"{self.url}/sandbox/incidents", timeout=30).json()["incidents"]

    def calls(self) -> list[tuple[str, str]]:
        calls = requests.get(f"{self.url}/sandbox/calls", timeout=30).json()["calls"]
        return [(call["method"], call["path"]) for call in calls]

    def fault(self, kind: str, **more: Any) -> None:
        answer = requests.post(f"{self.url}/sandbox/faults", json={"kind": kind, **more}, timeout=30)
        assert answer.ok, answer.text

    def heal(self) -> None:
        requests.delete(f"{self.url}/sandbox/faults", timeout=30)

    def forget(self) -> None:
        self.heal()
        for path in ("people", "calls"):
            requests.delete(f"{self.url}/sandbox/{path}", timeout=30)


@pytest.fixture
def people(sandbox: Sandbox) -> Iterator[People]:
    """The people of this test run's sandbox, who have heard of nothing yet."""
    found = People(sandbox.people_url)
    found.forget()
    yield found
    found.heal()


@pytest.fixture(scope="session")
def access(sandbox: Sandbox) -> SnowflakeAccess:
    return SnowflakeAccess.from_environment(sandbox.env)


@pytest.fixture(scope="session")
def run(sandbox: Sandbox) -> Iterator[Callable[[str], list[tuple]]]:
    """Runs one statement in a database that tests share."""
    with sandbox.snowflake() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE IF NOT EXISTS SRC")
        cursor.execute("USE SCHEMA SRC.PUBLIC")
        yield lambda sql: cursor.execute(sql).fetchall()


# Defaults that change what statements mean, as an administrator may set them.
HOSTILE_DEFAULTS = {
    "AUTOCOMMIT": "FALSE",
    "DATE_INPUT_FORMAT": "'DD/MM/YYYY'",
    "DATE_OUTPUT_FORMAT": "'DD/MM/YYYY'",
    "ERROR_ON_NONDETERMINISTIC_MERGE": "FALSE",
    "QUOTED_IDENTIFIERS_IGNORE_CASE": "TRUE",
    "ROWS_PER_RESULTSET": "1",
    "TIMESTAMP_INPUT_FORMAT": "'DD/MM/YYYY HH24:MI:SS'",
    "TIMESTAMP_NTZ_OUTPUT_FORMAT": "'DD/MM/YYYY'",
    "TIMESTAMP_TYPE_MAPPING": "TIMESTAMP_TZ",
    "TIMEZONE": "'America/New_York'",
    "TIME_INPUT_FORMAT": "'HH12:MI AM'",
    "TIME_OUTPUT_FORMAT": "'HH12:MI AM'",
    "TRANSACTION_ABORT_ON_ERROR": "TRUE",
    "WEEK_OF_YEAR_POLICY": "1",
    "WEEK_START": "7",
}


@contextmanager
def hostile_defaults(run: Callable[[str], Any]) -> Iterator[None]:
    """Let all sessions of the account begin with those defaults."""
    run("ALTER ACCOUNT SET " + " ".join(f"{name} = {value}" for name, value in HOSTILE_DEFAULTS.items()))
    try:
        yield
    finally:
        run("ALTER ACCOUNT UNSET " + ", ".join(HOSTILE_DEFAULTS))


@pytest.fixture
def hostile_account(run) -> Iterator[None]:
    with hostile_defaults(run):
        yield


@pytest.fixture
def make_table(run) -> Callable[[str], TableName]:
    """Makes a table with these columns, under a name of its own."""

    def make(columns: str, *inserts: str) -> TableName:
        table = TableName("SRC", "PUBLIC", f"T{next(_numbers)}")
        run(f"CREATE TABLE {table.sql} ({columns})")
        for rows in inserts:
            run(f"INSERT INTO {table.sql} {rows}")
        return table

    return make


@dataclass(frozen=True)
class Warehouse:
    """The warehouse's own view of what it was asked, and its faults."""

    url: str

    def break_next(self, **fault) -> None:
        assert requests.post(f"{self.url}/sandbox/faults", json=fault, timeout=30).ok

    def pending_faults(self) -> list[dict]:
        return requests.get(f"{self.url}/sandbox/faults", timeout=30).json()["faults"]

    def forget_queries(self) -> None:
        requests.delete(f"{self.url}/sandbox/queries", timeout=30)

    def queries(self) -> list[dict]:
        return requests.get(f"{self.url}/sandbox/queries", timeout=30).json()["queries"]


@pytest.fixture
def warehouse(sandbox: Sandbox) -> Iterator[Warehouse]:
    address = Warehouse(f"http://{sandbox.env['SNOWFLAKE_HOST']}:{sandbox.env['SNOWFLAKE_PORT']}")
    yield address
    requests.delete(f"{address.url}/sandbox/faults", timeout=30)
