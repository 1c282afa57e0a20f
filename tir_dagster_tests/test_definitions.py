from __future__ import annotations

import subprocess
import sys

import dagster as dg

from tir_dagster.definitions import build_defs, defs


def test_the_definitions_load_and_hold_no_assets_yet():
    dg.Definitions.validate_loadable(defs)
    assert list(defs.resolve_asset_graph().get_all_asset_keys()) == []


def test_definitions_are_built_anew_each_time():
    assert build_defs() is not defs


def test_loading_the_definitions_starts_neither_spark_nor_hyper():
    """Dagster imports the definitions in every process, also in those that only schedule."""
    heavy = ["tableauhyperapi", "tableauserverclient", "fakesnow", "duckdb", "tir_dagster.spark.staging"]
    script = (
        f"import sys, tir_dagster.definitions; print([name for name in {heavy} if name in sys.modules]); "
        "import pyspark; print(pyspark.SparkContext._active_spark_context)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "None"]
