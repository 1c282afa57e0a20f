"""Resolves the names in a query: the table of each column, the columns that * stands for, date parts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlglot import exp

from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.query.limits import DATE_PARTS, TAKES_PART, TAKES_PART_OR_DIGITS
from tir_dagster.snowflake.query.model import ColumnRead
from tir_dagster.snowflake.query.text import NotTakenApart, Query, ViewError, column_span, expression_span, folded

# In the meta of a word: the column that it may mean instead.
MAY_READ = "may_read"


@dataclass(frozen=True)
class SourceTable:
    """One of the tables that a SELECT reads, under its alias."""

    alias: str
    table: TableName
    columns: tuple[str, ...]
    renamed: bool


@dataclass(frozen=True)
class Meaning:
    """A resolved expression: each column in it stands with its table, in quotes; all else is the user's own text."""

    tree: exp.Expr
    sql: str


@dataclass
class NameScope:
    """The tables that names can refer to; it grows from join to join, as in SQL."""

    query: Query
    sources: dict[str, SourceTable] = field(default_factory=dict)
    # A column of USING stands for its left side; the joined tables' own columns of that name hide behind it.
    merged: dict[str, set[str]] = field(default_factory=dict)

    def add(self, node: exp.Table, table_columns: Mapping[TableName, Sequence[str]]) -> SourceTable:
        table = TableName(*(folded(node.args[part]) for part in ("catalog", "db", "this")))
        alias = folded(node.args["alias"].this) if node.args.get("alias") else table.name
        if alias in self.sources:
            raise self.query.error(node, f"two tables are called {alias}. Give each an alias of its own.")
        source = SourceTable(alias, table, tuple(table_columns[table]), renamed=bool(node.args.get("alias")))
        self.sources[alias] = source
        return source

    def owners(self, name: str) -> list[str]:
        """The aliases of the tables that an unqualified column can belong to."""
        hidden = self.merged.get(name, set())
        return [alias for alias, source in self.sources.items() if name in source.columns and alias not in hidden]

    def star(self, node: exp.Expr) -> list[tuple[str, exp.Expr]]:
        """The columns that * or alias.* stands for, with EXCLUDE and RENAME."""
        star = node.this if isinstance(node, exp.Column) else node
        sources = [self._source(node)] if isinstance(node, exp.Column) else list(self.sources.values())
        left_out = {_bare(name) for name in _listed(star, "except_")}
        renamed = {_bare(pair.this): _bare(pair.args["alias"]) for pair in _listed(star, "rename")}
        if "" in renamed.values():
            raise self.query.error(star, "RENAME lacks a new name. Write RENAME (old AS new).")
        column_names = {name for source in sources for name in source.columns}
        if unknown := sorted((left_out | set(renamed)) - column_names):
            raise self.query.error(star, f"EXCLUDE or RENAME names {unknown[0]}, which no table has. Correct the name.")
        reads = [
            (source.alias, name)
            for source in sources
            for name in source.columns
            if name not in left_out and (len(sources) == 1 or source.alias not in self.merged.get(name, set()))
        ]
        return [(renamed.get(name, name), _column(alias, name, star)) for alias, name in reads]

    def resolve(self, node: exp.Expr, outputs: Mapping[str, exp.Expr] | None = None) -> Meaning:
        """What an expression of the query means; the name of an output stands for its expression."""
        return self._resolved(node, outputs or {}, frozenset())

    def _resolved(self, node: exp.Expr, outputs: Mapping[str, exp.Expr], inside: frozenset[str]) -> Meaning:
        span = expression_span(node)
        if span is None and isinstance(node, exp.Column):
            # One that * or USING stands for, or a part of an expression.
            return self._meaning(node, outputs, inside)
        assert span is not None, node
        holder = exp.Paren(this=node.copy())
        self._mark_date_parts(holder)
        sql, (at, end) = "", span
        for column in sorted(holder.find_all(exp.Column), key=column_span):
            meaning = self._meaning(column, outputs, inside)
            start, after = column_span(column)
            sql, at = f"{sql}{self.query.text[at:start]}{meaning.sql}", after
            column.replace(meaning.tree)
        tree: exp.Expr = holder.this
        return Meaning(tree.pop(), sql + self.query.text[at:end])

    def _meaning(self, column: exp.Column, outputs: Mapping[str, exp.Expr], inside: frozenset[str]) -> Meaning:
        name = folded(column.this)
        if column.args.get("table"):
            source = self._source(column)
            if name not in source.columns:
                raise self._unknown(column, name, [source])
            return column_meaning(_column(source.alias, name, column))
        owners = self.owners(name)
        if len(owners) > 1:
            raise self.query.error(
                column,
                f"{name} is ambiguous: it is a column of {' and '.join(owners)}. Write {owners[0]}.{name} or the like.",
            )
        # Where a column and an output have one name, Snowflake takes the column.
        if owners:
            return column_meaning(_column(owners[0], name, column))
        if name in outputs and name not in inside:
            return _in_brackets(self._resolved(outputs[name], outputs, inside | {name}))
        raise self._unknown(column, name, list(self.sources.values()))

    def _source(self, column: exp.Column) -> SourceTable:
        """The table that qualifies a column: by its alias, or by its name if it has no alias."""
        parts = tuple(folded(column.args[part]) for part in ("catalog", "db", "table") if column.args.get(part))
        for source in self.sources.values():
            full = (source.table.database, source.table.schema, source.table.name)
            if parts == (source.alias,) or (not source.renamed and len(parts) > 1 and parts == full[-len(parts) :]):
                return source
        raise self.query.error(
            column,
            f"{'.'.join(parts)} is no table that can be used at this place. Use one of {', '.join(self.sources)}.",
        )

    def _unknown(self, column: exp.Column, name: str, sources: Iterable[SourceTable]) -> ViewError:
        column_names = [name for source in sources for name in source.columns]
        other_case = [column_name for column_name in column_names if column_name.upper() == name.upper()]
        close = difflib.get_close_matches(name, column_names, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"There are {', '.join(column_names)}."
        if other_case:
            hint = f"There is one with other capitals: write {quote(other_case[0])}, in double quotes."
        where = " and ".join(str(source.table) for source in sources)
        return self.query.error(column, f"{where} has no column {name}. {hint}")

    def _mark_date_parts(self, tree: exp.Expr) -> None:
        """Day in DATEADD(day, …) is a word of the language, not a column: it stays as it is written."""
        for call in tree.find_all(exp.Anonymous):
            at = TAKES_PART.get(call.name.upper())
            if at is None or len(call.expressions) <= at:
                continue
            part = call.expressions[at]
            bare = isinstance(part, exp.Column) and not part.args.get("table") and not part.this.args.get("quoted")
            if bare and part.name.upper() in DATE_PARTS:
                word = exp.Var(this=part.name)
                if call.name.upper() in TAKES_PART_OR_DIGITS:
                    word.meta[MAY_READ] = self._possible_column(part.name.upper())
                part.replace(word)

    def _possible_column(self, name: str) -> tuple[ColumnRead, ...]:
        """The column that a word may mean instead of a date part: the warehouse decides by the other argument's type."""
        owners = [alias for alias, source in self.sources.items() if name in source.columns]
        if len(owners) > 1:
            raise NotTakenApart(f"{name} may be a date part or a column of {' and '.join(owners)}")
        return tuple((alias, name) for alias in owners)


def reads(node: exp.Expr) -> tuple[ColumnRead, ...]:
    """The columns that a resolved expression reads or may read, each once."""
    columns: list[ColumnRead] = []
    for part in node.walk():
        columns += [(part.table, part.name)] if isinstance(part, exp.Column) else part.meta.get(MAY_READ, ())
    return tuple(dict.fromkeys(columns))


def column_meaning(column: exp.Column) -> Meaning:
    """A column that already stands with its table, both in quotes."""
    return Meaning(column, f"{quote(column.table)}.{quote(column.name)}")


def column_of(alias: str, name: str) -> exp.Column:
    """A column with its table, both in quotes."""
    return exp.Column(this=exp.to_identifier(name, quoted=True), table=exp.to_identifier(alias, quoted=True))


def _column(alias: str, name: str, place: exp.Expr) -> exp.Column:
    """A resolved column that still knows where it stood in the text."""
    column = column_of(alias, name)
    origin = place.this if isinstance(place, exp.Column) else place
    column.this.meta.update(origin.meta)
    return column


def _bare(name: exp.Expr | str) -> str:
    """A name in a list; sqlglot leaves an empty text where one is missing."""
    if isinstance(name, str):
        return name
    return folded(name.this if isinstance(name, exp.Column) else name)


def _listed(star: exp.Expr, key: str) -> list[exp.Expr]:
    return list(star.args.get(key) or ())


def _in_brackets(meaning: Meaning) -> Meaning:
    if isinstance(meaning.tree, (exp.Column, exp.Anonymous, exp.Literal, exp.Paren)):
        return meaning
    return Meaning(exp.Paren(this=meaning.tree), f"({meaning.sql})")
