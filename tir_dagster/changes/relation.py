"""The extract's rows, and the rows before aggregation, as queries that can be pinned to a version. No row is read here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tir_dagster.errors import SourceError, SpecError
from tir_dagster.snowflake.columns import Column, Kind, UnheldTypeError
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.pinned import PinnedSource, cut_sql, with_cut_keys
from tir_dagster.snowflake.query import (
    JoinKey,
    OpenOrder,
    View,
    ViewError,
    ViewTable,
    analyse,
    base_sql,
    parse_query,
    tables_of,
    view_sql,
)
from tir_dagster.snowflake.slices import SliceBy, slice_column
from tir_dagster.snowflake.versions import (
    MissingTableError,
    SourceVersion,
    column_comments,
    column_names,
    describe,
    describe_query,
    described_once,
)
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.tables import KEY_NEEDED, JoinedChanges, TableChanges

# Aggregates whose text follows an order that ties leave open.
_ORDERED = re.compile(r"\b(LISTAGG|STRING_AGG|ARRAY_AGG|OBJECT_AGG)\b", re.IGNORECASE)
# A watermark must grow with the changes; of these, texts and times of day do not.
_WATERMARKS = (Kind.INTEGER, Kind.DECIMAL, Kind.FLOAT, Kind.DATE, Kind.TIMESTAMP, Kind.INSTANT)


@dataclass(frozen=True)
class Dimension:
    """A joined table: which of its columns the extract depends on, and what it is joined to."""

    alias: str
    table: TableName
    join: Literal["left", "inner"]
    on: tuple[JoinKey, ...]
    # All that the query reads of it; the key is what others refer to it by.
    columns: tuple[Column, ...]
    key: tuple[Column, ...]
    changes: JoinedChanges
    # The watermark's column, where changes are found by one.
    mark: Column | None = None

    @property
    def parent(self) -> str:
        return self.on[0].parent


@dataclass(frozen=True)
class Relation:
    """The extract's rows: its columns, the key that is purged by, its slices, and where they come from."""

    spec: ExtractSpec
    tables: tuple[TableName, ...]
    columns: tuple[Column, ...]
    key: tuple[Column, ...]
    slices: SliceBy
    watermark: Column | None
    view: View | None = None
    dimensions: tuple[Dimension, ...] = ()
    base_columns: tuple[Column, ...] = ()
    base_key: tuple[Column, ...] = ()
    # By a dimension's alias: the columns of the base rows that refer to it.
    refers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Where the key stands in the first table: its columns there, in the key's order.
    fact_key: tuple[str, ...] = ()
    # Why the query is compared as a whole, in a sentence; None: it is taken apart, or loaded in full.
    whole: str | None = None
    # Why rows of this query cannot be told apart, though it is repeatable; in a sentence.
    unfit: str | None = None

    @property
    def table(self) -> TableName:
        return self.tables[0]

    @property
    def aggregated(self) -> bool:
        return self.view is not None and self.view.kind == "aggregate"

    @property
    def analysed(self) -> bool:
        """Whether the rows that a change of each table affects are known: for a plain table, or for joins and groups of tables."""
        return self.why_full is None and self.whole is None

    @property
    def may_hide_rows(self) -> bool:
        """Whether rows can leave their key though none was deleted: filtered out, without a partner, or moved away."""
        if not self.spec.row_key:
            # The key is the slice or the group: an update moves a row to another one, be it an update of its partner.
            return True
        view = self.view
        return view is not None and (
            bool(view.where) or any(dimension.join == "inner" for dimension in self.dimensions)
        )

    @property
    def excluded_changes(self) -> tuple[str, ...]:
        """Notes for the plan: changes that are not looked for, because the spec excludes them."""
        if not self.analysed:
            return ()
        fact = self.spec.changes
        whole = "stay in the extract until a full refresh, or until their slices are re-synced"
        notes = []
        if not fact.deletes and fact.by != "feed" and not self.may_hide_rows:
            notes.append(f"Rows deleted from {self.table} are not looked for (changes.deletes is false): they {whole}.")
        notes += [
            f"Rows that are deleted from {dimension.table}, or get another key there, are not looked for "
            f"(changes.tables.{dimension.table}.deletes is false): rows that referred to them keep the old values."
            for dimension in self.dimensions
            if dimension.mark is not None and not dimension.changes.deletes
        ]
        return tuple(dict.fromkeys(notes))

    @property
    def finds_all(self) -> bool:
        """Whether detectors look for every change, so that the extract should equal its source at its own version."""
        if self.whole is not None:
            return True
        detectors = (self.spec.changes.by, *(dimension.changes.by for dimension in self.dimensions))
        return self.why_full is None and not self.excluded_changes and "hint" not in detectors

    @property
    def compares_versions(self) -> bool:
        """Whether every detector compares two versions or reads a feed: without a past, all rows are compared."""
        if self.whole is not None:
            return True
        return self.spec.changes.by in ("diff", "feed") and all(table.changes.by != "hint" for table in self.dimensions)

    @property
    def unused_settings(self) -> tuple[str, ...]:
        """Warnings about settings of `changes` that are not used for a query that is compared as a whole."""
        if self.whole is None:
            return ()
        changes = self.spec.changes
        detectors = {
            "changes": changes.by,
            **{f"changes.tables.{name}": joined.by for name, joined in changes.tables.items()},
        }
        warnings = [
            f"{place} asks for the detector {by}, which is not used: `diff` compares the query as a whole instead. {self.whole}"
            for place, by in detectors.items()
            if by != "diff"
        ]
        warnings += [
            f"changes.tables.{name}.duplicates is not used: the join keys of a query that is compared as a whole are not known."
            for name, joined in changes.tables.items()
            if joined.duplicates == "fail"
        ]
        return tuple(warnings)

    @property
    def orders(self) -> tuple[OpenOrder, ...]:
        """Orders in which rows may tie, so that each reading of a query that is compared as a whole may show other ones."""
        return self.view.orders if self.view is not None and self.whole is not None else ()

    @property
    def fact_key_sql(self) -> str:
        """The first table's key as what follows SELECT, under the names that it has before aggregation."""
        key = self.base_key or self.key
        return ", ".join(
            f"{cut_sql(replace(column, name=name))} AS {quote(column.name)}"
            for name, column in zip(self.fact_key, key, strict=True)
        )

    @property
    def why_full(self) -> str | None:
        """Why only a full refresh is right, whatever changed."""
        return self.unfit or (self.view.why_full if self.view else None)

    @property
    def unrepeatable(self) -> frozenset[str]:
        """Columns that may differ in the last digit each time the query runs: floats are added up in any order."""
        if self.view is None:
            return frozenset()
        kinds = {column.name: column.kind for column in self.columns}
        if self.view.adds_up:
            return frozenset(name for name, kind in kinds.items() if kind is Kind.FLOAT)
        return frozenset(
            column.name
            for column in self.view.columns
            if column.aggregate and (kinds[column.name] is Kind.FLOAT or _ORDERED.search(column.sql))
        )

    def from_clause(self, version: SourceVersion) -> str:
        """The FROM clause for the rows that users see."""
        return f"{self.table.sql} {version.sql}" if self.view is None else f"({view_sql(self.view, version)})"

    def base(self, version: SourceVersion) -> PinnedSource:
        """The rows before aggregation."""
        if self.view is None or not self.analysed:
            rows = with_cut_keys(self.from_clause(version), self.key)
            return PinnedSource(rows, self.columns, self.key, self.slices, self.watermark, version)
        base = base_sql(self.view, row_key=self.spec.row_key, watermark=self.spec.changes.watermark, version=version)
        group = self.key if self.aggregated else ()
        rows = with_cut_keys(f"({base.sql})", [column for column in self.base_key if column.name in base.key])
        return PinnedSource(rows, self.base_columns, self.base_key, self.slices, self.watermark, version, group)


