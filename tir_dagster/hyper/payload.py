"""The files that the delivery `patch` sends: keys to purge and fresh rows, in small Hyper files of whole keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tir_dagster.changes.change_set import ChangeSet
from tir_dagster.errors import ExtractError
from tir_dagster.hyper.casts import PURGE_KEY, Loaded, pair_columns
from tir_dagster.hyper.engine import connect, literal, quoted, unbroken
from tir_dagster.hyper.features import HYPER
from tir_dagster.hyper.hyperfile import Added, ExtractTable, TableId, describe, describe_all, rebuild
from tir_dagster.hyper.purge import key_select
from tir_dagster.hyper.replace import ExtractShape, StagedChange, staged_keys
from tir_dagster.hyper.slices import slice_sql_hyper
from tir_dagster.snowflake.columns import Kind

KEYS_TABLE = "keys"
ROWS_TABLE = "rows"
PAYLOAD_SCHEMA = "Extract"
# Kinds whose values are equal exactly if a server's `=` says so, and that have no value which equals nothing.
_PLAIN = (Kind.INTEGER, Kind.DECIMAL, Kind.TEXT, Kind.DATE, Kind.TIMESTAMP, Kind.BOOLEAN)
_SPARE = 1.25
# How a text without a collation is compared.
_BINARY = "binary"


@dataclass(frozen=True)
class PayloadTable:
    """A table that is changed, and the tables of the file that hold its keys and rows."""

    table: TableId
    keys: str
    rows: str
    # The columns by which the server finds the rows to purge.
    key_columns: tuple[str, ...]


@dataclass(frozen=True)
class Payload:
    """One file to send, with how much it holds."""

    path: Path
    keys: int
    rows: int
    bytes: int
    tables: tuple[PayloadTable, ...]

    @property
    def part(self) -> str:
        """A text that identifies this part of the change set's keys, however the others were divided."""
        return self.path.stem


def needs_key_column(shape: ExtractShape) -> bool:
    """Whether rows must carry a text key of their own: a condition on the server finds no NULL, and no slice."""
    by_name = {column.name: column for column in shape.columns}
    parts = [by_name[name] for name in shape.key]
    return not parts or any(part.nullable or part.kind not in _PLAIN for part in parts)


def with_key_column(extract: Path, target: Path, shapes: Sequence[ExtractShape]) -> None:
    """Copy the extract with each row's purge key as text: it is published where later changes are patched in."""
    added = {}
    for shape in shapes:
        table = describe(extract, shape.table)
        added[table.id] = Added(PURGE_KEY, "TEXT", _text_key(_pairs(table, shape, extract), shape))
    rebuild(extract, target, added=added)


def write_payloads(
    extract: Path, folder: Path, changes: Sequence[StagedChange], *, keyed: bool, most_bytes: int
) -> list[Payload]:
    """The changes as files of at most that size, each with all rows of its keys as the new extract holds them.

    Changes of several tables are in one file if they fit, else table by table in their order. `keyed` tells that the published
    rows carry the key column.
    """
    makers = [
        _Maker(extract, folder, change, keyed=keyed)
        for change in changes
        if (staged_keys(change.folder) if change.shape.key else change.change_set.touched)
    ]
    if len(makers) > 1:
        payload = _written(extract, folder / _name(0, 1), [(maker, 0, 1) for maker in makers])
        if payload.bytes <= most_bytes:
            return [payload] if payload.keys else []
        payload.path.unlink()
    return [payload for maker in makers for payload in maker.divided(most_bytes, named=len(makers) > 1)]


def _name(number: int, parts: int, table: str = "") -> str:
    return f"payload-{f'{table}-' if table else ''}{number + 1}-of-{parts}.hyper"


def _written(extract: Path, path: Path, pieces: Sequence[tuple[_Maker, int, int]]) -> Payload:
    """Write one file with these pieces: of each maker the keys of this number among so many parts."""
    path.unlink(missing_ok=True)
    version = pieces[0][0].file_version
    tables, counts = [], []
    with unbroken(path, file_version=version):
        with connect(path, create=True, file_version=version) as connection:
            new, old = path.stem, f"{path.stem}.old"
            connection.catalog.attach_database(str(extract), alias=old)
            connection.execute_command(f"CREATE SCHEMA {quoted(new, PAYLOAD_SCHEMA)}")
            for place, (maker, number, parts) in enumerate(pieces):
                suffix = f"-{place + 1}" if len(pieces) > 1 else ""
                table = maker.payload_table(f"{KEYS_TABLE}{suffix}", f"{ROWS_TABLE}{suffix}")
                counts.append(maker.make(connection, new, old, table, number, parts))
                tables.append(table)
            connection.catalog.detach_database(old)
        # Again: a commit that was lost would leave keys without their rows.
        with connect(path):
            pass
    keys, rows = (sum(numbers) for numbers in zip(*counts, strict=True))
    return Payload(path, keys, rows, path.stat().st_size, tuple(tables))


