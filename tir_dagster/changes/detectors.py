"""Detectors: SELECTs of the keys that may have changed between two versions; the keys stay in the warehouse.

    K_D = join keys of changed rows of D (before and after, without NULL)  +  { d.key : d in D now, d refers to a key in K_G }
    P   = row keys of changed rows of F (before and after)                 +  { f.key : f refers to a key in some K_D }

A candidate becomes a change where its rows differ from what the extract holds. In the SQL here, TIR_NEW and TIR_OLD are the
query's rows before aggregation at the two versions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tir_dagster.changes.difference import HINT_MARK, ROW_MARK, SLICE_KEY
from tir_dagster.changes.hints import Scope
from tir_dagster.changes.relation import Dimension, Relation
from tir_dagster.changes.watermarks import NUMBERS
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.pinned import cut_sql, sql_literal, with_cut_keys
from tir_dagster.snowflake.slices import slice_filter_snowflake, slice_sql_snowflake
from tir_dagster.snowflake.versions import SourceVersion, Span

NEW, OLD = quote("TIR_NEW"), quote("TIR_OLD")


@dataclass(frozen=True)
class HistoryLimits:
    """Why older versions of tables, or their change feeds, cannot be read; tables not named here can be read."""

    unreadable: Mapping[TableName, str] = field(default_factory=dict)
    untracked: Mapping[TableName, str] = field(default_factory=dict)
    # Why another reading of the query at the same version may show other rows.
    tied: str | None = None


@dataclass(frozen=True)
class HintedCandidates:
    """What hints say of one table: SELECTs of the keys that they hit, or that anything may have changed."""

    selects: tuple[str, ...] = ()
    anything: bool = False
    # Scopes whose old rows only the extract remembers.
    in_extract: tuple[Scope, ...] = ()


@dataclass(frozen=True)
class Question:
    """What a detection looks for: which tables changed since, what hints say, and how far history reaches."""

    span: Span
    changed: Collection[TableName]
    # The first table's watermark from which rows are candidates, as an SQL literal.
    since: str | None = None
    # By a joined table's alias: the condition for rows that its watermark proposes; what hints say of it.
    marked: Mapping[str, str] = field(default_factory=dict)
    described: Mapping[str, HintedCandidates] = field(default_factory=dict)
    # What hints say of the first table: its keys under the names of the row key.
    described_rows: HintedCandidates = HintedCandidates()
    history: HistoryLimits = HistoryLimits()


@dataclass(frozen=True)
class Candidates:
    """Keys that may have changed, as SELECTs over the warehouse; or why every row is read and compared instead."""

    selects: tuple[str, ...] = ()
    everything: str | None = None
    # Rows may have left without a trace: the numbers of rows and keys by slice tell where.
    count_slices: bool = False
    # Of the selects, those that hints gave; only where the first table's changes are also detected, and nothing else is.
    described: tuple[str, ...] = ()
    # Parts of the selects that ask what changed in one table, in the same words for every extract with its key.
    changes: tuple[str, ...] = ()
    # Rows of the extract that meet these are candidates, too.
    in_extract: tuple[Scope, ...] = ()
    # Fallbacks that people should know of.
    warnings: tuple[str, ...] = ()


class _CannotTellError(Exception):
    """The changed keys are not known; the message says why, `unexpected` whether to warn people."""

    def __init__(self, why: str, *, unexpected: bool = False) -> None:
        super().__init__(why)
        self.unexpected = unexpected


def find_candidates(relation: Relation, question: Question) -> Candidates:
    """Combine what the detectors of all tables propose."""
    detection = _Detection(relation, question)
    try:
        in_extract = question.described_rows.in_extract
        candidates = detection.candidates()
        changes = tuple(select for select in detection.changes if any(select in whole for whole in candidates.selects))
        return replace(candidates, described=detection.described(), changes=changes, in_extract=in_extract)
    except _CannotTellError as why:
        if why.unexpected:
            detection.warn(str(why), "every row is read and compared with the extract")
        return Candidates(everything=str(why), warnings=tuple(detection.warnings))


def changed_dimension_keys(relation: Relation, question: Question) -> dict[str, str]:
    """Return SELECTs of the changed join keys of joined tables by alias; nothing where they are not known."""
    try:
        return _Detection(relation, question).changed_keys()
    except _CannotTellError:
        return {}


class _Detection:
    def __init__(self, relation: Relation, question: Question) -> None:
        self._relation = relation
        self._question = question
        self._key = purge_key(relation)
        # What names a row before aggregation; nothing where only slices or groups do.
        key = (relation.base_key or relation.key) if relation.spec.row_key else ()
        self._row_key = {column.name: quote(column.name) for column in key}
        # A plain table's rows under its own name: so the changes of it are asked for in the same words by every extract.
        versions = (question.span.new, question.span.old)
        self._new, self._old = (relation.base(version).sql for version in versions) if self._plain else (NEW, OLD)
        self.warnings: list[str] = []
        self.changes: list[str] = []

    @property
    def _plain(self) -> bool:
        return self._relation.view is None

    def candidates(self) -> Candidates:
        relation, question = self._relation, self._question
        changed, detector = relation.table in question.changed, relation.spec.changes.by
        if question.described_rows.anything:
            raise _CannotTellError(f"a hint says that any row of {relation.table} may have changed")
        selects = self._of_named(question.described_rows.selects)
        if not relation.analysed:
            self.warnings += relation.unused_settings
            if tied := question.history.tied:
                # Of two readings, one could show rows of which the other, or the extract, shows the rest.
                raise _CannotTellError(f"{tied}, so that each reading may show other rows", unexpected=True)
        if not relation.analysed or (changed and detector == "diff"):
            # Whatever changed, in whichever table.
            selects += self._own([self._differing()])
            return Candidates(tuple(selects), warnings=tuple(self.warnings))
        selects += self._referring()
        own: list[str] = []
        counted = False
        if changed and detector in ("watermark", "hint") and not self._row_key:
            # A delete and a late insert in one slice or group leave its count as it was.
            own.append(self._differing())
        elif changed and detector == "watermark":
            own += self._marked()
            if self._numbers:
                # Without history nobody knows which of them changed.
                self._need_history([relation.table])
            if relation.spec.changes.deletes or relation.may_hide_rows or self._numbers:
                counted = self._lacks_history([relation.table]) is not None
                own += [] if counted else self._recounted()
        elif changed and detector == "feed":
            own += self._feed()
        return Candidates((*selects, *self._own(own)), count_slices=counted, warnings=tuple(self.warnings))

    def _own(self, selects: Sequence[str]) -> list[str]:
        """Keys of the first table's own changes; for a plain table one SELECT, which stands alone."""
        if not (self._plain and selects):
            return list(selects)
        self.changes.append(" UNION ".join(selects))
        return [self.changes[-1]]

    def described(self) -> tuple[str, ...]:
        """SELECTs of the keys that hints describe, if only changes of the first table are detected."""
        relation, question = self._relation, self._question
        alone = set(question.changed) == {relation.table} and not any(
            hinted.selects for hinted in question.described.values()
        )
        detected = alone and relation.spec.changes.by != "hint"
        return tuple(self._of_named(question.described_rows.selects)) if detected else ()

    def _lacks_history(self, tables: Iterable[TableName]) -> str | None:
        unreadable = self._question.history.unreadable
        return next((unreadable[table] for table in tables if table in unreadable), None)

    def _need_history(self, tables: Iterable[TableName]) -> None:
        if why := self._lacks_history(tables):
            raise _CannotTellError(why, unexpected=True)

    def warn(self, why: str, instead: str) -> None:
        self.warnings.append(f"{why[0].upper()}{why[1:]}: {instead}.")

    # The first table

    def _differing(self) -> str:
        """Keys of rows whose number differs between the versions: correct for any repeatable query."""
        self._need_history(self._relation.tables)
        columns = self._relation.base(self._question.span.new).columns
        return _uneven(self._key, {**self._key, **numbered(columns)}, self._new, self._old)

    def _marked(self) -> list[str]:
        """Keys of rows at or after the last watermark minus the look-back, and of rows without one."""
        column, since = self._relation.watermark, self._question.since
        if column is None or since is None:
            raise _CannotTellError(f"no row of {self._relation.table} had a watermark")
        return self._of_rows(f"(r.{quote(column.name)} >= {since} OR r.{quote(column.name)} IS NULL)", [self._new])

    def _recounted(self) -> list[str]:
        """Keys with more or fewer rows than before: deleted, late or hidden rows are not found by the watermark.

        Numbers as watermarks are compared, too: one that is far too high would hide all that follow.
        """
        return self._of_named(
            [_uneven(self._row_key, {**self._row_key, **numbered(self._numbers)}, self._new, self._old)]
        )

    @property
    def _numbers(self) -> tuple[Column, ...]:
        mark = self._relation.watermark
        return (mark,) if mark is not None and mark.kind in NUMBERS else ()

    def _feed(self) -> list[str]:
        """Keys that the table's own feed of changes names; without a feed the versions are compared."""
        relation = self._relation
        why = self._lacks_history([relation.table]) or self._question.history.untracked.get(relation.table)
        if why is None and relation.fact_key:
            feed = f"SELECT {relation.fact_key_sql} FROM {self._question.span.changes(relation.table)}"
            self.changes += [] if self._plain else [feed]
            return self._of_named([feed])
        differing = self._differing()
        why = why or f"the feed of {relation.table} names no rows without a row key of its own columns"
        self.warn(why, "both versions are compared in the warehouse")
        return [differing]

    # Joined tables

    def _referring(self) -> list[str]:
        """Keys of rows that refer to a changed key of a joined table."""
        keys = self.changed_keys()
        # A row that the change hides or moves to another group refers to the key in the old version only.
        in_both_versions = self._relation.may_hide_rows or self._relation.aggregated
        selects: list[str] = []
        for dimension in self._relation.dimensions:
            if dimension.alias in self._relation.refers and dimension.alias in keys:
                columns = self._relation.refers[dimension.alias]
                refers = _refers(columns, dimension.key, keys[dimension.alias])
                selects += self._of_rows(refers, [NEW, OLD] if in_both_versions else [NEW])
        return selects

    def changed_keys(self) -> dict[str, str]:
        """By alias, a SELECT of the keys of a joined table that changed, or whose rows refer to a changed one."""
        question = self._question
        keys: dict[str, str] = {}
        # Those at the end of a chain first: what refers to them is affected, too.
        for dimension in reversed(self._relation.dimensions):
            described = question.described.get(dimension.alias, HintedCandidates())
            selects = list(described.selects)
            if described.anything or (dimension.changes.by != "hint" and dimension.table in question.changed):
                selects.append(self._changed_rows(dimension, anything=described.anything))
                self.changes.append(selects[-1])
            for child in self._relation.dimensions:
                if child.parent == dimension.alias and child.alias in keys:
                    refers = _refers([join_key.column for join_key in child.on], child.key, keys[child.alias])
                    pinned = f"{dimension.table.sql} {question.span.new.sql}"
                    selects.append(f"SELECT {_names(dimension.key)} FROM {pinned} AS r WHERE {refers}")
            if selects:
                keys[dimension.alias] = " UNION ".join(selects)
        return keys

    def _changed_rows(self, dimension: Dimension, *, anything: bool) -> str:
        """Keys that the table's detector finds; a watermark is not used where anything may have changed."""
        question, table = self._question, dimension.table
        self._need_history([table])
        if dimension.changes.by == "feed" and not anything:
            why = question.history.untracked.get(table)
            if why is None:
                return f"SELECT {_names(dimension.key)} FROM {question.span.changes(table)}"
            self.warn(why, "its two versions are compared in the warehouse")
        new, old = (f"{table.sql} {version.sql}" for version in (question.span.new, question.span.old))
        key = {column.name: quote(column.name) for column in dimension.key}
        if dimension.alias in question.marked and not anything:
            marked = f"SELECT {_names(dimension.key)} FROM {new} AS r WHERE {question.marked[dimension.alias]}"
            numbers = [dimension.mark] if dimension.mark is not None and dimension.mark.kind in NUMBERS else []
            if not dimension.changes.deletes and not numbers:
                return marked
            return f"{marked} UNION {_uneven(key, {**key, **numbered(numbers)}, new, old)}"
        return _uneven(key, {**key, **numbered(dimension.columns)}, new, old)

    # From rows to the keys they are replaced by

    def _of_rows(self, condition: str, sides: Sequence[str]) -> list[str]:
        """Keys of rows, called r, that meet a condition in these versions."""
        if OLD in sides:
            self._need_history(self._relation.tables)
        if self._relation.aggregated and self._row_key:
            return self._of_named(
                [f"SELECT {select_list(self._row_key)} FROM {side} AS r WHERE {condition}" for side in sides]
            )
        if self._relation.aggregated:
            self._need_history(self._relation.tables)
        return [f"SELECT {select_list(self._key)} FROM {side} AS r WHERE {condition}" for side in sides]

    def _of_named(self, selects: Sequence[str]) -> list[str]:
        """Keys of the rows with these row keys; for an aggregate, their old and new groups."""
        if not selects or not self._relation.aggregated:
            return list(selects)
        self._need_history(self._relation.tables)
        # A join: Snowflake takes null-safe tests there, in a correlated subquery it need not.
        names = self._row_key.values()
        same = " AND ".join(f"p.{name} IS NOT DISTINCT FROM r.{name}" for name in names)
        keys = ", ".join(f"{name} AS {name}" for name in names)
        keys_table = f"(SELECT DISTINCT {keys} FROM ({' UNION '.join(selects)}) AS n) AS p"
        return [f"SELECT {select_list(self._key)} FROM {side} AS r JOIN {keys_table} ON {same}" for side in (NEW, OLD)]


