"""Bare limits: the connector, Hyper, the file system and HTTP doing the same work with nothing of ours around it.

No checks, no fsync, no second look: nobody should refresh like this, and nobody can refresh faster. Each is the better
of two tries, so that a busy machine does not flatter the pipeline; of work that takes long, one try has to do.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests

from benchmarks.report import Limit
from tir_dagster.hyper.engine import connect, literal, parquet, quoted
from tir_dagster.hyper.hyperfile import EXTRACT_SCHEMA, EXTRACT_TABLE
from tir_dagster.snowflake.connection import SnowflakeAccess

_TABLE = quoted(EXTRACT_SCHEMA, EXTRACT_TABLE)
_BLOCK = 1 << 20
_LONG = 10.0


def _best(what: str, work: Callable[[], int | None]) -> Limit:
    """The work, which tells its rows, done twice unless it takes long; the shorter time counts."""
    seconds, rows = _timed(work)
    if seconds < _LONG:
        again, rows = _timed(work)
        seconds = min(seconds, again)
    return Limit(what, seconds, rows)


def _timed(work: Callable[[], int | None]) -> tuple[float, int | None]:
    begun = time.perf_counter()
    rows = work()
    return time.perf_counter() - begun, rows


def read_limit(access: SnowflakeAccess, query: str, what: str) -> Limit:
    """The connector runs the query and gives its Arrow batches, one at a time; each is dropped at once."""
    with access.connect() as connection, connection.cursor() as cursor:

        def read() -> int:
            cursor.execute(query)
            return sum(batch.num_rows for batch in cursor.fetch_arrow_batches(force_microsecond_precision=True))

        return _best(what, read)


def candidates_since(access: SnowflakeAccess, table: str, watermark: str) -> str:
    """Where changed rows begin, as an SQL literal: the highest watermark of a pinned table."""
    highest: datetime = access.query(f"SELECT MAX({quoted(watermark)}) FROM {table}")[0][0]
    return f"{literal(highest.isoformat(timespec='microseconds'))}::TIMESTAMP_NTZ"


def build_limit(extract: Path, folder: Path) -> Limit:
    """Hyper's COPY of all rows of this extract, from Parquet into a new file."""
    rows, target = folder / "all.parquet", folder / "built.hyper"
    definition = _export_all(_copied(extract, folder / "template.hyper"), rows)

    def build() -> int:
        with connect(target, create=True) as connection:
            connection.catalog.create_schema(EXTRACT_SCHEMA)
            connection.catalog.create_table(definition)
            return _copy(connection, rows)

    return _best("Hyper's COPY of the same rows into a new file", build)


def replace_limit(before: Path, after: Path, folder: Path, *, key: str, watermark: str) -> Limit:
    """A copy of the file, then DELETE and COPY of what differs between two extracts, in one transaction."""
    keys, rows, target = folder / "keys.parquet", folder / "rows.parquet", folder / "replaced.hyper"
    old, new = _copied(before, folder / "before.hyper"), _copied(after, folder / "after.hyper")
    _export_change(old, new, key=key, watermark=watermark, keys=keys, rows=rows)
    stored_keys = f"SELECT {quoted(key)} FROM {parquet([keys])}"

    def replace() -> int:
        shutil.copyfile(old, target)
        with connect(target) as connection:
            connection.execute_command("BEGIN TRANSACTION")
            connection.execute_command(f"DELETE FROM {_TABLE} WHERE {quoted(key)} IN ({stored_keys})")
            copied = _copy(connection, rows)
            connection.execute_command("COMMIT")
        return copied

    return _best("copy of the file, Hyper's DELETE and COPY", replace)


def _copied(source: Path, target: Path) -> Path:
    """Hyper writes into every file that it opens, and the versions are the pipeline's."""
    shutil.copyfile(source, target)
    return target


def _export_all(extract: Path, rows: Path) -> Any:
    """All rows as Parquet, and the table's definition: Hyper's own files are of exactly the types that COPY wants."""
    from tableauhyperapi import TableDefinition, TableName

    with connect(extract) as connection:
        _write(connection, f"SELECT * FROM {_TABLE}", rows)
        name = TableName(EXTRACT_SCHEMA, EXTRACT_TABLE)
        return TableDefinition(name, connection.catalog.get_table_definition(name).columns)


def _export_change(old: Path, new: Path, *, key: str, watermark: str, keys: Path, rows: Path) -> None:
    """The rows that `new` has since the highest watermark of `old`, and the keys of those and of the vanished ones."""
    before, after = (quoted(path.stem, EXTRACT_SCHEMA, EXTRACT_TABLE) for path in (old, new))
    named, mark = quoted(key), quoted(watermark)
    fresh = f"FROM {after} WHERE {mark} > (SELECT MAX({mark}) FROM {before})"
    gone = f"SELECT {named} FROM {before} EXCEPT SELECT {named} FROM {after}"
    with connect(new) as connection:
        connection.catalog.attach_database(str(old), alias=old.stem)
        _write(connection, f"SELECT * {fresh}", rows)
        _write(connection, f"SELECT {named} {fresh} UNION ({gone})", keys)


def _write(connection: Any, query: str, file: Path) -> None:
    connection.execute_command(f"COPY ({query}) TO {literal(str(file))} WITH (FORMAT => 'parquet')")


def _copy(connection: Any, rows: Path) -> int:
    copied = connection.execute_command(f"COPY {_TABLE} FROM {literal(str(rows))} WITH (FORMAT => 'parquet')")
    return int(copied or 0)


def copy_limit(file: Path, folder: Path) -> Limit:
    """A plain copy of the file."""

    def copy() -> None:
        shutil.copyfile(file, folder / "plain.copy")

    return _best("a plain copy", copy)


def upload_limit(package: Path) -> Limit:
    """One POST of a file over loopback to a sink that only reads."""
    with _sink() as url:

        def upload() -> None:
            with package.open("rb") as body:
                answer = requests.post(url, data=body, timeout=3600)
            assert answer.text == str(package.stat().st_size), f"the sink read {answer.text} bytes"

        return _best("one loopback upload of as many bytes", upload)


class _Sink(BaseHTTPRequestHandler):
    """Reads a body and says how long it was."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        left = total = int(self.headers["Content-Length"])
        while left and (block := self.rfile.read(min(left, _BLOCK))):
            left -= len(block)
        answer = str(total - left).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in http.server
        """Say nothing: standard error is the bench's."""


@contextmanager
def _sink() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Sink) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
