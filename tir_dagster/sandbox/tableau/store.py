"""What the server remembers, in one SQLite file: every change is one transaction, and a crash loses none that was answered."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SCHEMA = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sites (id TEXT PRIMARY KEY, name TEXT NOT NULL, content_url TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS users (id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, password_hash TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS site_users (
    site_id TEXT NOT NULL REFERENCES sites, user_id TEXT NOT NULL REFERENCES users, role TEXT NOT NULL,
    PRIMARY KEY (site_id, user_id));
CREATE TABLE IF NOT EXISTS tokens (
    id INTEGER PRIMARY KEY, user_id TEXT NOT NULL REFERENCES users, name TEXT NOT NULL, secret_hash TEXT NOT NULL,
    UNIQUE (user_id, name));
CREATE TABLE IF NOT EXISTS sessions (
    token_hash TEXT PRIMARY KEY, user_id TEXT NOT NULL, site_id TEXT NOT NULL, token_id INTEGER,
    last_used REAL NOT NULL, scopes TEXT);
CREATE TABLE IF NOT EXISTS used_jwts (jti TEXT PRIMARY KEY, expires REAL NOT NULL);
CREATE TABLE IF NOT EXISTS projects (
    id TEXT PRIMARY KEY, site_id TEXT NOT NULL, parent_id TEXT, name TEXT NOT NULL, description TEXT,
    content_permissions TEXT NOT NULL, owner_id TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS project_names ON projects (site_id, coalesce(parent_id, ''), name);
CREATE TABLE IF NOT EXISTS datasources (
    id TEXT PRIMARY KEY, site_id TEXT NOT NULL, project_id TEXT NOT NULL REFERENCES projects, name TEXT NOT NULL,
    content_url TEXT NOT NULL, kind TEXT NOT NULL, description TEXT, owner_id TEXT NOT NULL, tags TEXT NOT NULL,
    certified INTEGER NOT NULL, certification_note TEXT, has_extracts INTEGER NOT NULL, revision INTEGER NOT NULL,
    generation INTEGER NOT NULL, created REAL NOT NULL, updated REAL NOT NULL, UNIQUE (project_id, name));
CREATE TABLE IF NOT EXISTS revisions (
    datasource_id TEXT NOT NULL REFERENCES datasources ON DELETE CASCADE, number INTEGER NOT NULL, file TEXT NOT NULL,
    size INTEGER NOT NULL, publisher_id TEXT NOT NULL, published REAL NOT NULL, published_file TEXT,
    deleted INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (datasource_id, number));
CREATE TABLE IF NOT EXISTS connections (
    id TEXT PRIMARY KEY, datasource_id TEXT NOT NULL REFERENCES datasources ON DELETE CASCADE, position INTEGER NOT NULL,
    name TEXT NOT NULL, kind TEXT NOT NULL, server TEXT, port TEXT, dbname TEXT, username TEXT, password TEXT,
    embed INTEGER NOT NULL, authentication TEXT);
CREATE TABLE IF NOT EXISTS saved_credentials (
    user_id TEXT NOT NULL REFERENCES users, method TEXT NOT NULL, server TEXT NOT NULL, username TEXT NOT NULL,
    secret TEXT NOT NULL, PRIMARY KEY (user_id, method, server, username));
CREATE TABLE IF NOT EXISTS workbooks (
    id TEXT PRIMARY KEY, site_id TEXT NOT NULL, project_id TEXT NOT NULL REFERENCES projects, name TEXT NOT NULL,
    content_url TEXT NOT NULL, description TEXT, owner_id TEXT NOT NULL, show_tabs INTEGER NOT NULL,
    size INTEGER NOT NULL, document BLOB NOT NULL, created REAL NOT NULL, updated REAL NOT NULL,
    UNIQUE (project_id, name));
CREATE TABLE IF NOT EXISTS views (
    id TEXT PRIMARY KEY, workbook_id TEXT NOT NULL REFERENCES workbooks ON DELETE CASCADE, name TEXT NOT NULL,
    content_url TEXT NOT NULL, kind TEXT NOT NULL, position INTEGER NOT NULL, created REAL NOT NULL,
    updated REAL NOT NULL, UNIQUE (workbook_id, name));
CREATE TABLE IF NOT EXISTS uploads (
    id TEXT PRIMARY KEY, site_id TEXT NOT NULL, user_id TEXT NOT NULL, file TEXT NOT NULL, size INTEGER NOT NULL,
    created REAL NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, site_id TEXT NOT NULL, kind TEXT NOT NULL, datasource_id TEXT, title TEXT NOT NULL,
    task_id TEXT, payload TEXT NOT NULL, state TEXT NOT NULL, created REAL NOT NULL, started REAL, completed REAL,
    finish_code INTEGER, notes TEXT NOT NULL, gone_code INTEGER);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, created);
CREATE TABLE IF NOT EXISTS data_requests (
    site_id TEXT NOT NULL, request_id TEXT NOT NULL, content TEXT NOT NULL, job_id TEXT NOT NULL, created REAL NOT NULL,
    PRIMARY KEY (site_id, request_id));
CREATE TABLE IF NOT EXISTS webhooks (
    id TEXT PRIMARY KEY, site_id TEXT NOT NULL, name TEXT NOT NULL, event TEXT NOT NULL, url TEXT NOT NULL,
    owner_id TEXT NOT NULL REFERENCES users, enabled INTEGER NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS deliveries (
    id INTEGER PRIMARY KEY, webhook_id TEXT NOT NULL REFERENCES webhooks ON DELETE CASCADE, body TEXT NOT NULL,
    attempts INTEGER NOT NULL, due REAL NOT NULL);
CREATE TABLE IF NOT EXISTS schedules (
    id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, priority INTEGER NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL,
    execution_order TEXT NOT NULL, frequency TEXT NOT NULL, details TEXT NOT NULL, created REAL NOT NULL,
    updated REAL NOT NULL, next_run REAL);
CREATE TABLE IF NOT EXISTS tasks (
    id TEXT PRIMARY KEY, site_id TEXT NOT NULL, datasource_id TEXT NOT NULL REFERENCES datasources ON DELETE CASCADE,
    schedule_id TEXT REFERENCES schedules, incremental INTEGER NOT NULL, priority INTEGER NOT NULL,
    failed_count INTEGER NOT NULL, frequency TEXT, details TEXT, next_run REAL);
CREATE TABLE IF NOT EXISTS subscriptions (
    id TEXT PRIMARY KEY, site_id TEXT NOT NULL, subject TEXT NOT NULL, target_id TEXT NOT NULL, target_kind TEXT NOT NULL,
    schedule_id TEXT NOT NULL, user_id TEXT NOT NULL);
"""
# Columns that a file of an earlier version does not have yet.
_LATER = (
    ("schedules", "next_run", "REAL"),
    ("tasks", "next_run", "REAL"),
    ("revisions", "published_file", "TEXT"),
    ("revisions", "deleted", "INTEGER NOT NULL DEFAULT 0"),
    ("sessions", "scopes", "TEXT"),
)