# Statements


def purge_key(relation: Relation) -> dict[str, str]:
    """The names and SQL of the key that rows are replaced by: row key or group; the slice where there is neither."""
    if relation.key:
        # Rows before aggregation have their groups to the nanosecond: so much tells the groups apart.
        return {column.name: cut_sql(column) for column in relation.key}
    return {SLICE_KEY.name: slice_sql_snowflake(relation.slices, relation.columns)}


def staged_columns(relation: Relation, *, hinted: bool = False) -> tuple[Column, ...]:
    """The columns of the statements below."""
    return (*relation.columns, ROW_MARK, *(() if relation.key else (SLICE_KEY,)), *((HINT_MARK,) if hinted else ()))


def slices_select(relation: Relation, version: SourceVersion, slices: Sequence[str | None]) -> str:
    """Keys of all rows in these slices."""
    inside = slice_filter_snowflake(relation.slices, relation.columns, slices)
    return f"SELECT {select_list(purge_key(relation))} FROM {source_sql(relation, version)} AS r WHERE {inside}"


def everything_statement(relation: Relation, version: SourceVersion) -> str:
    """A SELECT of all rows."""
    more = "" if relation.key else f", {select_list(purge_key(relation))}"
    return f"SELECT {_names(relation.columns)}{more}, 1 AS {quote(ROW_MARK.name)} FROM {source_sql(relation, version)} AS r"


