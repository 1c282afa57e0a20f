from __future__ import annotations

import os
import subprocess
import sys

import dagster as dg
import pytest

from tir_dagster.definitions import build_defs, defs


def test_the_definitions_load_and_hold_no_assets_yet():
    dg.Definitions.validate_loadable(defs)
    assert list(defs.resolve_asset_graph().get_all_asset_keys()) == []


def test_definitions_are_built_anew_each_time():
    assert build_defs() is not defs


DECLARED = """
extracts:
  - name: orders
    query: SELECT A.ID, B.NAME FROM D.S.A AS A LEFT JOIN D.S.B AS B ON A.B = B.ID
    row_key: ID
    datasource: {project: p, name: n}
    alerts: {slack: {channel: "#c"}}
loads:
  - name: files
    files: {path: "s3://landing/orders", pattern: "*.csv", format: csv}
    table: D.S.A
    mode: append
"""


@pytest.mark.parametrize("declared", ["", DECLARED], ids=["nothing declared", "an extract below a load"])
def test_loading_the_definitions_starts_neither_spark_nor_hyper(tmp_path, declared):
    """Dagster imports the definitions in every process, also in those that only schedule."""
    (tmp_path / "specs.yaml").write_text(declared, encoding="utf-8")
    env = {**os.environ, "TIR_SPECS": str(tmp_path / "specs.yaml") if declared else ""}
    heavy = ["tableauhyperapi", "tableauserverclient", "fakesnow", "duckdb", "tir_dagster.spark.staging"]
    script = (
        f"import sys, tir_dagster.definitions; print([name for name in {heavy} if name in sys.modules]); "
        "import pyspark; print(pyspark.SparkContext._active_spark_context)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["[]", "None"], done.stderr[-2000:]
