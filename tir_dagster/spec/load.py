"""The load spec: what a user declares of files that become rows of a table, as plain frozen dataclasses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tir_dagster.spec.alerts import Alerts
from tir_dagster.spec.extract import NAME_FORM, TABLE_FORM, Snowflake

Mode = Literal["truncate", "append", "merge", "scd2"]
_SCHEMES = re.compile(r"^(file:///|s3://[^/]+)")
_SCHEMA = re.compile(r"[^.]+\.[^.]+")


@dataclass(frozen=True)
class Files:
    """Where files land, what is in them, and when one is complete."""

    path: str
    format: Literal["csv", "json", "parquet"]
    # Of the path below `path`, as a shell writes it.
    pattern: str = "*"
    # `stable`: its size and time have not changed for `settle`; `marker`: a file of its name plus `marker`, or of that
    # name in its folder, is there.
    complete: Literal["stable", "marker"] = "stable"
    settle: float = field(default=5.0, metadata={"duration": True})
    marker: str = ".done"
    order: Literal["name", "modified"] = "name"
    delimiter: str = ","
    # Who reads objects: the tasks by pyarrow's own client, or Spark by the Hadoop client that the cluster has.
    through: Literal["pyarrow", "spark"] = "pyarrow"

    def problems(self) -> Iterator[tuple[str, str]]:
        if not _SCHEMES.match(self.path):
            yield "path", f"{self.path!r} is no place for files; write file:///folder or s3://bucket/prefix"
        if len(self.delimiter) != 1:
            yield "delimiter", "give one character"
        if not self.marker:
            yield "marker", "give the marker's name, such as _SUCCESS, or its ending, such as .done"


@dataclass(frozen=True)
class History:
    """The columns of a table that keeps every version of a row."""

    valid_from: str = "VALID_FROM"
    valid_to: str = "VALID_TO"
    is_current: str = "IS_CURRENT"


@dataclass(frozen=True)
class LoadSpec:
    """One load: which files become rows of which table, and how."""

    name: str
    table: str
    files: Files
    mode: Mode
    key: tuple[str, ...] = ()
    # The column that says which of two versions of a row is the newer one.
    order_by: str | None = None
    # The column of the file that says that the row is gone, and what it then says.
    delete_flag: str | None = None
    delete_values: tuple[str, ...] = ("D", "DELETE", "TRUE", "1")
    # A key that is twice in one file: the last one counts, or none of them.
    duplicates: Literal["last", "reject"] = "last"
    # The columns of the files and their types; left out, the table's.
    columns: Mapping[str, str] = field(default_factory=dict)
    drift: Literal["stop", "tolerate"] = "stop"
    reject_share: float = 0.01
    # `truncate`: what the whole table is, one file or all files of one folder.
    snapshot: Literal["file", "folder"] = "file"
    allow_empty: bool = False
    history: History = History()
    # Where the lists of loads, files and rejected rows are kept, as DATABASE.SCHEMA; left out, beside the table.
    bookkeeping: str | None = None
    # When to look for files besides the sensor, as cron writes it.
    schedule: str | None = None
    snowflake: Snowflake = field(default_factory=Snowflake)
    # Who is told how loads ended; left out, the people of an extract that reads the table hear of failures.
    alerts: Alerts | None = None

    @property
    def in_order(self) -> bool:
        """Whether a later file must not overtake an earlier one: both may speak of the same row."""
        return self.mode in ("merge", "scd2")

    def problems(self) -> Iterator[tuple[str, str]]:
        if not NAME_FORM.match(self.name):
            yield "name", "use lower-case letters, digits and underscores: it names the assets"
        if not TABLE_FORM.fullmatch(self.table):
            yield "table", "give the table as DATABASE.SCHEMA.TABLE"
        if not 0 <= self.reject_share <= 1:
            yield "reject_share", "give a share between 0 and 1"
        if self.bookkeeping is not None and not _SCHEMA.fullmatch(self.bookkeeping):
            yield "bookkeeping", "give it as DATABASE.SCHEMA"
        if self.schedule is not None and len(self.schedule.split()) != 5:
            yield "schedule", f"{self.schedule!r} is no cron expression; write five fields, such as '*/15 * * * *'"
        yield from self._mode_problems()

    def _mode_problems(self) -> Iterator[tuple[str, str]]:
        if self.mode in ("merge", "scd2") and not self.key:
            yield "key", f"{self.mode} needs the columns that name a row"
        if self.mode == "scd2" and not self.order_by:
            yield "order_by", "scd2 needs the column that says from when a version is valid"
        if self.delete_flag and self.mode not in ("merge", "scd2"):
            yield "delete_flag", f"{self.mode} deletes no single rows; use merge or scd2"
        if self.order_by and not self.key:
            yield "order_by", "versions belong to a key; name the `key`"
        if self.snapshot == "folder" and self.mode != "truncate":
            yield "snapshot", f"only truncate loads whole contents, {self.mode} does not"
        elif self.snapshot == "folder" and self.files.complete != "marker":
            yield "snapshot", "a folder is whole when its marker is there; set `complete: marker` under `files`"
        if self.mode == "append" and self.order_by:
            yield "order_by", "append takes every row as it is; use merge to keep the newest version"


def problems_between(loads: Sequence[LoadSpec]) -> Iterator[str]:
    """Problems between loads that are valid on their own."""
    first_loads: dict[str, LoadSpec] = {}
    for load in loads:
        first_load = first_loads.setdefault(load.table, load)
        if first_load.bookkeeping != load.bookkeeping:
            yield (
                f"{first_load.name} and {load.name} load {load.table}, each with its own list of loaded files, so a file might be "
                "loaded twice; give both the same `bookkeeping`"
            )