class _Maker:
    """Writes the parts of the change of one table."""

    def __init__(self, extract: Path, folder: Path, change: StagedChange, *, keyed: bool) -> None:
        shape = change.shape
        self._extract = extract
        self._folder = folder
        self._extract_name = change.change_set.extract
        self._table = describe(extract, shape.table)
        self._pairs = _pairs(self._table, shape, extract)
        self._text_key = _text_key(self._pairs, shape)
        self._keyed = keyed
        # What is published decides: rows with a key column are found by it, also if their own would do by now.
        self._own = [] if keyed else _own_parts(self._pairs, shape)
        self._source = _keys_source(change.change_set, change.folder, shape, self._pairs, self._own)

    @property
    def file_version(self) -> int:
        return self._table.file_version

    def payload_table(self, keys: str, rows: str) -> PayloadTable:
        return PayloadTable(self._table.id, keys, rows, tuple(self._key_names))

    def divided(self, most_bytes: int, *, named: bool) -> list[Payload]:
        """Write files of at most that size."""
        payloads, waiting = [], [(0, 1)]
        while waiting:
            number, parts = waiting.pop(0)
            path = self._folder / _name(number, parts, self._table.name if named else "")
            payload = _written(self._extract, path, [(self, number, parts)])
            if payload.bytes <= most_bytes:
                payloads.append(payload)
                continue
            payload.path.unlink()
            if payload.keys <= 1:
                raise ExtractError(
                    f"{self._extract_name}: the {payload.rows:,} rows of one key take {payload.bytes / 1e6:,.0f} MB, and the server takes"
                    f" {most_bytes / 1e6:,.0f} MB at once. Choose a finer row key or smaller slices, raise `datasource.patch_limit_mb`"
                    " if the server allows more, or use the delivery `republish`."
                )
            # Only what is too large is divided: beside one huge key the others stay together.
            pieces = min(payload.keys, max(2, math.ceil(_SPARE * payload.bytes / most_bytes)))
            waiting = [*((number + parts * piece, parts * pieces) for piece in range(pieces)), *waiting]
        return [payload for payload in payloads if payload.keys]

    def make(
        self, connection: Any, new: str, old: str, table: PayloadTable, number: int, parts: int
    ) -> tuple[int, int]:
        """Write keys and rows; return how many there are."""
        keys_sql, rows_sql = (quoted(new, PAYLOAD_SCHEMA, name) for name in (table.keys, table.rows))
        keys = self._make(connection, keys_sql, self._part_of_keys(number, parts))
        return keys, self._make(connection, rows_sql, self._rows_of(keys_sql, old))

    def _make(self, connection: Any, table: str, select: str) -> int:
        connection.execute_command(f"CREATE TABLE {table} AS ({select})")
        return int(connection.execute_scalar_query(f"SELECT COUNT(*) FROM {table}"))

    @property
    def _key_names(self) -> list[str]:
        return [part.stored.name for part in self._own] or [PURGE_KEY]

    def _part_of_keys(self, number: int, parts: int) -> str:
        names = ", ".join(quoted(name) for name in self._key_names)
        numbered = f"SELECT {names}, ROW_NUMBER() OVER (ORDER BY {names}) AS n FROM ({self._source}) AS k"
        return f"SELECT {names} FROM ({numbered}) AS numbered WHERE MOD(n, {parts}) = {number}"

    def _rows_of(self, keys: str, old: str) -> str:
        """The rows of the part's keys, read from the new extract, so that both hold the same."""
        values = [quoted(column.name) for column in self._table.columns]
        key = [f"{self._text_key} AS {quoted(PURGE_KEY)}"] if self._keyed else []
        inner = ", ".join([*values, *key])
        same = " AND ".join(f"k.{quoted(name)} = t.{quoted(name)}" for name in self._key_names)
        return (
            f"SELECT * FROM (SELECT {inner} FROM {quoted(old, self._table.schema, self._table.name)}) AS t WHERE EXISTS"
            f" (SELECT 1 FROM {keys} AS k WHERE {same})"
        )


