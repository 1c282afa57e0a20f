"""The databases on disk: one DuckLake each, when each version was committed, and what is known of every table."""

from __future__ import annotations

import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import duckdb
import duckdb_extensions
import pyarrow as pa
import sqlglot
from fakesnow import info_schema, macros
from fakesnow.transforms import show
from sqlglot import exp

from tir_dagster.sandbox.warehouse import dialect
from tir_dagster.sandbox.warehouse.errors import SnowflakeError, missing_object, object_exists
from tir_dagster.sandbox.warehouse.names import TableName, literal, quote

DAY_US = 86_400_000_000
# Changes of a few rows stay in the catalog instead of becoming a Parquet file each.
INLINE_ROWS = 50
# Versions are kept a little longer than Snowflake's default retention, or as long as a table asks; dropped at start.
KEEP_DAYS = 3

_FACTS = """
CREATE TABLE IF NOT EXISTS commits (db TEXT, snapshot INTEGER, committed_us INTEGER, PRIMARY KEY (db, snapshot));
CREATE TABLE IF NOT EXISTS tables (
    db TEXT, table_id INTEGER, tracked_since_us INTEGER, retention_days REAL NOT NULL DEFAULT 1,
    primary_key TEXT, PRIMARY KEY (db, table_id));
CREATE TABLE IF NOT EXISTS moments (
    db TEXT, table_id INTEGER, created_us INTEGER, altered_us INTEGER, changed_us INTEGER, ddl_us INTEGER,
    PRIMARY KEY (db, table_id));
CREATE TABLE IF NOT EXISTS users (name TEXT PRIMARY KEY, public_key TEXT);
CREATE TABLE IF NOT EXISTS views (
    db TEXT, view_id INTEGER, text TEXT, owner TEXT, is_secure INTEGER NOT NULL DEFAULT 0, tracked_since_us INTEGER,
    PRIMARY KEY (db, view_id));
CREATE TABLE IF NOT EXISTS dynamic_tables (
    db TEXT, table_id INTEGER, text TEXT, query TEXT, target_lag TEXT, warehouse TEXT, refresh_mode TEXT, owner TEXT,
    is_suspended INTEGER, refreshed_us INTEGER, sources TEXT, PRIMARY KEY (db, table_id));
CREATE TABLE IF NOT EXISTS names (kind TEXT, name TEXT, PRIMARY KEY (kind, name));
"""


# DuckLake's names of the types that DuckDB calls otherwise.
_DUCKDB_TYPES = {
    "int8": "TINYINT",
    "int16": "SMALLINT",
    "int32": "INTEGER",
    "int64": "BIGINT",
    "float32": "FLOAT",
    "float64": "DOUBLE",
}


@dataclass(frozen=True)
class Column:
    """A column by the identity that a rename keeps; `filling` is what rows older than the column show."""

    ident: int
    name: str
    filling: str


@dataclass(frozen=True)
class TableFacts:
    """What the catalog knows of one table that exists now."""

    name: TableName
    table_id: int
    created_us: int
    altered_us: int
    changed_us: int
    ddl_us: int
    tracked_since_us: int | None
    retention_days: float
    primary_key: tuple[str, ...]


@dataclass(frozen=True)
class ViewFacts:
    """What the catalog knows of one view that exists now."""

    name: TableName
    view_id: int
    created_us: int
    ddl_us: int
    # The query in DuckDB's dialect, and the names that its columns were given in front of it.
    sql: str
    columns: tuple[str, ...]
    # The statement that created it, as it was written.
    text: str
    owner: str
    is_secure: bool
    tracked_since_us: int | None


@dataclass(frozen=True)
class DynamicFacts:
    """What makes a table a dynamic one: the query of its rows, how it is refreshed, and when that was last done."""

    name: TableName
    text: str
    query: str
    target_lag: str
    warehouse: str
    refresh_mode: str
    owner: str
    is_suspended: bool = False
    # None: not yet.
    refreshed_us: int | None = None
    # When the tables behind it had last changed, as a text to compare.
    sources: str = ""


