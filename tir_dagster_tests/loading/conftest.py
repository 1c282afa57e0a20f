"""Loads on the shared sandbox: a table and a folder of their own for each test."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tir_dagster.loading.landing import LandingPlace, chosen
from tir_dagster.loading.load import Loader, LoadResult
from tir_dagster.loading.staging import StagePlan, Stager, right_here, stage_unit, units_of
from tir_dagster.loading.tables import target_of
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.load import LoadSpec
from tir_dagster.spec.reading import parse_declared

_numbers = itertools.count(1)
SCHEMA = "MYDB.LOADING"


@dataclass
class Landing:
    """A table, a folder of files, and the load between them; what tests ask for themselves goes by `own`."""

    access: SnowflakeAccess
    own: SnowflakeAccess
    folder: Path
    table: str
    name: str
    told: list[str] = field(default_factory=list)

    def spec(self, *, format: str = "csv", files: str = "", **fields: Any) -> LoadSpec:  # noqa: A002
        """The load spec as a user writes it; `files` are further fields of files."""
        return parse_declared(self.text(format=format, files=files, **fields), "test.yaml").loads[0]

    def text(self, *, format: str = "csv", files: str = "", **fields: Any) -> str:  # noqa: A002
        given = {"reject_share": 0, **fields}
        lines = [f"    {name}: {json.dumps(value)}" for name, value in given.items()]
        return "\n".join(
            [
                "loads:",
                f"  - name: {self.name}",
                f"    table: {json.dumps(self.table)}",
                f"    files: {{path: 'file://{self.folder}', format: {format}, settle: 0 seconds{files}}}",
                *lines,
            ]
        )

    def loader(self, spec: LoadSpec, stager: Stager = right_here, **options: Any) -> Loader:
        return Loader(spec, access=self.access, stager=stager, log=self.told.append, **options)

    def load(self, spec: LoadSpec, **options: Any) -> LoadResult:
        return self.loader(spec, **options).run()

    def write(self, name: str, content: str | bytes) -> Path:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    def rows(self, listed: str = "*", table: str = "") -> list[tuple[Any, ...]]:
        return sorted(self.own.query(f"SELECT {listed} FROM {table or self.table}"), key=str)

    def ledger(self) -> list[tuple[Any, ...]]:
        """Name, status, loaded and rejected rows of every file that the ledger knows."""
        query = f"SELECT PATH, STATUS, ROWS_LOADED, ROWS_REJECTED FROM {SCHEMA}.TIR_LOADED_FILES WHERE LOAD = '{self.name}' ORDER BY LOADED_AT, FILE_NO"
        return [(row[0].rpartition("/")[2], row[1], int(row[2]), int(row[3])) for row in self.own.query(query)]

    def rejects(self) -> list[tuple[Any, ...]]:
        query = (
            f"SELECT PATH, LINE, REASON FROM {SCHEMA}.TIR_REJECTED_ROWS WHERE LOAD = '{self.name}' ORDER BY PATH, LINE"
        )
        return [(row[0].rpartition("/")[2], int(row[1]), row[2]) for row in self.own.query(query)]


@pytest.fixture(scope="session")
def access(sandbox) -> SnowflakeAccess:
    found = SnowflakeAccess.from_environment(sandbox.env)
    found.query("CREATE DATABASE IF NOT EXISTS MYDB")
    found.query(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
    return found


@pytest.fixture(scope="session")
def own(access) -> Iterator[SnowflakeAccess]:
    """One connection for what tests ask themselves; loads open theirs as ever."""
    asked = replace(access, query_tag="tests")
    with asked.kept_open():
        yield asked


@pytest.fixture
def landing(access, own, tmp_path) -> Callable[..., Landing]:
    """Makes a table with these columns, and a folder for its files."""

    def make(columns: str, *, table: str = "") -> Landing:
        number = next(_numbers)
        name = table or f"{SCHEMA}.T{number}"
        own.query(f"CREATE OR REPLACE TABLE {name} ({columns})")
        folder = tmp_path / f"landing{number}"
        folder.mkdir()
        return Landing(access, own, folder, name, f"load{number}")

    return make


# Without a warehouse: what a task makes of a file

PATH = "s3://bucket/in"


def spec_of(mode: str, more: str = "", *, name: str = "a", files: str = "", form: str = "csv"):
    text = f"loads:\n  - {{name: {name}, table: A.B.C, mode: {mode}{more}, files: {{path: '{PATH}', format: {form}{files}}}}}\n"
    return parse_declared(text, "test.yaml").loads[0]


def staged(folder, name: str, content: bytes, *, form: str = "csv", columns: str = "ID NUMBER, NAME VARCHAR"):
    """What becomes of the file in a task, and the tables that it would bring into the stage."""
    (folder / name).write_bytes(content)
    place = LandingPlace.of(f"file://{folder}")
    described = [tuple(column.split()) for column in columns.split(", ")]
    spec = spec_of("append", form=form)
    target = target_of(spec, described)
    access = SnowflakeAccess("account", "user", "password")
    plan = StagePlan(access, place, spec, target, "@stage")
    tables = {}
    (file,) = [file for file in chosen(place.listed(), place, spec.files) if file.path.endswith(name)]
    units = units_of(place, 0, file.path, is_parquet=form == "parquet")
    told = [
        stage_unit(plan, unit, lambda put, kind: tables.update({kind: pq.read_table(put).to_pylist()}))
        for unit in units
    ]
    return told, tables


def parquet(columns: dict | pa.Table, **options) -> bytes:
    out = io.BytesIO()
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), out, **options)
    return out.getvalue()