@described_once()
def relation_of(spec: ExtractSpec, access: SnowflakeAccess, *, columns: Sequence[str] = ()) -> Relation:
    """Look up the tables' columns; `columns` are those of a datasource that a user built, if they are fewer."""
    if spec.query is None:
        return _of_table(spec, access, columns)
    try:
        return _of_query(spec, access)
    except ViewError as error:
        raise SpecError(f"{spec.name}: {error}") from None


def read_tables(spec: ExtractSpec) -> tuple[TableName, ...]:
    """All tables that the extract reads, the one that rows come from first."""
    if spec.tables:
        return tuple(dict.fromkeys(table for part in spec.parts.values() for table in read_tables(part)))
    return (TableName.parse(spec.main_table),) if spec.query is None else tables_of(spec.query)


def watched_tables(spec: ExtractSpec) -> tuple[TableName, ...]:
    """Return all tables that the extract reads, and those that are only watched, each once."""
    return tuple(dict.fromkeys([*read_tables(spec), *map(TableName.parse, spec.watch)]))


def _of_table(spec: ExtractSpec, access: SnowflakeAccess, columns: Sequence[str]) -> Relation:
    table = TableName.parse(spec.main_table)
    table_columns = describe(access, table, tuple(columns) or spec.columns or None)
    key = tuple(_column(spec, table_columns, name, "row_key") for name in spec.row_key)
    _check_row_key(spec, key, stored=True)
    watermark = _watermark(spec, access, table, spec.changes, "changes.watermark")
    names = tuple(column.name for column in key)
    return Relation(spec, (table,), table_columns, key, _slices(spec, table_columns), watermark, fact_key=names)


