"""A sandbox with the sample, an extract declared on it, and commands that refresh it, all in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from pyspark.sql import SparkSession

from tir_dagster.changes.plan import Mode
from tir_dagster.changes.relation import watched_tables
from tir_dagster.cli.refresh import Command, RefreshOutcome
from tir_dagster.hyper.casts import PURGE_KEY
from tir_dagster.orchestration.home import dagster_instance, tir_home
from tir_dagster.orchestration.metadata import last_confirmation
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.refresh.context import leased
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.survey import read_tokens
from tir_dagster.sandbox import sample
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spark.session import spark_session
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import parse_specs
from tir_dagster_tests.conftest import Sandbox, running_sandbox
from tir_dagster_tests.packages import check_package, document_of, plain, rows_of
from tir_dagster_tests.sandbox.tableau.helpers import Admin

SPEC = """\
extracts:
  - name: orders
    source: MYDB.MYSCHEMA.MYTABLE
    row_key: ORDER_ID
    slices: {column: ORDER_DATE, by: month, start: START}
    changes: {watermark: UPDATED_AT, look_back: 1 second}
    datasource:
      project: myproject
      name: mydatasource
      credentials: {username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD}
    thresholds: {quiet_period: 1 second}
"""


@dataclass(frozen=True)
class Place:
    """One extract on its own sandbox, with its own history."""

    sandbox: Sandbox
    spec: ExtractSpec
    spec_text: str
    folder: Path
    before: Element

    def refresh(self, mode: Any = "changes", slices: tuple[str, ...] = (), **options: Any) -> RefreshOutcome:
        allowed, listen = options.get("allow_empty", False), options.get("listen", lambda _: None)
        return self.run(lambda command: command.refresh(mode, slices, allow_empty=allowed), listen)

    def run(self, action: Callable[[Command], Any], listen: Callable[[str], None] = lambda _: None) -> Any:
        with dagster_instance() as instance:
            return action(Command(self.spec, instance, listen))

    def detect(self, mode: Mode = "changes") -> Any:
        """Detection only, as if the process had ended right after it."""

        def detection(command: Command) -> Any:
            with leased(command.context, "test", wait_seconds=60):
                return command.detect(RefreshOutcome(command.spec.name, mode), mode, (), allow_empty=False)

        return self.run(detection)

    def touch(self, note: str) -> None:
        """Update a few orders and delete one."""
        self.sql(
            f"UPDATE MYTABLE SET NOTE = '{note}', UPDATED_AT = DATEADD('second', 1, (SELECT MAX(UPDATED_AT) FROM MYTABLE)) "
            "WHERE ORDER_ID IN (SELECT ORDER_ID FROM MYTABLE ORDER BY ORDER_ID LIMIT 5)"
        )
        self.sql("DELETE FROM MYTABLE WHERE ORDER_ID IN (SELECT MAX(ORDER_ID) FROM MYTABLE)")

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with self.sandbox.snowflake(database="MYDB", schema="MYSCHEMA") as connection:
            return connection.cursor().execute(statement).fetchall()

    def source_rows(self) -> Counter:
        """All rows of the table, their columns in the order of their names."""
        names = sorted(row[0] for row in self.sql("DESCRIBE TABLE MYTABLE"))
        return Counter(tuple(map(plain, row)) for row in self.sql(f"SELECT {', '.join(names)} FROM MYTABLE"))

    def tag(self, label: str) -> None:
        """Tag the datasource."""
        with self.sandbox.tableau() as server:
            (datasource,) = server.datasources.filter(name=self.spec.datasource.name)
            server.datasources.add_tags(datasource, label)

    def confirmation(self) -> Confirmation | None:
        """The last confirmation in Dagster's history."""
        with dagster_instance() as instance:
            return last_confirmation(instance, extract_keys(self.spec).published_datasource)

    def is_up_to_date(self) -> bool:
        """Tell if the datasource has the rows of the source; they are only compared if the source changed since the publish."""
        confirmed = self.confirmation()
        if confirmed is None:
            return False
        token, _ = read_tokens(SnowflakeAccess.from_environment(self.sandbox.env), watched_tables(self.spec))
        return confirmed.known.token == token or self.published_rows() == self.source_rows()

    def published_rows(self) -> Counter:
        """The rows of the datasource as anybody would download them, in a package that is as it must be."""
        package = download(self.sandbox, self.spec.datasource.name, self.folder / "seen")
        return Counter(
            tuple(map(plain, row)) for row in check_package(package, self.folder / "seen", before=self.before)
        )