Row = sqlite3.Row


class Store:
    """One connection behind one lock: SQLite allows one writer anyway, and the calls are short."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        # The file holds embedded passwords.
        path.chmod(0o600)
        self._connection.row_factory = sqlite3.Row
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.executescript(_SCHEMA)
        for table, column, kind in _LATER:
            known = {row["name"] for row in self._connection.execute(f"PRAGMA table_info({table})")}
            if column not in known:
                self._connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of it or nothing of it; the lock keeps readers from seeing it half done."""
        with self._lock:
            if self._connection.in_transaction:
                yield self._connection
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def rows(self, sql: str, *values: Any) -> list[Row]:
        with self._lock:
            return self._connection.execute(sql, values).fetchall()

    def row(self, sql: str, *values: Any) -> Row | None:
        with self._lock:
            found: Row | None = self._connection.execute(sql, values).fetchone()
            return found

    def run(self, sql: str, *values: Any) -> int:
        """One statement in its own transaction; how many rows it changed."""
        with self.transaction() as db:
            return db.execute(sql, values).rowcount

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def insert(db: sqlite3.Connection, table: str, **values: Any) -> None:
    names = ", ".join(values)
    db.execute(f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(values))})", tuple(values.values()))


def update(db: sqlite3.Connection, table: str, row_id: str, **values: Any) -> None:
    names = ", ".join(f"{name} = ?" for name in values)
    db.execute(f"UPDATE {table} SET {names} WHERE id = ?", (*values.values(), row_id))
