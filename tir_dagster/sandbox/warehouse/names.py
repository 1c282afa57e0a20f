"""Names of tables: how a reference in a statement becomes database, schema and table, and how names are quoted."""

from __future__ import annotations

import re
from dataclasses import dataclass

import sqlglot
from sqlglot import exp

from tir_dagster.sandbox.warehouse.errors import SnowflakeError

# sqlglot reads ?:: as one operator. Quoted text is matched first, so that it stays as it is.
_BOUND_CAST = re.compile(r"""'(?:[^'\\]|''|\\.)*'|"[^"]*"|\$\$.*?\$\$|\?(?=::)""", re.DOTALL)


# What Snowpark sends, and Snowflake takes: objects that end with their session at the latest, and a clause after the name.
_SCOPED = re.compile(r"\A(\s*CREATE\s+(?:OR\s+REPLACE\s+)?)SCOPED\s+(?=TEMP)", re.IGNORECASE)
_LATE_CLAUSE = re.compile(
    r"""\A(\s*CREATE\s+[\w\s]*?\bTABLE)\s+((?:"(?:[^"]|"")+"|[\w$.])+)\s+IF\s+NOT\s+EXISTS(?=\s*\()""", re.IGNORECASE
)


@dataclass(frozen=True)
class TableName:
    """A table by its full name, in the case the catalog stores it in."""

    database: str
    schema: str
    name: str

    def __str__(self) -> str:
        return f"{self.database}.{self.schema}.{self.name}"

    @property
    def quoted(self) -> str:
        return ".".join(quote(part) for part in (self.database, self.schema, self.name))


def quote(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def folded(identifier: exp.Expr | None) -> str:
    """An identifier as Snowflake stores it: upper case unless it was quoted."""
    if identifier is None:
        return ""
    quoted = isinstance(identifier, exp.Identifier) and bool(identifier.args.get("quoted"))
    return identifier.name if quoted else identifier.name.upper()


def table_name(table: exp.Table, database: str | None, schema: str | None) -> TableName:
    """The table a reference means, with the session's database and schema where it leaves them out."""
    if isinstance(table.this, exp.DynamicIdentifier) and isinstance(table.this.this, exp.Literal):
        return parse_name(table.this.this.name, database, schema)
    full = TableName(
        folded(table.args.get("catalog")) or database or "",
        folded(table.args.get("db")) or schema or "",
        folded(table.this),
    )
    if not full.database:
        raise SnowflakeError(90105, "22000", _no_current("database", "DATABASE"))
    if not full.schema:
        raise SnowflakeError(90106, "22000", _no_current("schema", "SCHEMA"))
    return full


def point_to(table: exp.Table, parts: tuple[str, str, str]) -> None:
    """Let a reference mean this catalog, schema and table of DuckDB."""
    for key, part in zip(("catalog", "db", "this"), parts, strict=True):
        table.set(key, exp.to_identifier(part, quoted=True))


def temporary_name(name: TableName) -> str:
    """What a session's temporary table is called in DuckDB's own temporary schema, which has no databases."""
    return str(name)


def parse_name(text: str, database: str | None, schema: str | None) -> TableName:
    """The table named in a string, as in SYSTEM$LAST_CHANGE_COMMIT_TIME('db.schema.table')."""
    return table_name(exp.to_table(text, dialect="snowflake"), database, schema)


def parse(sql: str) -> exp.Expr:
    """The statement's tree; two statements in one request are refused as Snowflake refuses them."""
    if "?::" in sql:
        sql = _BOUND_CAST.sub(lambda found: "? " if found[0] == "?" else found[0], sql)
    sql = _LATE_CLAUSE.sub(r"\1 IF NOT EXISTS \2", _SCOPED.sub(r"\1", sql, count=1), count=1)
    tree = sqlglot.parse_one(sql, read="snowflake")
    if isinstance(tree, exp.Block) and len(tree.expressions) > 1:
        count = len(tree.expressions)
        raise SnowflakeError(8, "0A000", f"Actual statement count {count} did not match the desired statement count 1.")
    return tree.expressions[0] if isinstance(tree, exp.Block) and tree.expressions else tree


def _no_current(what: str, keyword: str) -> str:
    return (
        f"Cannot perform operation. This session does not have a current {what}. "
        f"Call 'USE {keyword}', or use a qualified name."
    )
