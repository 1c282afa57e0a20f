"""Read a datasource's live side: the real Snowflake connector against the embedded warehouse, batch by batch into Parquet."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from cryptography.hazmat.primitives import serialization as keys

from tir_dagster.sandbox.tableau.columns import ExtractType, SnowflakeType, extract_type
from tir_dagster.sandbox.tableau.extracts import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tir_dagster.sandbox.tableau.document import LogicalTable
    from tir_dagster.sandbox.tableau.sign_in_methods import Method


class SourceError(Exception):
    """The source cannot be read; the message becomes a note of the job."""


@dataclass(frozen=True)
class SourceLogin:
    """Where and as whom to read."""

    account: str
    port: int
    user: str
    method: Method
    # A password, a private key in PEM, or an OAuth token.
    secret: str = field(repr=False)
    database: str | None
    schema: str | None
    warehouse: str | None
    role: str | None


@dataclass(frozen=True)
class SourceColumn:
    """One column of the result that an extract can hold, and its place in the result."""

    position: int
    name: str
    type: ExtractType


@contextlib.contextmanager
def open_source(login: SourceLogin) -> Iterator[Any]:
    """An open connection; whatever the connector says goes into a SourceError."""
    import snowflake.connector

    options = {
        name: value
        for name, value in (
            ("database", login.database),
            ("schema", login.schema),
            ("warehouse", login.warehouse),
            ("role", login.role),
        )
        if value
    }
    try:
        connection = snowflake.connector.connect(
            account=login.account,
            user=login.user,
            **_credentials(login),
            host="127.0.0.1",
            port=login.port,
            protocol="http",
            login_timeout=20,
            network_timeout=60,
            client_session_keep_alive=False,
            platform_detection_timeout_seconds=0.0,
            **options,
        )
    except snowflake.connector.Error as error:
        raise SourceError(f"Unable to connect to the Snowflake server. {error.msg or error}") from error
    try:
        yield connection
    except snowflake.connector.Error as error:
        raise SourceError(f"The Snowflake server refused the query. {error.msg or error}") from error
    finally:
        with contextlib.suppress(Exception):
            connection.close()


def _credentials(login: SourceLogin) -> dict[str, Any]:
    """The connector's arguments for this way of signing in."""
    if login.method == "oauth":
        return {"authenticator": "oauth", "token": login.secret}
    if login.method == "password":
        return {"password": login.secret}
    try:
        key = keys.load_pem_private_key(login.secret.encode(), None)
    except (ValueError, TypeError) as error:
        raise SourceError("Unable to connect to the Snowflake server. The saved private key cannot be read.") from error
    der = key.private_bytes(keys.Encoding.DER, keys.PrivateFormat.PKCS8, keys.NoEncryption())
    return {"private_key": der}


def relation_sql(table: LogicalTable) -> str:
    """What stands after FROM."""
    if table.custom_sql is not None:
        return f"({table.custom_sql.strip().rstrip(';')}) {quoted(table.source_name or 'Custom SQL Query')}"
    if not table.source_table:
        raise SourceError(f"The relation {table.source_name!r} is neither a table nor custom SQL.")
    return quoted(*table.source_table)


def increment_condition(connection: Any, table: LogicalTable, column: str, value: str, *, inclusive: bool) -> str:
    """`"KEY" > …`, or `>=`, for an increment value, in the type of the key: zoned timestamps are kept in UTC."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {quoted(column)} FROM {relation_sql(table)} LIMIT 0")
        family = SnowflakeType.from_description(cursor.description[0]).family
    text = value.strip("#")
    if not value.startswith("#"):
        literal = text
    elif family == "DATE":
        literal = f"'{text}'::DATE"
    elif family in ("TIMESTAMP_TZ", "TIMESTAMP_LTZ"):
        literal = f"'{text} +00:00'::TIMESTAMP_TZ"
    else:
        literal = f"'{text}'::TIMESTAMP_NTZ"
    return f"{quoted(column)} {'>=' if inclusive else '>'} {literal}"


def fetch(
    connection: Any,
    table: LogicalTable,
    target: Path,
    *,
    where: str | None,
    rename: Callable[[str], str],
    check: Callable[[], None],
) -> tuple[Sequence[SourceColumn], int]:
    """Write the relation's rows to a Parquet file under the extract's column names; its columns and row count.

    `check` is asked between batches and may raise to stop.
    """
    sql = f"SELECT * FROM {relation_sql(table)}" + (f" WHERE {where}" if where else "")
    with connection.cursor() as cursor:
        cursor.execute(sql)
        described = [(entry.name, extract_type(SnowflakeType.from_description(entry))) for entry in cursor.description]
        columns = [SourceColumn(at, name, kind) for at, (name, kind) in enumerate(described) if kind is not None]
        if len({column.name for column in columns}) < len(columns):
            raise SourceError(f"The relation {table.source_name!r} has two columns of the same name.")
        schema = pa.schema([(rename(column.name), column.type.arrow) for column in columns])
        rows = 0
        with pq.ParquetWriter(target, schema) as writer:
            for batch in cursor.fetch_arrow_batches():
                check()
                writer.write_table(_as_extract(batch, columns, schema))
                rows += batch.num_rows
    return columns, rows


def _as_extract(batch: Any, columns: Sequence[SourceColumn], schema: Any) -> Any:
    arrays = []
    for column, entry in zip(columns, schema, strict=True):
        try:
            arrays.append(_cast(batch.column(column.position), entry.type))
        except pa.ArrowException as error:
            raise SourceError(f"Column {column.name!r} cannot be brought into the extract: {error}") from error
    return pa.Table.from_arrays(arrays, schema=schema)


def _cast(array: Any, wanted: Any) -> Any:
    # Hyper keeps microseconds: what is finer is cut, and a zone is dropped after it became UTC.
    if pa.types.is_timestamp(wanted) and pa.types.is_timestamp(array.type):
        return array.cast(pa.timestamp("us", tz=array.type.tz), safe=False).cast(wanted)
    if pa.types.is_time(wanted) and pa.types.is_time(array.type):
        return array.cast(wanted, safe=False)
    return array.cast(wanted)