def carries_keys(extract: Path, shape: ExtractShape) -> bool:
    """Whether every row of a published file carries its purge key."""
    table = describe(extract, shape.table)
    if (PURGE_KEY, "TEXT", _BINARY) not in _layout(table):
        return False
    right = _text_key(_pairs(table, shape, extract), shape)
    with connect(extract) as connection:
        wrong = f"SELECT COUNT(*) FROM {table.sql} WHERE {quoted(PURGE_KEY)} IS DISTINCT FROM {right}"
        return int(connection.execute_scalar_query(wrong)) == 0


def same_layout(extract: Path, other: Path) -> bool:
    """Whether a change made for one file fits the other: the same tables and types, apart from the key column."""
    layouts = [
        {table.id: {column for column in _layout(table) if column[0] != PURGE_KEY} for table in describe_all(path)}
        for path in (extract, other)
    ]
    return layouts[0] == layouts[1]


def _layout(table: ExtractTable) -> set[tuple[str, str, str]]:
    """Name, type and collation of each column."""
    return {(column.name, column.type, column.collation or _BINARY) for column in table.columns}


def row_digest(extract: Path, shape: ExtractShape) -> tuple[int, int]:
    """How many rows there are, and the sum of a digest of each one, in any order and in any file.

    Fingerprints sum up column by column: two rows that exchanged their values look alike, and of some values they tell
    only the number. This tells them apart, and reads every value.
    """
    table = describe(extract, shape.table)
    pairs = _pairs(table, shape, extract)
    text = _joined([_text(pair, quoted(pair.stored.name)) for pair in pairs])
    digest = HYPER.digest(f"MD5({text})")
    with connect(extract) as connection:
        query = f"SELECT COUNT(*), CAST(SUM(CAST({digest} AS NUMERIC(38,0))) AS TEXT) FROM {table.sql}"
        rows, total = connection.execute_list_query(query)[0]
    return int(rows), int(total or 0)


def _pairs(table: ExtractTable, shape: ExtractShape, path: Path) -> tuple[Loaded, ...]:
    return pair_columns(shape.columns, table.columns, path=path, names=shape.names or None)


def _own_parts(pairs: Sequence[Loaded], shape: ExtractShape) -> list[Loaded]:
    by_name = {pair.source.name: pair for pair in pairs}
    return [by_name[name] for name in shape.key]


def _text_key(pairs: Sequence[Loaded], shape: ExtractShape) -> str:
    """The purge key of a row of the extract as text that is never NULL, and differs where keys differ."""
    if not shape.key:
        stored = {pair.source.name: pair.stored for pair in pairs}
        return f"COALESCE({slice_sql_hyper(shape.slices, shape.columns, stored)}, '')"
    return _joined([_text(pair, quoted(pair.stored.name)) for pair in _own_parts(pairs, shape)])


def _keys_source(
    change_set: ChangeSet, staged: Path, shape: ExtractShape, pairs: Sequence[Loaded], own: Sequence[Loaded]
) -> str:
    """A SELECT of the change set's purge keys, each once."""
    if not shape.key:
        selects = [f"SELECT {literal(name or '')} AS {quoted(PURGE_KEY)}" for name in change_set.touched]
        return " UNION ".join(selects)
    parts = _own_parts(pairs, shape)
    if own:
        values = ", ".join(f"k{at} AS {quoted(part.stored.name)}" for at, part in enumerate(own))
    else:
        values = f"{_joined([_text(part, f'k{at}') for at, part in enumerate(parts)])} AS {quoted(PURGE_KEY)}"
    return f"SELECT DISTINCT {values} FROM ({key_select(parts, staged_keys(staged))}) AS s"


def _joined(parts: Sequence[str]) -> str:
    """Each part with its length before it, so that no two different keys give one text; NULL is a dash."""
    return " || ".join(f"COALESCE(CAST(CHAR_LENGTH({part}) AS TEXT) || ':' || {part}, '-')" for part in parts)


def _text(pair: Loaded, value: str) -> str:
    if pair.stored.type == "TEXT":
        return f"({value})"
    if pair.stored.type == "TIMESTAMPTZ":
        return f"CAST({value} AT TIME ZONE 'UTC' AS TEXT)"
    if pair.stored.type == "DOUBLE PRECISION":
        # Zero has two signs, which are equal and do not look so.
        return f"CASE WHEN {value} = 0 THEN '0' ELSE CAST({value} AS TEXT) END"
    return f"CAST({value} AS TEXT)"