def _of_query(spec: ExtractSpec, access: SnowflakeAccess) -> Relation:
    assert spec.query is not None
    table_columns = {table: _columns_or_error(spec, access, table) for table in tables_of(spec.query)}
    view = analyse(spec.query, table_columns)
    columns = _commented(describe_query(access, view_sql(view, None)), view, access)
    _check_names(columns)
    slices = _slices(spec, columns)
    tables = tuple(dict.fromkeys(table.table for table in view.tables))
    untouched = Relation(spec, tables, columns, (), slices, None, view)
    if view.kind == "opaque":
        return untouched
    if view.kind == "whole":
        return _compared_whole(untouched, view.why_whole or "", _output_key(spec, columns))
    try:
        return _by_key(spec, access, view, untouched)
    except _UntrackableRows as reason:
        why = f"{str(reason)[0].upper()}{str(reason)[1:]}."
        return _compared_whole(untouched, why, () if view.group else _output_key(spec, columns))


def _commented(columns: Sequence[Column], view: View, access: SnowflakeAccess) -> tuple[Column, ...]:
    """Give output columns that are one column of a table its comment."""
    comments = {table.alias: column_comments(access, table.table) for table in view.tables}
    texts = {
        column.name: comments[column.reads[0][0]].get(column.reads[0][1], "")
        for column in view.columns
        if len(column.reads) == 1
        and column.reads[0][0] in comments
        and _is_plain(column.sql, column.reads, column.reads[0][0])
    }
    return tuple(replace(column, comment=texts.get(column.name, "")) for column in columns)


def _check_names(columns: Sequence[Column]) -> None:
    """ViewError for two columns of one name, which * can bring where the text does not tell."""
    counted = Counter(column.name for column in columns)
    if twice := [name for name, count in counted.items() if count > 1]:
        raise ViewError(
            f"two output columns are called {twice[0]}. Give one of them another name with AS, or leave it out."
        )


def _compared_whole(untouched: Relation, why: str, key: tuple[Column, ...]) -> Relation:
    """A query that is not taken apart; without a key and slices nothing smaller than the extract can be replaced."""
    if not key and untouched.slices.by == "none":
        return replace(untouched, unfit=f"{why} It has neither a row_key nor slices by which rows could be replaced.")
    return replace(untouched, key=key, whole=why)


