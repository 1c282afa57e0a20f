"""The run behind `star`: facts that all refer to one row of a dimension, in a joined extract and in one of two tables."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.run import Bench, measuring
from benchmarks.star import JOINED, STAR, WAYS, Result, StarReport, StarStore
from tir_dagster.cli.demo.comparison import published_extract
from tir_dagster.errors import TirError
from tir_dagster.hyper.engine import connect, literal, quoted
from tir_dagster.orchestration.interrupts import StoppedError
from tir_dagster.sandbox import sample
from tir_dagster.sandbox.sample.table import warehouse
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import parse_specs

DIMENSION = 1_000
# The facts that do not refer to the row that changes: one for so many that do.
_PART_OF_OTHERS = 10
_PLACE = "MYDB.MYSCHEMA"
_SALES = ("SALE_ID", "DAY", "PRODUCT_ID", "STORE", "QUANTITY", "AMOUNT")
_PRODUCTS = ("PRODUCT_ID", "NAME", "DESCRIPTION", "INGREDIENTS")
_TYPES = {
    "SALE_ID": ("BIGINT", pa.int64()),
    "DAY": ("DATE", pa.date32()),
    "PRODUCT_ID": ("BIGINT", pa.int64()),
    "STORE": ("TEXT", pa.string()),
    "QUANTITY": ("BIGINT", pa.int64()),
    "AMOUNT": ("NUMERIC(12,2)", pa.decimal128(12, 2)),
    "NAME": ("TEXT", pa.string()),
    "DESCRIPTION": ("TEXT", pa.string()),
    "INGREDIENTS": ("TEXT", pa.string()),
}
_TABLES = f"""\
CREATE OR REPLACE TABLE {_PLACE}.SALES (SALE_ID NUMBER(38,0), DAY DATE, PRODUCT_ID NUMBER(38,0), STORE VARCHAR,
    QUANTITY NUMBER(38,0), AMOUNT NUMBER(12,2), UPDATED_AT TIMESTAMP_NTZ);
CREATE OR REPLACE TABLE {_PLACE}.PRODUCTS (PRODUCT_ID NUMBER(38,0), NAME VARCHAR, DESCRIPTION VARCHAR, INGREDIENTS VARCHAR);
INSERT INTO {_PLACE}.PRODUCTS
    SELECT N, 'product ' || N, REPEAT(MD5(N::VARCHAR), 8), REPEAT(MD5('i' || N), 6)
    FROM (SELECT SEQ4() AS N FROM TABLE(GENERATOR(ROWCOUNT => {DIMENSION})));
INSERT INTO {_PLACE}.SALES
    SELECT N, DATEADD(day, MOD(N, 360), '2025-01-01'::DATE), IFF(N < {{facts}}, 0, 1 + MOD(N, {DIMENSION - 1})),
        'store ' || MOD(N, 50), 1 + MOD(N, 7), (MOD(N, 10000) / 100)::NUMBER(12,2), DATEADD(second, N, '2025-01-01'::TIMESTAMP_NTZ)
    FROM (SELECT SEQ4() AS N FROM TABLE(GENERATOR(ROWCOUNT => {{rows}})))"""
_JOIN = (
    f"SELECT {', '.join(f's.{name}' for name in _SALES)}, {', '.join(f'p.{name}' for name in _PRODUCTS[1:])} "
    f"FROM {_PLACE}.SALES s LEFT JOIN {_PLACE}.PRODUCTS p ON s.PRODUCT_ID = p.PRODUCT_ID"
)
# What each shape shows, by the names of its tables in the Hyper file.
_SHOWN: Mapping[str, Mapping[str, tuple[str, tuple[str, ...]]]] = {
    JOINED: {"Extract": (_JOIN, (*_SALES, *_PRODUCTS[1:]))},
    STAR: {
        "SALES": (f"SELECT {', '.join(_SALES)} FROM {_PLACE}.SALES", _SALES),
        "PRODUCTS": (f"SELECT {', '.join(_PRODUCTS)} FROM {_PLACE}.PRODUCTS", _PRODUCTS),
    },
}
_KEYED = """row_key: SALE_ID
{0}slices: {{column: DAY, by: month, start: 2025-01}}
{0}changes: {{watermark: UPDATED_AT, look_back: 0 seconds}}"""
_ROWS_OF = {
    JOINED: f"""query: {_JOIN}
    {_KEYED.format("    ")}""",
    STAR: f"""tables:
      - name: SALES
        source: {_PLACE}.SALES
        columns: [{", ".join(_SALES)}]
        {_KEYED.format("        ")}
      - {{name: PRODUCTS, source: {_PLACE}.PRODUCTS, row_key: PRODUCT_ID}}
    relationships:
      - {{table: SALES, refers_to: PRODUCTS, columns: PRODUCT_ID}}""",
}
# By key, however many they are: a joined extract of which most rows change would be loaded anew instead.
_SPEC = """\
extracts:
  - name: {shape}_{delivery}
    {rows}
    delivery: {delivery}
    thresholds: {{quiet_period: 0 seconds, full_share: 1}}
    datasource: {{project: {project}, name: {shape}_{delivery}}}
