"""Parquet files in a stage, as write_pandas uses them: INFER_SCHEMA, and COPY of `SELECT $1:"A"::TYPE, …` that removes them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fakesnow.params import pop_qmark_param
from sqlglot import exp

from tir_dagster.sandbox.warehouse import stages
from tir_dagster.sandbox.warehouse.errors import SnowflakeError, missing_object, purged_copy, unsupported
from tir_dagster.sandbox.warehouse.names import folded, literal, quote, table_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tir_dagster.sandbox.warehouse.limits import Limits
    from tir_dagster.sandbox.warehouse.session import Session

_INFERRED = ("COLUMN_NAME", "TYPE", "NULLABLE", "EXPRESSION", "FILENAMES", "ORDER_ID")
_WHOLE_NUMBER = re.compile(r"U?(TINY|SMALL|BIG|HUGE)?INT|U?INTEGER")
_DECIMAL = re.compile(r"DECIMAL\((\d+),\s*(\d+)\)")
_TYPES = {
    "DOUBLE": "REAL",
    "FLOAT": "REAL",
    "VARCHAR": "TEXT",
    "BOOLEAN": "BOOLEAN",
    "DATE": "DATE",
    "TIME": "TIME",
    "BLOB": "BINARY",
    "TIMESTAMP WITH TIME ZONE": "TIMESTAMP_LTZ",
}
# Without their logical type timestamps are the whole numbers in which Parquet holds them.
_EPOCHS = {"TIMESTAMP_NS": "epoch_ns", "TIMESTAMP": "epoch_us", "TIMESTAMP_MS": "epoch_ms"}
_FORMAT_OPTIONS = {"TYPE", "COMPRESSION", "USE_VECTORIZED_SCANNER", "BINARY_AS_TEXT", "USE_LOGICAL_TYPE"}


@dataclass(frozen=True)
class Selection:
    """A COPY that selects fields of the staged files for columns of its table, in their order."""

    staged: stages.StagedFolder
    files: list[Path]
    columns: list[str]
    fields: list[str]
    uses_logical_types: bool


def infer(session: Session, tree: exp.Expr, params: Any) -> None:
    """Replace every TABLE(INFER_SCHEMA(…)) of the statement by the columns of the staged files, in place."""
    for call in [call for call in tree.find_all(exp.Anonymous) if call.name.upper() == "INFER_SCHEMA"]:
        arguments = {}
        for argument in call.expressions:
            if not isinstance(argument, exp.Kwarg):
                raise SnowflakeError(1, "42000", "SQL compilation error:\nINFER_SCHEMA takes arguments by their names.")
            if isinstance(argument.expression, exp.Placeholder):
                bound = pop_qmark_param(params, tree, argument.expression)
                argument.set("expression", exp.Literal.string(str(bound)))
            arguments[argument.this.name.upper()] = argument.expression.name
        if unknown := arguments.keys() - {"LOCATION", "FILE_FORMAT"}:
            raise unsupported(f"INFER_SCHEMA with {', '.join(sorted(unknown))}")
        if len(arguments) < 2:
            raise SnowflakeError(1, "42000", "SQL compilation error:\nINFER_SCHEMA needs LOCATION and FILE_FORMAT.")
        options = _file_format(session, arguments["FILE_FORMAT"])
        if options["TYPE"] != "PARQUET":
            raise unsupported(f"INFER_SCHEMA of {options['TYPE']}")
        staged = stages.location(session, arguments["LOCATION"])
        rows = _inferred(session, staged, uses_logical_types=bool(options.get("USE_LOGICAL_TYPE")))
        table = call.parent if isinstance(call.parent, exp.TableFromRows) else None
        if table is None:
            raise SnowflakeError(1, "42000", "SQL compilation error:\nINFER_SCHEMA is a table function.")
        table.replace(_as_table(rows, table.args.get("alias")))


def _file_format(session: Session, name: str) -> dict[str, Any]:
    full = table_name(exp.to_table(name, dialect="snowflake"), session.database, session.schema)
    stored = session.duck.execute(
        "SELECT options FROM _fs_global._fs_information_schema._fs_file_formats "
        "WHERE database_name = ? AND schema_name = ? AND name = ?",
        [full.database, full.schema, full.name],
    ).fetchone()
    if stored is None:
        raise missing_object("File format", full)
    return dict(json.loads(stored[0]))


def _inferred(session: Session, staged: stages.StagedFolder, *, uses_logical_types: bool) -> list[list[str]]:
    """A line for each column of any of the files, with the files that have it."""
    lines: dict[str, list[str]] = {}
    for file in stages.files(staged):
        for name, kind in _fields(session, file).items():
            shown = _snowflake_type(name, kind, uses_logical_types=uses_logical_types)
            path = str(file.relative_to(staged.root))
            if name not in lines:
                lines[name] = [name, shown, "true", f"$1:{name}::{shown}", path, str(len(lines))]
            elif lines[name][1] != shown:
                raise unsupported(f"INFER_SCHEMA of files in which {name} has different types")
            else:
                lines[name][4] += f", {path}"
    return list(lines.values())


def _fields(session: Session, file: Path) -> dict[str, str]:
    described = session.duck.execute(f"DESCRIBE SELECT * FROM read_parquet({literal(str(file))})").fetchall()
    return {row[0]: row[1] for row in described}


def _snowflake_type(name: str, kind: str, *, uses_logical_types: bool) -> str:
    if found := _DECIMAL.fullmatch(kind):
        return f"NUMBER({found[1]}, {found[2]})"
    if _WHOLE_NUMBER.fullmatch(kind):
        return "NUMBER(38, 0)"
    if kind.endswith("]") or kind.startswith(("STRUCT", "MAP")):
        return "VARIANT"
    if kind in _EPOCHS:
        return "TIMESTAMP_NTZ" if uses_logical_types else "NUMBER(38, 0)"
    if kind not in _TYPES or (kind == "TIMESTAMP WITH TIME ZONE" and not uses_logical_types):
        raise unsupported(f"{kind} of column {name} in Parquet without USE_LOGICAL_TYPE")
    return _TYPES[kind]


def _as_table(rows: list[list[str]], alias: exp.Expr | None) -> exp.Expr:
    if not rows:
        query = exp.select(*(exp.alias_(exp.Literal.string(""), name) for name in _INFERRED)).where(exp.false())
    else:
        lines = [
            exp.select(*(exp.alias_(_literal(name, value), name) for name, value in zip(_INFERRED, row, strict=True)))
            for row in rows
        ]
        query = exp.union(*lines, distinct=False) if len(lines) > 1 else lines[0]  # type: ignore[assignment]
    return query.subquery(alias.name if alias is not None else "inferred")


def _literal(name: str, value: str) -> exp.Expr:
    if name == "NULLABLE":
        return exp.true()
    return exp.Literal.number(value) if name == "ORDER_ID" else exp.Literal.string(value)


def selection(session: Session, tree: exp.Expr, params: Any) -> Selection | None:
    """What a COPY selects from Parquet files that it removes afterwards; None if it is another kind of COPY."""
    query = tree.args["files"][0].unnest() if isinstance(tree, exp.Copy) else None
    source = query.args.get("from_") if isinstance(query, exp.Select) else None
    stage = source.this.this if source is not None and isinstance(source.this, exp.Table) else None
    options = {option.name.upper(): option for option in tree.args.get("params") or []}
    listed = options["FILE_FORMAT"].expressions if "FILE_FORMAT" in options else []
    format_options = {entry.name.upper(): entry.args["value"] for entry in listed}
    if (
        query is None
        or not isinstance(stage, (exp.Literal, exp.Var))
        or not isinstance(tree.this, exp.Schema)
        or format_options.keys() - _FORMAT_OPTIONS
        or format_options.get("TYPE", exp.null()).name.upper() != "PARQUET"
        or options.keys() != {"FILE_FORMAT", "PURGE", "ON_ERROR"}
        or not _is_true(options["PURGE"].expression)
        or _on_error(options["ON_ERROR"].expression, params) != "ABORT_STATEMENT"
    ):
        return None
    fields = [_field(each) for each in query.expressions]
    if None in fields or len(fields) != len(tree.this.expressions):
        return None
    staged = stages.location(session, stage.name)
    return Selection(
        staged,
        stages.files(staged),
        [folded(column) for column in tree.this.expressions],
        [str(field) for field in fields],
        _is_true(format_options.get("USE_LOGICAL_TYPE")),
    )


def _is_true(value: exp.Expr | None) -> bool:
    return isinstance(value, exp.Boolean) and bool(value.this)


def _on_error(value: exp.Expr, params: Any) -> str:
    bound = params[-1] if isinstance(value, exp.Placeholder) and params else value.name
    return str(bound).upper()


def _field(value: exp.Expr) -> str | None:
    """The field that `$1:"A"` or `$1:"A"::TYPE` names; its type is in the end that of the table's column."""
    path = value.this if isinstance(value, exp.Cast) else value
    if not (isinstance(path, exp.JSONExtract) and isinstance(path.this, exp.Parameter) and path.this.this.name == "1"):
        return None
    keys = [part.this for part in path.expression.expressions if isinstance(part, exp.JSONPathKey)]
    return str(keys[0]) if len(keys) == 1 and len(path.expression.expressions) == 2 else None


