"""Loads on the shared sandbox: a table and a folder of their own for each test."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tir_dagster.loading.declared import LoadSpec
from tir_dagster.loading.load import Loaded, Loader
from tir_dagster.loading.staging import Stager, right_here
from tir_dagster.source.connection import SnowflakeAccess
from tir_dagster.spec_file import parse_declared

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
        given = {"reject_share": 0, **fields}
        lines = [f"    {name}: {json.dumps(value)}" for name, value in given.items()]
        text = "\n".join(
            [
                "loads:",
                f"  - name: {self.name}",
                f"    table: {json.dumps(self.table)}",
                f"    files: {{path: 'file://{self.folder}', format: {format}, settle: 0 seconds{files}}}",
                *lines,
            ]
        )
        return parse_declared(text, "test.yaml").loads[0]

    def loader(self, spec: LoadSpec, stager: Stager = right_here, **options: Any) -> Loader:
        return Loader(spec, access=self.access, stager=stager, log=self.told.append, **options)

    def load(self, spec: LoadSpec, **options: Any) -> Loaded:
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
