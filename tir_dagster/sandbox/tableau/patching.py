"""Carry out a batch of changes on a live-to-Hyper datasource: on a copy of its Hyper file, in one transaction."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tableauhyperapi import HyperException, SchemaName, TableName

from tir_dagster.sandbox.tableau.archive import BadPackageError, Package
from tir_dagster.sandbox.tableau.batches import (
    COMPARISONS,
    Action,
    BatchError,
    Column,
    Condition,
    Constant,
    Junction,
    read_actions,
)
from tir_dagster.sandbox.tableau.content import open_current
from tir_dagster.sandbox.tableau.document import Document
from tir_dagster.sandbox.tableau.extracts import Hyper, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tir_dagster.sandbox.tableau.server import Server
    from tir_dagster.sandbox.tableau.store import Row

_TARGET, _PAYLOAD = "target", "payload"


@dataclass(frozen=True)
class Torn:
    """A batch that is to stop in the middle: after so many actions, and half the payload rows of the next one."""

    actions: int
    half: bool


@dataclass(frozen=True)
class Patched:
    """A finished package in a scratch folder, and the generation of the datasource it was made from."""

    path: Path
    generation: int
    note: str


def check_live_to_hyper(server: Server, datasource_id: str) -> None:
    """BatchError for a datasource whose data cannot be changed in place."""
    with open_current(server, datasource_id) as (revision, file):
        _live_package(server, revision, file)


def _live_package(server: Server, revision: Row, file: IO[bytes]) -> tuple[Package, str]:
    """The package, and the member of it that is the data."""
    if revision["file"].endswith(".tdsx"):
        package = Package(file, max_bytes=server.max_bytes)
        document = Document(package.document())
        member = package.member_at(document.extract_member)
        if document.is_live_to_hyper and member is not None:
            return package, member
    raise BatchError(f"The data source {revision['name']!r} has no live-to-Hyper connection.")


@contextlib.contextmanager
def patched_package(
    server: Server,
    datasource_id: str,
    actions: Any,
    payload: Path | None,
    *,
    torn: Torn | None = None,
    check: Callable[[], None],
) -> Iterator[Patched]:
    """The changed package; its scratch files are gone afterwards. BatchError says why there is none."""
    steps = read_actions(actions)
    try:
        with (
            tempfile.TemporaryDirectory(dir=server.scratch, prefix="patch.") as folder,
            open_current(server, datasource_id) as (revision, file),
        ):
            package, member = _live_package(server, revision, file)
            extract, target = Path(folder) / "extract.hyper", Path(folder) / "patched.tdsx"
            package.extract_to(member, extract)
            note = apply_batch(server.hyper, extract, payload, steps, torn)
            check()
            package.rewrite(target, {member: extract})
            yield Patched(target, revision["generation"], note)
    except BadPackageError as error:
        raise BatchError(str(error)) from error
    except HyperException as error:
        raise BatchError(f"The data could not be changed: {error.main_message}") from error


def apply_batch(
    hyper: Hyper, extract: Path, payload: Path | None, steps: Sequence[Action], torn: Torn | None = None
) -> str:
    """Change the Hyper file, and say what was done; after an error it is as it was."""
    databases = {_TARGET: extract} | ({_PAYLOAD: payload} if payload is not None else {})
    with hyper.attached(databases) as connection:
        work = _Work(connection, has_payload=payload is not None)
        done = work.run(steps if torn is None else steps[: torn.actions + torn.half], torn)
    return "; ".join(done) or "Nothing was changed"


@dataclass(frozen=True)
class _Table:
    """A table of one of the two databases, and its columns' types by name."""

    sql: str
    title: str
    types: dict[str, Any]


@dataclass(frozen=True)
class _Step:
    """An action whose tables are found and fit each other."""

    number: int
    kind: str
    target: _Table
    source: _Table | None
    where: str
    # An empty temporary table with the source's columns, for the rows an upsert inserts.
    fresh: str = ""