@dataclass(frozen=True)
class Description:
    """What DESCRIBE said of a table, and of which shape the table was."""

    shape: tuple[int, int]
    columns: list[tuple[str, str]]
    rows: pa.Table | None


class Lake:
    """All databases of one warehouse. Commits go one at a time, so that their order and their times agree."""

    def __init__(self, folder: Path, *, memory_limit: str = "1GB") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tmp").mkdir(exist_ok=True)
        duckdb_extensions.import_extension("ducklake")
        self._duck = duckdb.connect(":memory:")
        self._duck.execute("LOAD ducklake")
        self._duck.execute("SET GLOBAL TimeZone = 'UTC'")
        self._duck.execute(f"SET GLOBAL memory_limit = {literal(memory_limit)}")
        self._duck.execute("SET GLOBAL threads = 2")
        # With NULLs in the order, DuckDB 1.5.5 takes a wrong row for QUALIFY ROW_NUMBER() OVER (…) = 1.
        self._duck.execute("SET GLOBAL disabled_optimizers = 'top_n_window_elimination'")
        self._duck.execute(f"SET GLOBAL temp_directory = {literal(str(folder / 'tmp'))}")
        self._duck.execute(dialect.MACROS)
        # Global objects (stages, file formats, comments) of fakesnow, durable too.
        self._duck.execute(f"ATTACH {literal(str(folder / 'global.duckdb'))} AS _fs_global")
        self._duck.execute(info_schema.fs_global_creation_sql())
        self._duck.execute(show.fs_global_creation_sql())
        self._facts = sqlite3.connect(folder / "facts.sqlite", check_same_thread=False, isolation_level=None)
        self._facts.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;" + _FACTS)
        if "ddl_us" not in {row[1] for row in self._facts.execute("PRAGMA table_info(moments)")}:
            # Written by an earlier version, which noted one moment for DDL and DML.
            self._facts.execute("ALTER TABLE moments ADD COLUMN ddl_us INTEGER")
            self._facts.execute("UPDATE moments SET ddl_us = altered_us")
        self.commit_lock = threading.RLock()
        # The clock may have been set back since the last run; times of commits only grow.
        (self._last_commit_us,) = self._facts.execute("SELECT coalesce(max(committed_us), 0) FROM commits").fetchone()
        self.descriptions: dict[tuple[TableName, str], Description] = {}
        self._row_counts: dict[tuple[str, int], tuple[int, int]] = {}
        # Asked about by every statement, which must not wait for the commits of others to know that there are none.
        known = self._facts.execute("SELECT db, table_id, refreshed_us IS NULL FROM dynamic_tables").fetchall()
        self._with_dynamic = {database for database, _, _ in known}
        self._waiting = {(database, ident) for database, ident, is_waiting in known if is_waiting}
        for path in sorted(folder.glob("*.ducklake")):
            self._attach(path.stem)

    def close(self) -> None:
        with self.commit_lock:
            self._duck.close()
            self._facts.close()

    def connection(self) -> duckdb.DuckDBPyConnection:
        return self._duck.cursor()

    # Databases

    def databases(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.ducklake"))

    def create_database(self, name: str, *, replace: bool = False, exists_ok: bool = False) -> bool:
        with self.commit_lock:
            if name in self.databases():
                if exists_ok:
                    return False
                if not replace:
                    raise object_exists(name)
                self.drop_database(name)
            self._attach(name)
            return True

    def drop_database(self, name: str, *, exists_ok: bool = False) -> None:
        with self.commit_lock:
            if name not in self.databases():
                if exists_ok:
                    return
                raise missing_object("Database", name)
            self._duck.execute(f"DETACH {quote(name)}")
            for path in self.folder.glob(f"{name}.ducklake*"):
                path.unlink()
            shutil.rmtree(self.folder / "data" / name, ignore_errors=True)
            for table in ("commits", "tables", "moments", "views", "dynamic_tables"):
                self._facts.execute(f"DELETE FROM {table} WHERE db = ?", [name])
            self._with_dynamic.discard(name)
            self._waiting = {(database, ident) for database, ident in self._waiting if database != name}

    def _attach(self, name: str) -> None:
        if not name.replace("_", "a").replace("$", "a").isalnum():
            raise SnowflakeError(2, "0A000", f"Unsupported feature: a database named {name!r}.")
        catalog = self.folder / f"{name}.ducklake"
        is_new = not catalog.exists()
        self._duck.execute(
            f"ATTACH {literal(f'ducklake:{catalog}')} AS {quote(name)} "
            f"(DATA_PATH {literal(str(self.folder / 'data' / name))}, DATA_INLINING_ROW_LIMIT {INLINE_ROWS})"
        )
        if is_new:
            self._duck.execute(info_schema.per_db_creation_sql(name))
            self._duck.execute(f"CREATE SCHEMA IF NOT EXISTS {quote(name)}.PUBLIC")
        else:
            self._expire(name)
        self._duck.execute(macros.creation_sql(name))
        self.record_commits(name)

    def _expire(self, name: str) -> None:
        """Drop versions nobody may ask for any more, and files that no version names (a process that was killed)."""
        (days,) = self._facts.execute("SELECT max(retention_days) FROM tables WHERE db = ?", [name]).fetchone()
        # The version of that moment stays, however old it is: it is what a time just after it shows.
        oldest = self.version_at(name, self.now_us() - int(max(KEEP_DAYS, days or 0) * DAY_US))
        expired = self._duck.execute(
            f"SELECT list(snapshot_id) FROM {_metadata(name)}.ducklake_snapshot WHERE snapshot_id < ?", [oldest]
        ).fetchone()
        if expired and expired[0]:
            self._duck.execute(f"CALL ducklake_expire_snapshots({literal(name)}, versions => {expired[0]})")
            self._facts.execute("DELETE FROM commits WHERE db = ? AND snapshot < ?", [name, oldest])
        self._duck.execute(f"CALL ducklake_cleanup_old_files({literal(name)}, cleanup_all => true)")
        self._duck.execute(f"CALL ducklake_delete_orphaned_files({literal(name)}, cleanup_all => true)")

    # Versions

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Hold this around a commit: afterwards the time of every new version is on record."""
        with self.commit_lock:
            yield
            # What is committed stays committed: a time that cannot be noted now (a full disk) is noted later.
            with suppress(sqlite3.Error):
                for name in self.databases():
                    self.record_commits(name)

    def record_commits(self, name: str) -> None:
        """Note when new snapshots were committed: DuckLake itself stamps them with their transaction's *start*."""
        (known,) = self._facts.execute(
            "SELECT coalesce(max(snapshot), -1) FROM commits WHERE db = ?", [name]
        ).fetchone()
        new = self._duck.cursor().execute(
            f"SELECT s.snapshot_id, coalesce(c.changes_made, '') FROM {_metadata(name)}.ducklake_snapshot s "
            f"LEFT JOIN {_metadata(name)}.ducklake_snapshot_changes c USING (snapshot_id) "
            "WHERE s.snapshot_id > ? ORDER BY 1",
            [known],
        )
        for snapshot, changes in new.fetchall():
            self._last_commit_us = max(self.now_us(), self._last_commit_us + 1)
            self._facts.execute("BEGIN")
            self._note_touched(name, snapshot, changes, self._last_commit_us)
            self._facts.execute("INSERT INTO commits VALUES (?, ?, ?)", [name, snapshot, self._last_commit_us])
            self._facts.execute("COMMIT")

    def _note_touched(self, name: str, snapshot: int, changes: str, time_us: int) -> None:
        """Note of each table and view when it came to be, was last altered, changed and defined: versions expire, these stay."""
        # Like: created_table:"PUBLIC"."T",inserted_into_table:2,deleted_from_table:2,altered_table:3
        touched = {(int(ident), what) for what, ident in re.findall(r"(\w+):(\d+)(?=,|$)", changes)}
        begun = self._duck.cursor().execute(
            f"SELECT table_id FROM {_metadata(name)}.ducklake_table WHERE begin_snapshot = $at "
            f"UNION ALL SELECT view_id FROM {_metadata(name)}.ducklake_view WHERE begin_snapshot = $at",
            {"at": snapshot},
        )
        touched |= {(ident, "altered_table") for (ident,) in begun.fetchall()}
        for ident, what in touched:
            self._note_moment(name, ident, time_us, "ddl_us" if what == "altered_table" else "changed_us")

    def _note_moment(self, database: str, ident: int, time_us: int, column: str) -> None:
        self._facts.execute(
            "INSERT INTO moments (db, table_id, created_us, altered_us, changed_us, ddl_us) VALUES (?, ?, ?, ?, ?, ?) "
            f"ON CONFLICT (db, table_id) DO UPDATE SET altered_us = excluded.altered_us, {column} = excluded.altered_us",
            [database, ident, time_us, time_us, time_us, time_us],
        )

    def note_ddl(self, name: TableName) -> None:
        """Note DDL that makes no version: comments and options of a table or view."""
        with self.commit_lock:
            view = self.view(name)
            ident = self.table_id(name) if view is None else view.view_id
            self._note_moment(name.database, ident, self.now_us(), "ddl_us")

    @staticmethod
    def now_us() -> int:
        return time.time_ns() // 1000

    def version_at(self, name: str, time_us: int) -> int:
        """The newest version committed at or before the time; later commits can never fall before it."""
        with self.commit_lock:
            (snapshot,) = self._facts.execute(
                "SELECT max(snapshot) FROM commits WHERE db = ? AND committed_us <= ?", [name, time_us]
            ).fetchone()
        return -1 if snapshot is None else int(snapshot)

    # Tables

    def table_id(self, name: TableName) -> int:
        """The table's identity, which CREATE OR REPLACE changes and RENAME does not; an unknown table is an error."""
        if (shape := self.shape(name)) is None:
            raise missing_object("Object", name)
        return shape[0]

    def shape(self, name: TableName) -> tuple[int, int] | None:
        """The table's identity and the version of its database's schema: while both are the same, so are its columns."""
        found = (
            self._duck.cursor()
            .execute(
                f"SELECT t.table_id, (SELECT max(schema_version) FROM {_metadata(name.database)}.ducklake_snapshot) "
                f"FROM {_metadata(name.database)}.ducklake_table t "
                f"JOIN {_metadata(name.database)}.ducklake_schema s USING (schema_id) "
                "WHERE s.schema_name = ? AND t.table_name = ? AND t.end_snapshot IS NULL AND s.end_snapshot IS NULL",
                [name.schema, name.name],
            )
            .fetchone()
            if name.database in self.databases()
            else None
        )
        return (int(found[0]), int(found[1])) if found else None

    def facts(self, name: TableName) -> TableFacts:
        with self.commit_lock:
            return self._facts_of(name, self.table_id(name))

    def all_facts(self, database: str) -> list[TableFacts]:
        with self.commit_lock:
            rows = (
                self._duck.cursor()
                .execute(
                    f"SELECT s.schema_name, t.table_name, t.table_id FROM {_metadata(database)}.ducklake_table t "
                    f"JOIN {_metadata(database)}.ducklake_schema s USING (schema_id) "
                    "WHERE t.end_snapshot IS NULL AND s.end_snapshot IS NULL "
                    "AND s.schema_name <> '_fs_information_schema' ORDER BY 1, 2"
                )
                .fetchall()
            )
            return [self._facts_of(TableName(database, schema, table), ident) for schema, table, ident in rows]

    def views(self, database: str) -> list[ViewFacts]:
        """The views of a database, without those that fakesnow keeps for itself."""
        with self.commit_lock:
            rows = (
                self._duck.cursor()
                .execute(
                    "SELECT s.schema_name, v.view_name, v.view_id, v.sql, v.column_aliases "
                    f"FROM {_metadata(database)}.ducklake_view v "
                    f"JOIN {_metadata(database)}.ducklake_schema s USING (schema_id) "
                    "WHERE v.end_snapshot IS NULL AND s.end_snapshot IS NULL "
                    "AND s.schema_name NOT IN ('_fs_information_schema', 'main') ORDER BY 1, 2"
                )
                .fetchall()
            )
            known = self._facts.execute("SELECT table_id, created_us, ddl_us FROM moments WHERE db = ?", [database])
            moments = {ident: (created, ddl) for ident, created, ddl in known}
            known = self._facts.execute(
                "SELECT view_id, text, owner, is_secure, tracked_since_us FROM views WHERE db = ?", [database]
            )
            noted = {ident: values for ident, *values in known}
        views = []
        for schema, view, ident, sql, aliases in rows:
            created, ddl = moments.get(ident, (0, 0))
            name = TableName(database, schema, view)
            # DuckLake leaves a place for the name that its catalog is attached by.
            query = sql.replace("{DUCKLAKE_CATALOG}", quote(database))
            # Created by an earlier version, which did not note the statement.
            text, owner, is_secure, tracked = noted.get(ident) or (
                f"CREATE VIEW {name} AS {query}",
                "SYSADMIN",
                0,
                None,
            )
            columns = tuple(csv_names(aliases or ""))
            views.append(ViewFacts(name, ident, created, ddl, query, columns, text, owner, bool(is_secure), tracked))
        return views

    def note_view(self, name: TableName, *, text: str, owner: str, is_secure: bool) -> None:
        """Note how a view was created; it is not tracked until somebody asks for that."""
        if (view := self.view(name)) is not None:
            with self.commit_lock:
                self._facts.execute(
                    "INSERT OR REPLACE INTO views (db, view_id, text, owner, is_secure) VALUES (?, ?, ?, ?, ?)",
                    [name.database, view.view_id, text, owner, is_secure],
                )

    def set_view(self, view: ViewFacts, *, is_secure: bool | None = None, is_tracked: bool | None = None) -> None:
        """Change options of a view. Tracking it tracks the tables and views behind it, too."""
        secure = view.is_secure if is_secure is None else is_secure
        since = view.tracked_since_us
        if is_tracked is not None:
            since = (since or self.now_us()) if is_tracked else None
        with self.commit_lock:
            self._facts.execute(
                "INSERT OR REPLACE INTO views (db, view_id, text, owner, is_secure, tracked_since_us) VALUES (?, ?, ?, ?, ?, ?)",
                [view.name.database, view.view_id, view.text, view.owner, secure, since],
            )
        if is_tracked:
            for _, name in view_tables(view, parse_view(view)):
                if (behind := self.view(name)) is not None:
                    self.set_view(behind, is_tracked=True)
                else:
                    self.set_change_tracking(name, on=True)

    def view(self, name: TableName) -> ViewFacts | None:
        """The view of that name; None where there is none."""
        known = self.views(name.database) if name.database in self.databases() else []
        return next((view for view in known if view.name == name), None)

    def changed_us(self, name: TableName) -> int:
        """When the rows of a table last changed; of a view, those of any table behind it, whatever happens to the view."""
        if (view := self.view(name)) is None:
            return self.facts(name).changed_us
        return max(
            (self.changed_us(table) for _, table in view_tables(view, parse_view(view))), default=view.created_us
        )

    def _facts_of(self, name: TableName, table_id: int) -> TableFacts:
        created, altered, changed, ddl = self._facts.execute(
            "SELECT created_us, altered_us, changed_us, ddl_us FROM moments WHERE db = ? AND table_id = ?",
            [name.database, table_id],
        ).fetchone() or (0, 0, 0, 0)
        row = self._facts.execute(
            "SELECT tracked_since_us, retention_days, primary_key FROM tables WHERE db = ? AND table_id = ?",
            [name.database, table_id],
        ).fetchone() or (None, 1.0, None)
        return TableFacts(
            name=name,
            table_id=table_id,
            created_us=created,
            altered_us=altered,
            changed_us=changed,
            ddl_us=ddl,
            tracked_since_us=row[0],
            retention_days=row[1],
            primary_key=tuple(row[2].split("\0")) if row[2] else (),
        )

    def columns(self, name: TableName, table_id: int, snapshot: int | None = None) -> list[Column]:
        """Columns of the table, now or at a snapshot."""
        rows = (
            self._duck.cursor()
            .execute(
                "SELECT column_id, column_name, column_type, initial_default "
                f"FROM {_metadata(name.database)}.ducklake_column "
                f"WHERE table_id = ? AND parent_column IS NULL AND {_alive(snapshot)} ORDER BY column_order",
                [table_id],
            )
            .fetchall()
        )
        return [Column(ident, column, _filling(kind, default)) for ident, column, kind, default in rows]

    def name_at(self, name: TableName, table_id: int, snapshot: int) -> TableName:
        """What the table was called at a snapshot: DuckLake looks it up by the name it had."""
        found = (
            self._duck.cursor()
            .execute(
                f"SELECT s.schema_name, t.table_name FROM {_metadata(name.database)}.ducklake_table t "
                f"JOIN {_metadata(name.database)}.ducklake_schema s USING (schema_id) "
                f"WHERE t.table_id = ? AND {_alive(snapshot, 't.')} AND {_alive(snapshot, 's.')}",
                [table_id],
            )
            .fetchone()
        )
        return TableName(name.database, *found) if found else name

    def row_count(self, facts: TableFacts) -> int:
        key = (facts.name.database, facts.table_id)
        cached = self._row_counts.get(key)
        if cached is None or cached[0] != facts.changed_us:
            counted = self._duck.cursor().execute(f"SELECT count(*) FROM {facts.name.quoted}").fetchone()
            cached = self._row_counts[key] = (facts.changed_us, int(counted[0]) if counted else 0)
        return cached[1]

    def set_change_tracking(self, name: TableName, *, on: bool, since_created: bool = False) -> None:
        facts = self.facts(name)
        start = facts.created_us if since_created else self.now_us()
        since = (facts.tracked_since_us or start) if on else None
        self._set(facts, "tracked_since_us", since)

    def set_retention(self, name: TableName, days: float) -> None:
        self._set(self.facts(name), "retention_days", days)

    def set_primary_key(self, name: TableName, columns: list[str]) -> None:
        self._set(self.facts(name), "primary_key", "\0".join(columns))

    def _set(self, facts: TableFacts, column: str, value: object) -> None:
        with self.commit_lock:
            self._facts.execute(
                f"INSERT INTO tables (db, table_id, {column}) VALUES (?, ?, ?) "
                f"ON CONFLICT (db, table_id) DO UPDATE SET {column} = excluded.{column}",
                [facts.name.database, facts.table_id, value],
            )

    # Dynamic tables

    def dynamic_tables(self, database: str) -> list[DynamicFacts]:
        """The dynamic tables of a database that exist now."""
        if database not in self._with_dynamic:
            return []
        with self.commit_lock:
            rows = self._facts.execute(
                "SELECT table_id, text, query, target_lag, warehouse, refresh_mode, owner, is_suspended, refreshed_us, sources "
                "FROM dynamic_tables WHERE db = ?",
                [database],
            ).fetchall()
            names = {fact.table_id: fact.name for fact in self.all_facts(database)}
        return [DynamicFacts(names[row[0]], *row[1:]) for row in rows if row[0] in names]

    def dynamic(self, name: TableName) -> DynamicFacts | None:
        """The dynamic table of that name; None where there is none."""
        known = self.dynamic_tables(name.database) if name.database in self.databases() else []
        return next((facts for facts in known if facts.name == name), None)

    def note_dynamic(self, facts: DynamicFacts) -> None:
        """Note what a dynamic table is, or that it was refreshed."""
        ident = self.table_id(facts.name)
        with self.commit_lock:
            self._with_dynamic.add(facts.name.database)
            if facts.refreshed_us is None:
                self._waiting.add((facts.name.database, ident))
            else:
                self._waiting.discard((facts.name.database, ident))
            self._facts.execute(
                "INSERT OR REPLACE INTO dynamic_tables VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    *(facts.name.database, ident, facts.text, facts.query, facts.target_lag, facts.warehouse),
                    *(facts.refresh_mode, facts.owner, facts.is_suspended, facts.refreshed_us, facts.sources),
                ],
            )

    @property
    def uninitialized(self) -> set[TableName]:
        """Dynamic tables that wait for their first refresh."""
        databases = {database for database, _ in self._waiting.copy()}
        return {
            facts.name
            for database in databases
            for facts in self.dynamic_tables(database)
            if facts.refreshed_us is None
        }

    # Roles and virtual warehouses

    def names(self, kind: str) -> list[str]:
        with self.commit_lock:
            rows = self._facts.execute("SELECT name FROM names WHERE kind = ? ORDER BY name", [kind]).fetchall()
        return [name for (name,) in rows]

    def add_name(self, kind: str, name: str) -> None:
        with self.commit_lock:
            self._facts.execute("INSERT OR IGNORE INTO names VALUES (?, ?)", [kind, name])

    def drop_name(self, kind: str, name: str) -> None:
        with self.commit_lock:
            self._facts.execute("DELETE FROM names WHERE kind = ? AND name = ?", [kind, name])

    # Users

    def set_public_key(self, user: str, key: str | None) -> None:
        with self.commit_lock:
            self._facts.execute(
                "INSERT INTO users VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET public_key = excluded.public_key",
                [user, key],
            )

    def public_key(self, user: str) -> str | None:
        with self.commit_lock:
            row = self._facts.execute("SELECT public_key FROM users WHERE name = ?", [user]).fetchone()
        return row[0] if row else None