def copy(session: Session, chosen: Selection, target: str, sizes: Limits) -> list[list[str | None]]:
    """Copy the selected fields of every file into the table; the report, a line for each file."""
    columns = {row[0]: row[1] for row in session.duck.execute(f"DESCRIBE {target}").fetchall()}
    if missing := [name for name in chosen.columns if name not in columns]:
        raise SnowflakeError(904, "42000", f"SQL compilation error:\ninvalid identifier '{missing[0]}'")
    names = ", ".join(quote(name) for name in chosen.columns)
    report: list[list[str | None]] = []
    for file in chosen.files:
        session.check_cancelled()
        if not file.exists():
            raise purged_copy()
        fields = _fields(session, file)
        casts = {
            name: f"CAST({_value(field, fields.get(field), chosen)} AS {columns[name]})"
            for name, field in zip(chosen.columns, chosen.fields, strict=True)
        }
        values = ", ".join(sizes[name].sql(cast) if name in sizes else cast for name, cast in casts.items())
        (rows,) = session.duck.execute(
            f"INSERT INTO {target} ({names}) SELECT {values} FROM read_parquet({literal(str(file))})"
        ).fetchall()[0]
        shown = f"{chosen.staged.stage}/{file.relative_to(chosen.staged.root)}"
        report.append([shown, "LOADED", str(rows), str(rows), "1", "0", None, None, None, None])
    return report


def _value(field: str, kind: str | None, chosen: Selection) -> str:
    """A field that a file does not have is NULL, as of any semi-structured value."""
    if kind is None:
        return "NULL"
    if kind in _EPOCHS and not chosen.uses_logical_types:
        return f"{_EPOCHS[kind]}({quote(field)})"
    return f"to_json({quote(field)})" if kind.endswith("]") or kind.startswith(("STRUCT", "MAP")) else quote(field)


def purge(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