def candidates_statement(
    relation: Relation, span: Span, selects: Sequence[str], *, described: Sequence[str] = ()
) -> str:
    """A SELECT of all rows of the selected keys at the new version; a key without rows gives one row whose mark is NULL.

    Where keys are described by hints, each row is marked whether its key is one of them.
    """
    keys = " UNION ".join(selects)
    sides = ((NEW, span.new), (OLD, span.old))
    used = [f"{name} AS (SELECT * FROM {relation.base(version).sql})" for name, version in sides if name in keys]
    return (f"WITH {', '.join(used)} " if used else "") + _rows_of(relation, span.new, keys, described)


def keys_statement(relation: Relation, version: SourceVersion, keys: Sequence[tuple[Any, ...]]) -> str:
    """The same for keys that come from outside the warehouse, as literals."""
    columns = relation.key or (SLICE_KEY,)
    rows = [
        select_list({column.name: sql_literal(column, value) for column, value in zip(columns, key, strict=True)})
        for key in keys
    ]
    return _rows_of(relation, version, " UNION ALL ".join(f"SELECT {row}" for row in rows))


def source_sql(relation: Relation, version: SourceVersion) -> str:
    """The FROM clause of the rows that users see, with keys as the extract stores them."""
    return with_cut_keys(relation.from_clause(version), relation.key)