def download(sandbox: Sandbox, name: str, folder: Path) -> Path:
    """A datasource's package, by the real client."""
    folder.mkdir(parents=True, exist_ok=True)
    with sandbox.tableau() as server:
        # Page by page: tests that share a sandbox publish more datasources than one page shows.
        (datasource,) = [item for item in TSC.Pager(server.datasources) if item.name == name]
        return Path(server.datasources.download(datasource.id, filepath=str(folder / "package")))


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """The sandbox on which one file of tests after the other changes the sample."""
    with running_sandbox(tmp_path_factory.mktemp("places")) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def place(places: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The sample of 3,000 orders as new, and the extract declared on its datasource."""
    folder, sandbox = tmp_path_factory.mktemp("place"), places
    _clear(sandbox)
    with pytest.MonkeyPatch.context() as patch:
        until = sample.parse_month(None)
        sample.seed_table(sandbox.env, rows=3_000, seed=1, until=until)
        sample.seed_datasource(sandbox.env, timeout=120)
        for name, value in sandbox.env.items():
            patch.setenv(name, value)
        patch.setenv("TIR_HOME", str(folder / "state"))
        patch.setenv("DAGSTER_HOME", str(folder / "dagster"))
        patch.delenv("TIR_SPECS", raising=False)
        first = min(row[0] for row in _months(sandbox))
        text = SPEC.replace("START", first)
        (spec,) = parse_specs(text, "test.yaml")
        before = document_of(download(sandbox, spec.datasource.name, folder / "before"))
        yield Place(sandbox, spec, text, folder, before)


@pytest.fixture
def loaded(place: Place) -> Place:
    """The extract published and equal to its source, whatever tests before this one left."""
    Admin(place.sandbox.tableau_url).clear_faults()
    if not place.is_up_to_date():
        assert place.refresh("full").published
    return place


@pytest.fixture
def restored(loaded: Place) -> Iterator[Place]:
    """The same extract; after the test its source has the rows of before."""
    loaded.sql("CREATE OR REPLACE TABLE KEPT_ASIDE AS SELECT * FROM MYTABLE")
    yield loaded
    loaded.sql("DELETE FROM MYTABLE")
    loaded.sql("INSERT INTO MYTABLE SELECT * FROM KEPT_ASIDE")


class Patched(Place):
    """The same table in a published Hyper file of which only changes are sent."""

    def published_rows(self) -> Counter:
        package = download(self.sandbox, self.spec.datasource.name, self.folder / "seen")
        return Counter(tuple(map(plain, row)) for row in rows_of(package, self.folder / "seen", without=PURGE_KEY))


@pytest.fixture(scope="module")
def patched(place: Place) -> Patched:
    # The smallest limit there is, for changes in several parts.
    text = place.spec_text.replace("mydatasource", "patched\n      patch_limit_mb: 1")
    text = text.replace("name: orders", "name: orders_patch\n    delivery: patch")
    (spec,) = parse_specs(text, "patched.yaml")
    extract = Patched(place.sandbox, spec, text, place.folder, place.before)
    assert extract.refresh().published
    return extract


def _clear(sandbox: Sandbox) -> None:
    """What other files of tests left there."""
    with sandbox.snowflake() as connection:
        connection.cursor().execute("DROP DATABASE IF EXISTS MYDB")
    with sandbox.tableau() as server:
        for datasource in list(TSC.Pager(server.datasources)):
            server.datasources.delete(datasource.id)


@pytest.fixture(scope="session")
def spark() -> SparkSession:
    """The session that refreshes in this process use, too."""
    return spark_session("tir tests", home=tir_home())


def _months(sandbox: Sandbox) -> list[tuple[Any, ...]]:
    with sandbox.snowflake() as connection:
        query = "SELECT DISTINCT TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') FROM MYDB.MYSCHEMA.MYTABLE WHERE ORDER_DATE IS NOT NULL"
        return connection.cursor().execute(query).fetchall()
