"""A change set: the keys to replace, their slices and fresh rows, at one source version; and how it is laid out on disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from tir_dagster.changes.difference import Counts
from tir_dagster.changes.plan import Decision, Mode, SourceState

# NULL is a slice too; JSON has no NULL keys.
NO_SLICE_KEY = "\0"


@dataclass(frozen=True)
class Record:
    """A value that is kept as a JSON object."""

    def to_json(self) -> str:
        # In the order of the fields: that of the tables counts.
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The record, or ValueError when the text does not hold one: then the state is lost, never guessed."""
        return cls.from_mapping(json.loads(text))

    @classmethod
    def from_mapping(cls, value: Any) -> Self:
        fields = dataclasses.fields(cls)
        needed = {
            field.name
            for field in fields
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        }
        if not isinstance(value, dict) or not needed <= value.keys():
            raise ValueError(f"not a complete {cls.__name__}")
        names = [field.name for field in fields if field.name in value]
        return cls(**{name: cls.restored(name, value[name]) for name in names})

    @classmethod
    def restored(cls, name: str, value: Any) -> Any:
        if name == "known":
            return SourceState(**value)
        return tuple(value) if isinstance(value, list) else value


# The form of change sets that are made now.
FORM = 2


@dataclass(frozen=True)
class ChangeSet(Record):
    """Keys to replace, their slices and fresh rows, at one source version; durable before anything is purged."""

    id: str
    extract: str
    base: str | None  # the confirmed version it starts from
    source_version: str
    known: SourceState
    mode: Mode
    decision: Decision
    reason: str | None
    keys: int
    rows: int
    purged: Mapping[str, int]
    appended: Mapping[str, int]
    watermark: str | None
    settles: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    sentence: str = ""
    # How keys and rows are written; sets of earlier releases give their keys only, and are made anew.
    form: int = 1
    # Of the fresh rows: how many have a NULL in their key, and how many keys have several of them.
    odd_keys: tuple[int, int] | None = None
    # Numbers of the reports in Dagster's log whose changes this version shows, as far as they may be met again.
    reports: tuple[int, ...] = ()
    # The sum of a digest of each row that leaves the base, by slice, as text: they are too long for JSON numbers of other readers.
    purged_digests: Mapping[str, str] | None = None
    # Slices of the base that the detection compared with the source, with the version of both; and those that differed,
    # which are replaced.
    verified: Mapping[str, str] = field(default_factory=dict)
    drifted: tuple[str, ...] = ()
    # Where the changes were announced: hints, and materializations of upstream assets such as loads.
    origin: tuple[str, ...] = ()
    # Hints described less than had changed.
    partial_hints: bool = False
    # Of an extract of several tables: the change of each, the main one first. What is counted by slice above is of the main
    # one, numbers of keys and rows are of all.
    parts: Mapping[str, ChangeSet] = field(default_factory=dict)

    @classmethod
    def restored(cls, name: str, value: Any) -> Any:
        if name == "parts":
            return {table: cls.from_mapping(part) for table, part in value.items()}
        return super().restored(name, value)

    def of(self, table: str) -> ChangeSet:
        """Return the change of this table; an extract of one table is its only part, without a name."""
        return self.parts[table] if self.parts else self

    @property
    def tables(self) -> tuple[str, ...]:
        return tuple(self.parts) or ("",)

    @property
    def changing(self) -> tuple[str, ...]:
        """The tables that it changes."""
        return tuple(table for table in self.tables if self.of(table).decision != "none")

    @property
    def moved(self) -> tuple[int, int]:
        """How many rows leave and arrive, of all tables."""
        sets = [self.of(table) for table in self.tables]
        return sum(sum(one.purged.values()) for one in sets), sum(sum(one.appended.values()) for one in sets)

    @property
    def touched(self) -> tuple[str | None, ...]:
        """The slices that lose or gain rows."""
        return tuple(None if name == NO_SLICE_KEY else name for name in sorted({**self.purged, **self.appended}))


def counts_to_json(counts: Counts) -> dict[str, int]:
    return {NO_SLICE_KEY if name is None else name: count for name, count in counts.items()}


def counts_from_json(value: Mapping[str, int]) -> Counts:
    return {None if name == NO_SLICE_KEY else name: count for name, count in value.items()}


def slice_label(name: str) -> str:
    """A slice's name for people."""
    return "(no date)" if name == NO_SLICE_KEY else name


_BETWEEN = " · "


def place_label(table: str, name: str | None) -> str:
    """A slice's name for people, with its table where there are several."""
    label = slice_label(NO_SLICE_KEY if name is None else name)
    return f"{table}{_BETWEEN}{label}" if table else label


def place_of(label: str, tables: Collection[str]) -> tuple[str, str | None]:
    """Return table and slice that a label names, in an extract of these tables."""
    table, between, name = label.partition(_BETWEEN)
    if not between or not table or table not in tables:
        table, name = "", label
    return table, None if name == slice_label(NO_SLICE_KEY) else name


# The folders of a change set: the keys to replace, their fresh rows, and the rows that the base has of them.
KEYS, ROWS, BEFORE = "keys", "rows", "before"
# In it, a folder for each of several tables.
TABLES = "tables"


def table_folder(folder: Path, table: str) -> Path:
    """Return where these folders of a table are; those of an extract of one table are in the change set's own."""
    return folder / TABLES / table if table else folder


def parts_of(folder: Path) -> list[Path]:
    """The Parquet files in a folder that hold something."""
    return sorted(path for path in folder.glob("part-*.parquet") if path.stat().st_size)
