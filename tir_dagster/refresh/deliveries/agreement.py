"""Agreement of a datasource that people built with the spec: a difference that would change rows is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from tir_dagster.errors import DatasourceError
from tir_dagster.hyper.casts import PURGE_KEY
from tir_dagster.hyper.increment import (
    Increment,
    Missing,
    NoIncrement,
    find_increment,
)
from tir_dagster.hyper.package.package import Package
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.query import same_query
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.datasources import FoundDatasource


def check_agreement(
    package: Package,
    *,
    datasource: str,
    table: TableName,
    source_columns: Sequence[str],
    needed: Sequence[str],
    only: Sequence[str] = (),
) -> None:
    """Compare relation, filters, aggregation and columns with the spec; all differences are named at once.

    `datasource` is its name in messages; `needed` columns must be there, and with `only` no others.
    """
    problems = [*_rows(package, table), *_columns(package, table, source_columns, needed, only)]
    if problems:
        _refuse(datasource, problems)


def _refuse(datasource: str, problems: Sequence[str]) -> NoReturn:
    raise DatasourceError(
        f"The {datasource} does not show what the spec says: {'; '.join(problems)}. Nothing was touched. "
        "Change the spec, or change the datasource in Tableau and publish it again."
    )


def check_query_agreement(package: Package, *, datasource: str, query: str, columns: Sequence[str]) -> None:
    """Compare the datasource with a query: it must read the query as custom SQL, and have just its columns."""
    problems = [*_custom_sql(package, query), *row_limits(package)]
    names = set(package.hyper_names) or {record.remote_name for record in package.columns}
    if names != set(columns):
        problems.append(f"it has the columns {', '.join(sorted(names))}, the query gives {', '.join(sorted(columns))}")
    if problems:
        _refuse(datasource, problems)


def check_replaceable(
    extract: str, datasource: str, *, published_columns: Sequence[str], extract_columns: Sequence[str]
) -> None:
    """Refuse to replace a published Hyper file that has other columns than the extract."""
    published, columns = sorted({*published_columns} - {PURGE_KEY}), sorted(extract_columns)
    if published != columns:
        raise DatasourceError(
            f"{extract}: the {datasource} is a Hyper file that this extract never published: it has the columns {', '.join(published)}, "
            f"and the extract {', '.join(columns)}. Nothing was touched. Name another datasource in the spec; or, if this one may be"
            " replaced, set datasource.replace: true."
        )


def _custom_sql(package: Package, query: str) -> Iterator[str]:
    relation = package.relation
    if relation is None:
        return
    if relation.kind != "text":
        yield "it does not read custom SQL, the spec gives a query"
    elif not same_query(relation.sql or "", query):
        yield "its custom SQL is not the query in the spec"


def _rows(package: Package, table: TableName) -> Iterator[str]:
    """Yield the differences that change which rows the extract holds."""
    yield from _relation(package, table)
    yield from row_limits(package)


def row_limits(package: Package) -> Iterator[str]:
    """Yield the filters, aggregations and limits by which the extract holds other rows than its source."""
    if package.filters:
        yield f"its extract is filtered ({', '.join(package.filters)})"
    if package.aggregated:
        yield "its extract is aggregated"
    if package.row_limit:
        yield f"its extract is limited to {package.row_limit}"
    # Of several tables, each says what it stores.
    if package.calculated_columns and len(package.tables) == 1:
        yield f"its extract stores calculated fields ({', '.join(package.calculated_columns)})"


def _columns(
    package: Package, table: TableName, source_columns: Sequence[str], needed: Sequence[str], only: Sequence[str]
) -> Iterator[str]:
    known = set(source_columns)
    names = set(package.hyper_names) or {record.remote_name for record in package.columns}
    if unknown := sorted(names - known):
        yield f"it has the columns {', '.join(unknown)}, which {table} does not have"
    if missing := sorted(set(needed) - names):
        yield f"it lacks the columns {', '.join(missing)}, which the spec needs"
    if only and (more := sorted((names & known) - set(only))):
        yield f"it also has the columns {', '.join(more)}, which `columns` in the spec leaves out"


def _relation(package: Package, table: TableName) -> Iterator[str]:
    relation = package.relation
    if relation is None:
        return
    if relation.kind == "text":
        yield "it reads custom SQL"
        return
    if relation.kind == "other":
        yield f"it reads {relation.name}, which is not one table"
        return
    connection = package.connections[0] if package.connections else None
    defaults = (connection.dbname, connection.schema) if connection else (None, None)
    parts = [*defaults[: 3 - len(relation.table)], *relation.table]
    relation_parts = [part or "" for part in parts][-3:]
    table_parts = [table.database, table.schema, table.name]
    if [part.upper() for part in relation_parts] != [part.upper() for part in table_parts]:
        yield f"it reads {'.'.join(relation_parts)}, the spec names {table}"


def refuse_document(spec: ExtractSpec, shell: Path | None, datasource: FoundDatasource | None) -> None:
    """Refuse a document that people made for the delivery `patch`: it names its columns, so ours cannot be among them."""
    if shell is not None and spec.delivery == "patch" and datasource is not None:
        raise DatasourceError(
            f"{spec.name}: {datasource.shown} has a document that people made, and the delivery `patch` keeps none. Choose the "
            "delivery `republish`, or publish under another name: then a Hyper file is created."
        )


def needed_increment(extract: str, package: Package, hyper: Path) -> Increment | NoIncrement:
    """Return the increment key and value; raise if incremental refresh is off."""
    increment = find_increment(package, hyper)
    if isinstance(increment, NoIncrement) and increment.why is Missing.NOT_INCREMENTAL:
        raise DatasourceError(f"{extract}: {increment.sentence} Or use the delivery `republish`.")
    return increment