def _rows_of(relation: Relation, version: SourceVersion, keys: str, described: Sequence[str] = ()) -> str:
    names = [quote(name) for name in purge_key(relation)]
    same = " AND ".join(f"k.{name} IS NOT DISTINCT FROM t.{name}" for name in names)
    mark = f"t.{quote(ROW_MARK.name)}"
    # The row's own spelling of its key: keys that a collation calls equal need not be the same to the letter.
    listed = [f"CASE WHEN {mark} IS NULL THEN k.{name} ELSE t.{name} END AS {name}" for name in names]
    listed += [f"t.{name}" for column in relation.columns if (name := quote(column.name)) not in names]
    sql = (
        f"SELECT {', '.join(listed)}, {mark}{_hint_mark(described)} FROM (SELECT DISTINCT * FROM ({keys}) AS u) AS k "
        f"LEFT JOIN ({everything_statement(relation, version)}) AS t ON {same}"
    )
    if described:
        hinted = " AND ".join(f"h.{name} IS NOT DISTINCT FROM k.{name}" for name in names)
        hints = (
            f"SELECT DISTINCT {', '.join(names)}, 1 AS {quote(HINT_MARK.name)} FROM ({' UNION '.join(described)}) AS n"
        )
        sql += f" LEFT JOIN ({hints}) AS h ON {hinted}"
    return sql


