"""The load spec: what a user declares of files that become rows of a table, as frozen dataclasses that pydantic reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tir_dagster.spec.alerts import Alerts
from tir_dagster.spec.declaration import Declaration, Duration, Texts
from tir_dagster.spec.extract import NAME_FORM, Snowflake
from tir_dagster.spec.tables import TABLE_FORM

Mode = Literal["truncate", "append", "merge", "scd2"]
_SCHEMES = re.compile(r"^(file:///|s3://[^/]+)")
_SCHEMA = re.compile(r"[^.]+\.[^.]+")


@dataclass(frozen=True)
class Files(Declaration):
    """Where files land, what is in them, and when one is complete."""

    path: str
    """file:///folder or s3://bucket/prefix."""
    format: Literal["csv", "json", "parquet"]
    """CSV with a header, JSON lines, or Parquet."""
    pattern: str = "*"
    """Which files below `path`, as a shell writes it."""
    complete: Literal["stable", "marker"] = "stable"
    """When a file is complete. `stable`: size and time have not changed for `settle`. `marker`: the file named like it plus `marker`,
    or named `marker` in its folder, is there."""
    settle: Duration = 5.0
    """How long size and time must not have changed."""
    marker: str = ".done"
    """What `complete: marker` waits for."""
    order: Literal["name", "modified"] = "name"
    """In which order files are loaded."""
    delimiter: str = ","
    """What divides the fields of a CSV file."""
    through: Literal["pyarrow", "spark"] = "pyarrow"
    """Who reads S3: the tasks by pyarrow's own client, or Spark by the Hadoop client that the cluster has."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if not _SCHEMES.match(self.path):
            yield "path", f"{self.path!r} is no place for files; write file:///folder or s3://bucket/prefix"
        if len(self.delimiter) != 1:
            yield "delimiter", "give one character"
        if not self.marker:
            yield "marker", "give the marker's name, such as _SUCCESS, or its ending, such as .done"


@dataclass(frozen=True)
class History(Declaration):
    """The columns of a table that keeps every version of a row."""

    valid_from: str = "VALID_FROM"
    """From when a version is valid."""
    valid_to: str = "VALID_TO"
    """Until when; NULL for the current one."""
    is_current: str = "IS_CURRENT"
    """Whether it is the current one."""


@dataclass(frozen=True)
class LoadSpec(Declaration):
    """One load: which files become rows of which table, and how."""

    name: str
    """Names the assets: lower-case letters, digits and underscores."""
    table: str
    """The table, DATABASE.SCHEMA.TABLE, which must exist."""
    files: Files
    mode: Mode
    """How files become rows: replace the table, add, merge by key, or keep every version of a row."""
    key: Texts = ()
    """The columns that name a row."""
    order_by: str | None = None
    """The column that shows which version of a row is newer."""
    delete_flag: str | None = None
    """The column of the file that marks deleted rows."""
    delete_values: Texts = ("D", "DELETE", "TRUE", "1")
    """The values of `delete_flag` that mean deleted."""
    duplicates: Literal["last", "reject"] = "last"
    """Of a key that occurs twice in one file: take the last one, or reject all of them."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The columns of the files and their types; left out, the table's."""
    drift: Literal["stop", "tolerate"] = "stop"
    """What to do at a missing or further column."""
    reject_share: float = 0.01
    """Above this share of bad rows the load stops."""
    snapshot: Literal["file", "folder"] = "file"
    """`truncate`: whether one file is the whole table, or all files of a folder."""
    allow_empty: bool = False
    """`truncate`: a content without rows may empty the table."""
    history: History = History()
    bookkeeping: str | None = None
    """Where the lists of loads, files and rejected rows are kept, as DATABASE.SCHEMA; left out, beside the table."""
    schedule: str | None = None
    """When to look for files in addition to the sensor, in cron format."""
    snowflake: Snowflake = field(default_factory=Snowflake)
    alerts: Alerts | None = None
    """Who gets messages; left out, failures are sent to the people of an extract that reads the table."""

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