"""

Say = Callable[[str], None]


def run_star(folder: Path, facts: int, store: StarStore, progress: Say) -> StarReport:
    """Measure the ways that are not in the store yet, each on the same tables after one more change of the same row."""
    with measuring(folder, progress) as bench:
        bench.warm_up(("republish",))
        progress(f"making {facts:,} facts and the dimension")
        with warehouse(bench.env, "making the tables of the star") as run:
            for statement in _TABLES.format(facts=facts, rows=facts + facts // _PART_OF_OTHERS).split(";"):
                run(statement)
        begun, wanted = time.monotonic(), [way for way in WAYS if way not in store.known]
        for number, (shape, delivery) in enumerate(wanted, 1):
            result = _measured(bench, folder, Result(shape, delivery))
            store.add(result)
            left = (time.monotonic() - begun) / number * (len(wanted) - number) / 60
            verdict = (
                result.error or f"{result.seconds:.1f} s, {'equal' if result.equal else 'NOT equal'} to the source"
            )
            progress(f"{shape}, {delivery}: {verdict}; {len(wanted) - number} left: about {left:,.0f} min")
    return store.report()


def _measured(bench: Bench, folder: Path, way: Result) -> Result:
    spec = spec_of(way.shape, way.delivery)
    try:
        return _loaded_and_refreshed(bench, folder, spec, way)
    except StoppedError:
        raise
    except Exception as error:
        return replace(way, error=" ".join(str(error).split())[:500] or type(error).__name__)
    finally:
        bench.remove(spec.name)


def spec_of(shape: str, delivery: str) -> ExtractSpec:
    text = _SPEC.format(shape=shape, delivery=delivery, rows=_ROWS_OF[shape], project=sample.PROJECT)
    (spec,) = parse_specs(text, f"{shape}_{delivery}.yaml")
    return spec


def _loaded_and_refreshed(bench: Bench, folder: Path, spec: ExtractSpec, way: Result) -> Result:
    load = bench.play(spec, "by_key")
    with warehouse(bench.env, "changing one row of the dimension") as run:
        run(f"UPDATE {_PLACE}.PRODUCTS SET NAME = '{way.shape} {way.delivery}' WHERE PRODUCT_ID = 0")
    # As if it were the only extract: others would have read the change already.
    shutil.rmtree(bench.state_of(spec.name).parents[1] / "shared", ignore_errors=True)
    done = bench.play(spec, "by_key")
    meters = bench.stand_ins.meters()
    if done.outcome.decision != "incremental":
        raise TirError(f"the refresh was {done.outcome.decision} ({done.outcome.reason}), not by key")
    return replace(
        way,
        load_seconds=round(load.case.seconds + load.case.server, 3),
        extract_bytes=load.version.extract.stat().st_size,
        keys=done.version.manifest["keys"],
        removed=done.outcome.rows_purged,
        added=done.outcome.rows_appended,
        rows_read=meters["rows read"],
        bytes_read=meters["bytes read"],
        bytes_sent=meters["REST bytes sent"],
        seconds=round(done.case.seconds + done.case.server, 3),
        server=round(done.case.server, 3),
        equal=_equal(bench.env, folder, spec, way.shape),
    )


def _equal(env: Mapping[str, str], folder: Path, spec: ExtractSpec, shape: str) -> bool:
    """Whether the tables that anybody would download have the rows of the source; nothing of ours decides what is equal."""
    with published_extract(spec, env) as hyper, tempfile.TemporaryDirectory(dir=folder) as work:
        for table, (query, names) in _SHOWN[shape].items():
            source = Path(work) / f"{table}.parquet"
            rows = _write_source(env, query, names, source)
            columns = ", ".join(f"CAST({quoted(name)} AS {_TYPES[name][0]})" for name in names)
            sides = [
                f"SELECT {columns} FROM {place}"
                for place in (quoted("Extract", table), f"external({literal(str(source))}, FORMAT => 'parquet')")
            ]
            with connect(hyper) as connection:
                shown = connection.execute_scalar_query(f"SELECT COUNT(*) FROM ({sides[0]}) AS shown")
                # Bags of as many rows are equal if none of one is missing in the other.
                other = connection.execute_scalar_query(
                    f"SELECT COUNT(*) FROM ({' EXCEPT ALL '.join(sides)}) AS only_shown"
                )
            if (shown, other) != (rows, 0):
                return False
    return True


def _write_source(env: Mapping[str, str], query: str, names: tuple[str, ...], file: Path) -> int:
    """Write the rows of a query as they are now; return their number."""
    schema, rows = pa.schema([(name, _TYPES[name][1]) for name in names]), 0
    with sample.connect(env) as connection, connection.cursor() as cursor, pq.ParquetWriter(file, schema) as writer:
        cursor.execute(query)
        for batch in cursor.fetch_arrow_batches():
            writer.write_table(batch.cast(schema))
            rows += batch.num_rows
    return rows