def _hint_mark(described: Sequence[str]) -> str:
    return f", h.{quote(HINT_MARK.name)}" if described else ""


def _uneven(key: Iterable[str], columns: Mapping[str, str], new: str, old: str) -> str:
    """A SELECT of the keys of rows whose number differs between the two sides."""
    listed, names = select_list(columns), ", ".join(map(quote, columns))
    sides = f"SELECT {listed}, 1 AS TIR_N FROM {new} UNION ALL SELECT {listed}, -1 AS TIR_N FROM {old}"
    return f"SELECT {', '.join(map(quote, key))} FROM ({sides}) AS u GROUP BY {names} HAVING SUM(TIR_N) <> 0"


def _refers(columns: Sequence[str], key: Sequence[Column], keys: str) -> str:
    """A condition for rows, called r, whose columns hold one of the keys: NULL never joins."""
    same = " AND ".join(f"d.{quote(part.name)} = r.{quote(name)}" for name, part in zip(columns, key, strict=True))
    return f"EXISTS (SELECT 1 FROM ({keys}) AS d WHERE {same})"


def numbered(columns: Iterable[Column]) -> dict[str, str]:
    """Columns for GROUP BY under names of their own; objects and arrays by their text."""
    names = [
        quote(column.name) if column.kind is not Kind.JSON else f"TO_JSON({quote(column.name)})" for column in columns
    ]
    return {f"TIR_{at}": name for at, name in enumerate(names)}


def _names(columns: Iterable[Column]) -> str:
    return ", ".join(quote(column.name) for column in columns)


def select_list(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{sql} AS {quote(name)}" for name, sql in columns.items())