def _output_key(spec: ExtractSpec, columns: Sequence[Column]) -> tuple[Column, ...]:
    key = tuple(_column(spec, columns, name, "row_key") for name in spec.row_key)
    _check_row_key(spec, key, stored=True)
    return key


def _columns_or_error(spec: ExtractSpec, access: SnowflakeAccess, table: TableName) -> list[str]:
    """Return the table's columns; if the table is missing, the error says where the query names it."""
    try:
        return column_names(access, table, next_step="Correct the query, or grant SELECT on the table.")
    except MissingTableError as missing:
        place = parse_query(spec.query or "").error_at_table(table, str(missing))
        raise MissingTableError(f"{spec.name}: {place}", errno=missing.errno) from missing


class _UntrackableRows(Exception):  # noqa: N818 - no error: such a query is compared as a whole
    """The rows before aggregation cannot be tracked; the message says why."""


def _by_key(spec: ExtractSpec, access: SnowflakeAccess, view: View, untouched: Relation) -> Relation:
    """Complete the relation with what a refresh by key needs: key, dimensions, base rows."""
    columns, slices = untouched.columns, untouched.slices
    fact, *joined = view.tables
    _check_joined(spec, fact.table, {table.table for table in joined})
    mark = _watermark(spec, access, fact.table, spec.changes, "changes.watermark")
    base_select = base_sql(view, row_key=spec.row_key, watermark=spec.changes.watermark, version=None)
    try:
        base = {column.name: column for column in describe_query(access, base_select.sql)}
    except UnheldTypeError as error:
        raise _UntrackableRows(f"it computes with a column that cannot be tracked: {error}") from None
    _check_row_key(spec, [base[name] for name in base_select.key], stored=not view.group)
    # Without a row key the rows of a group are replaced together.
    base_key = tuple(base[name] for name in base_select.key or view.group)
    if not base_key and slices.by == "none":
        raise SpecError(f"{spec.name}: {KEY_NEEDED}.")
    group = tuple(_column(spec, columns, name, "query") for name in view.group)
    for column in group:
        if column.kind in (Kind.JSON, Kind.FLOAT, Kind.TIME) or column.hyper == "DOUBLE PRECISION":
            raise _UntrackableRows(f"it groups by {column.name}, which holds {column.kind.value} and cannot be a key")
    if group and slices.column and slices.column not in view.group:
        raise SpecError(
            f"{spec.name}: slices.column names {slices.column}, which the query does not group by. Slice by a column of "
            "GROUP BY, or leave the slices out."
        )
    return replace(
        untouched,
        key=group or base_key,
        watermark=Column("__TIR_MARK", mark.kind, mark.precision, mark.scale) if mark else None,
        dimensions=tuple(_dimension(spec, access, table) for table in joined),
        base_columns=tuple(base[name] for name in base_select.columns),
        base_key=base_key,
        refers=base_select.refers,
        fact_key=_fact_key(view, spec),
    )


def _check_row_key(spec: ExtractSpec, key: Sequence[Column], *, stored: bool) -> None:
    """Raise SpecError where different keys could look the same; `stored` says whether the extract holds the key."""
    for name, column in zip(spec.row_key, key, strict=False):
        if column.kind in (Kind.FLOAT, Kind.JSON):
            problem = f"holds {column.kind.value}: such values cannot be told apart safely"
        elif stored and column.kind is Kind.TIME:
            problem = "holds times of day: the source keeps them to the nanosecond, an extract to the microsecond"
        elif stored and column.hyper == "DOUBLE PRECISION":
            problem = (
                f"is NUMBER({column.precision},{column.scale}): an extract holds so many digits as a float, in which different "
                f"keys can look the same"
            )
        else:
            continue
        raise SpecError(
            f"{spec.name}: row_key names {name}, which {problem}. Nothing was read. Name another column, or show "
            f"CAST({name} AS VARCHAR) in a `query:` and name that."
        )