@dataclass
class _Work:
    """One batch on one connection."""

    connection: Any
    has_payload: bool
    _temporary: int = field(default=0)

    def run(self, actions: Sequence[Action], torn: Torn | None) -> list[str]:
        # Hyper allows no DDL between the changes of a transaction: temporary tables come first.
        steps = [
            self._prepare(number, action, half=torn is not None and torn.half and number > torn.actions)
            for number, action in enumerate(actions, 1)
        ]
        # One transaction for all tables: a reader never sees a change of one without those of the others.
        self.execute("BEGIN TRANSACTION")
        try:
            done = [self._carry_out(step) for step in steps if step is not None]
        except BaseException:
            # Closing alone would leave the file locked for a moment.
            self.execute("ROLLBACK")
            raise
        self.execute("COMMIT")
        if len({step.target.sql for step in steps if step is not None}) < 2:
            return done
        return [f"{step.target.title}: {what}" for step, what in zip(filter(None, steps), done, strict=True)]

    def _carry_out(self, step: _Step) -> str:
        try:
            return _STEPS[step.kind](self, step)
        except BatchError as error:
            raise BatchError(f"Action {step.number} ({step.kind}) failed: {error}") from error
        except HyperException as error:
            what = f"{step.target.title} could not be changed: {error.main_message}"
            raise BatchError(f"Action {step.number} ({step.kind}) failed: {what}") from error

    def execute(self, sql: str) -> int:
        return self.connection.execute_command(sql) or 0

    def _prepare(self, number: int, action: Action, *, half: bool) -> _Step | None:
        if half and action.source is None:
            return None
        try:
            target = self._find(_TARGET, *action.target)
            source = self._find(_PAYLOAD, *action.source) if action.source is not None else None
            where = _where(action.condition, target, source) if action.condition is not None else ""
            if source is not None:
                _check_columns(action, target, source)
        except BatchError as error:
            raise BatchError(f"Action {number} ({action.kind}) failed: {error}") from error
        if half and source is not None:
            source = self._half(source)
        fresh = self._copy(source, "WITH NO DATA") if action.kind == "upsert" and source is not None else ""
        return _Step(number, action.kind, target, source, where, fresh)

    def _half(self, source: _Table) -> _Table:
        rows = self.connection.execute_scalar_query(f"SELECT COUNT(*) FROM {source.sql}")
        half = _Table(f"(SELECT * FROM {source.sql} LIMIT {rows // 2})", source.title, source.types)
        return _Table(self._copy(half, ""), source.title, source.types)

    def _copy(self, source: _Table, tail: str) -> str:
        self._temporary += 1
        name = quoted(f"temporary {self._temporary}")
        self.execute(f'CREATE TEMPORARY TABLE {name} AS (SELECT * FROM {source.sql} AS "source") {tail}')
        return name

    def _find(self, database: str, schema: str | None, name: str) -> _Table:
        side = "source" if database == _PAYLOAD else "target"
        if side == "source" and not self.has_payload:
            raise BatchError("it reads a source-table, but the request has no payload; give an uploadSessionId.")
        catalog = self.connection.catalog
        known = [entry.name.unescaped for entry in catalog.get_schema_names(database)]
        found = [
            TableName(database, entry, name)
            for entry in ([schema] if schema is not None else known)
            if entry in known
            and TableName(database, entry, name) in catalog.get_table_names(SchemaName(database, entry))
        ]
        title = name if schema is None else f"{schema}.{name}"
        if not found:
            raise BatchError(
                f"There was a problem retrieving table information for the {side} table."
                f" Specified table does not exist: {title}. (errorCode=410012)"
            )
        if len(found) > 1:
            raise BatchError(f"Several schemas have a table {name}; give the {side}-schema.")
        columns = catalog.get_table_definition(found[0]).columns
        return _Table(str(found[0]), title, {column.name.unescaped: column.type for column in columns})

    # The kinds of steps. Each says what it did.

    def insert(self, step: _Step) -> str:
        return f"{self._insert(step.target, step.source, _of(step).sql)} rows inserted"

    def _insert(self, target: _Table, source: _Table | None, rows: str) -> int:
        names = ", ".join(quoted(name) for name in (source.types if source is not None else ()) if name in target.types)
        return self.execute(f'INSERT INTO {target.sql} ({names}) SELECT {names} FROM {rows} AS "source"')

    def replace(self, step: _Step) -> str:
        self.execute(f"DELETE FROM {step.target.sql}")
        return f"{self._insert(step.target, step.source, _of(step).sql)} rows put in the place of all"

    def delete(self, step: _Step) -> str:
        where = (
            step.where if step.source is None else f"EXISTS (SELECT 1 FROM {_sides(step, 'source')} WHERE {step.where})"
        )
        return f"{self.execute(f'DELETE FROM {_sides(step, _TARGET)} WHERE {where}')} rows deleted"

    def update(self, step: _Step) -> str:
        self._must_be_unambiguous(step)
        changes = ", ".join(
            f'{quoted(name)} = "source".{quoted(name)}' for name in _of(step).types if name in step.target.types
        )
        if not changes:
            raise BatchError(f"{_of(step).title} has no column of {step.target.title} to update.")
        sql = f"UPDATE {_sides(step, _TARGET)} SET {changes} FROM {_sides(step, 'source')} WHERE {step.where}"
        return f"{self.execute(sql)} rows updated"

    def upsert(self, step: _Step) -> str:
        match = f"SELECT 1 FROM {_sides(step, _TARGET)} WHERE {step.where}"
        # Kept aside first: the update may change what the condition looks at.
        self.execute(
            f'INSERT INTO {step.fresh} SELECT "source".* FROM {_sides(step, "source")} WHERE NOT EXISTS ({match})'
        )
        updated = self.update(step)
        return f"{updated}, {self._insert(step.target, step.source, step.fresh)} rows inserted"

    def _must_be_unambiguous(self, step: _Step) -> None:
        """Two payload rows for one row leave open which of them wins."""
        target, source = _sides(step, _TARGET), _sides(step, "source")
        ask = self.connection.execute_scalar_query
        pairs = ask(f"SELECT COUNT(*) FROM {target}, {source} WHERE {step.where}")
        rows = ask(f"SELECT COUNT(*) FROM {target} WHERE EXISTS (SELECT 1 FROM {source} WHERE {step.where})")
        if pairs != rows:
            raise BatchError(f"Several rows of {_of(step).title} match one row of {step.target.title}.")