def csv_names(listed: str) -> list[str]:
    """Names in double quotes with commas between them, as DuckLake keeps the columns that a view was given."""
    return [name.replace('""', '"') for name in re.findall(r'"((?:[^"]|"")*)"', listed)]


def parse_view(view: ViewFacts) -> exp.Expr:
    """The query of a view as a tree."""
    return sqlglot.parse_one(view.sql, read="duckdb")


def view_tables(view: ViewFacts, tree: exp.Expr) -> list[tuple[exp.Table, TableName]]:
    """The references to tables and views in a view's query, and what they mean: names are seen from the view's own schema."""
    inner = {cte.alias.upper() for cte in tree.find_all(exp.CTE)}
    return [
        (table, TableName(table.catalog or view.name.database, table.db or view.name.schema, table.name))
        for table in tree.find_all(exp.Table)
        if isinstance(table.this, exp.Identifier) and (table.db or table.name.upper() not in inner)
    ]


def _alive(snapshot: int | None, prefix: str = "") -> str:
    if snapshot is None:
        return f"{prefix}end_snapshot IS NULL"
    ended = f"({prefix}end_snapshot IS NULL OR {prefix}end_snapshot > {snapshot})"
    return f"{prefix}begin_snapshot <= {snapshot} AND {ended}"


def _filling(kind: str, default: str | None) -> str:
    value = "NULL" if default is None else literal(default)
    return f"CAST({value} AS {_DUCKDB_TYPES.get(kind, kind)})"


def _metadata(database: str) -> str:
    return quote(f"__ducklake_metadata_{database}")