def _check_joined(spec: ExtractSpec, fact: TableName, joined: Collection[TableName]) -> None:
    """Raise SpecError if changes.tables names the query's first table, whose detector belongs in `changes` itself."""
    for name in spec.changes.tables:
        if TableName.parse(name) == fact and fact not in joined:
            raise SpecError(
                f"{spec.name}: changes.tables.{name}: it is the query's first table, not a joined one. Set in `changes` itself "
                "how its changes are found."
            )


def _fact_key(view: View, spec: ExtractSpec) -> tuple[str, ...]:
    """The first table's columns behind the row key; none where the key is made of anything else."""
    fact = view.tables[0].alias
    if view.kind == "aggregate":
        return tuple(name if name in view.fact.columns else name.upper() for name in spec.row_key)
    plain = {column.name: column.reads[0][1] for column in view.columns if _is_plain(column.sql, column.reads, fact)}
    names = [name if name in plain else name.upper() for name in spec.row_key]
    return tuple(plain[name] for name in names) if all(name in plain for name in names) else ()


def _is_plain(sql: str, reads: Sequence[tuple[str, str]], fact: str) -> bool:
    """Whether the expression is one column of the first table and nothing else."""
    return len(reads) == 1 and reads[0][0] == fact and sql == f"{quote(fact)}.{quote(reads[0][1])}"


def _dimension(spec: ExtractSpec, access: SnowflakeAccess, table: ViewTable) -> Dimension:
    settings = {TableName.parse(name): (name, changes) for name, changes in spec.changes.tables.items()}
    written, changes = settings.get(table.table, ("", JoinedChanges()))
    try:
        columns = describe(access, table.table, table.used)
    except UnheldTypeError as error:
        raise _UntrackableRows(f"it reads a column of {table.table} that cannot be compared: {error}") from None
    by_name = {column.name: column for column in columns}
    key = tuple(by_name[join_key.key] for join_key in table.on)
    if unfit := [column for column in key if column.kind is Kind.JSON]:
        raise _UntrackableRows(f"{table.table} is joined by {unfit[0].name}, which holds {unfit[0].kind.value}")
    join: Literal["left", "inner"] = "inner" if table.role == "inner" else "left"
    mark = _watermark(spec, access, table.table, changes, f"changes.tables.{written}.watermark")
    return Dimension(table.alias, table.table, join, table.on, columns, key, changes, mark)


def _slices(spec: ExtractSpec, columns: Sequence[Column]) -> SliceBy:
    name = _column(spec, columns, spec.slices.column, "slices.column").name if spec.slices.column else None
    slices = SliceBy(name, spec.slices.by, spec.slices.zone)
    try:
        slice_column(slices, columns)
    except SourceError as error:
        raise SpecError(f"{spec.name}: slices.column: {error}") from None
    return slices


def _watermark(
    spec: ExtractSpec, access: SnowflakeAccess, table: TableName, changes: TableChanges, field_name: str
) -> Column | None:
    """The watermark's column, which the extract itself may leave out."""
    if changes.watermark is None:
        return None
    names = column_names(access, table)
    if not {changes.watermark, changes.watermark.upper()} & set(names):
        raise SpecError(
            f"{spec.name}: {field_name} names {changes.watermark}, which {table} does not have. It has {', '.join(names)}."
        )
    (column,) = describe(access, table, [changes.watermark])
    if column.kind not in _WATERMARKS:
        raise SpecError(
            f"{spec.name}: {field_name} names {column.name}, which holds {column.kind.value}. Name a number, date or "
            "timestamp that every change raises, or leave it out: then every row is compared."
        )
    return column


def _column(spec: ExtractSpec, columns: Sequence[Column], name: str, field_name: str) -> Column:
    by_name = {column.name: column for column in columns}
    column = by_name.get(name) or by_name.get(name.upper())
    if column is None:
        where = spec.source if spec.query is None else "the query"
        raise SpecError(
            f"{spec.name}: {field_name} names {name}, which {where} does not have. It has {', '.join(by_name)}."
        )
    return column