_STEPS: dict[str, Callable[[_Work, _Step], str]] = {
    "insert": _Work.insert,
    "update": _Work.update,
    "upsert": _Work.upsert,
    "delete": _Work.delete,
    "replace": _Work.replace,
}


def _of(step: _Step) -> _Table:
    assert step.source is not None, "an action without a payload was let through"
    return step.source


def _sides(step: _Step, side: str) -> str:
    table = step.target if side == _TARGET else _of(step)
    return f"{table.sql} AS {quoted(side)}"


def _where(condition: Condition, target: _Table, source: _Table | None) -> str:
    if isinstance(condition, Junction):
        parts = [f"({_where(part, target, source)})" for part in condition.parts]
        return f" {condition.op.upper()} ".join(parts)
    tables = {_TARGET: target} | ({"source": source} if source is not None else {})
    types = [_column_type(column, tables[column.side]) for column in condition.columns()]
    if len(types) == 2:
        names = " and ".join(f"{column.side}-col {column.name!r}" for column in condition.columns())
        _must_match(names, *types)
    return f"{_operand(condition.left)} {COMPARISONS[condition.op]} {_operand(condition.right)}"


def _operand(side: Column | Constant) -> str:
    return side.sql if isinstance(side, Constant) else quoted(side.side, side.name)


def _column_type(column: Column, table: _Table) -> Any:
    if column.name not in table.types:
        raise BatchError(f"The {column.side} table {table.title} has no column {column.name!r}.")
    return table.types[column.name]


def _must_match(what: str, one: Any, other: Any) -> None:
    if any(getattr(one, part) != getattr(other, part) for part in ("tag", "precision", "scale", "max_length")):
        raise BatchError(f"The types of {what} do not match: {other} is not {one}.")


def _check_columns(action: Action, target: _Table, source: _Table) -> None:
    """Every column of the payload must be of use, under the target's type."""
    used = (
        {column.name for column in action.condition.columns() if column.side == "source"} if action.condition else set()
    )
    allowed = used if action.kind == "delete" else used | set(target.types)
    if odd := [name for name in source.types if name not in allowed]:
        why = "are not named by the condition" if action.kind == "delete" else f"are not in {target.title}"
        raise BatchError(f"Columns {odd} of the source table {source.title} {why}.")
    if action.kind == "replace" and (missing := [name for name in target.types if name not in source.types]):
        raise BatchError(f"The source table {source.title} lacks columns {missing} of {target.title}.")
    for name, kind in source.types.items() if action.kind != "delete" else ():
        if name in target.types:
            _must_match(f"column {name!r}", target.types[name], kind)
