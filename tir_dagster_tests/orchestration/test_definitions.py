"""What Dagster sees when it loads the definitions: a mistake as a sentence, no network, and complete assets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg

from tir_dagster.definitions import build_defs
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.orchestration.resources import environment_resources
from tir_dagster.spec.reading import parse_specs

SPEC = """\
extracts:
  - name: orders
    source: MYDB.MYSCHEMA.MYTABLE
    row_key: ORDER_ID
    slices: {column: ORDER_DATE, by: month, start: 2025-01}
    datasource: {project: myproject, name: mydatasource}
  - name: customers
    source: MYDB.MYSCHEMA.CUSTOMERS
    row_key: ID
    datasource: {project: myproject, name: customers}
"""


def loaded(tmp_path, text: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """The definitions loaded in a fresh process, with this spec file."""
    specs = tmp_path / "extracts.yaml"
    specs.write_text(text, encoding="utf-8")
    script = (
        f"{before}\nimport tir_dagster.definitions as d; print(len(d.defs.resolve_asset_graph().get_all_asset_keys()))"
    )
    env = {**os.environ, "TIR_SPECS": str(specs), "TIR_HOME": str(tmp_path)}
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)


def test_a_mistake_in_the_spec_file_is_the_last_thing_said(tmp_path):
    done = loaded(tmp_path, SPEC.replace("row_key: ORDER_ID", "row_keys: ORDER_ID"))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "extracts.yaml:4: extracts[0].row_keys: unknown field; did you mean `row_key`?" in last


def test_loading_the_definitions_opens_no_connection(tmp_path):
    refuse = "def connect(*_): raise AssertionError('a connection at import')"
    done = loaded(tmp_path, SPEC, before=f"import socket\n{refuse}\nsocket.socket.connect = connect")
    assert (done.stdout.strip(), done.returncode) == ("8", 0), done.stderr


# Connectors, Spark, Hyper and what they bring along: needed by runs, never by a page that lists assets.
HEAVY = {
    "dagster_pyspark",
    "dagster_snowflake",
    "duckdb",
    "numpy",
    "pandas",
    "pyarrow",
    "pyspark",
    "snowflake",
    "sqlalchemy",
}
HEAVY |= {"sqlglot", "tableauhyperapi", "tableauserverclient"}


def test_a_profile_shows_what_loading_the_definitions_costs_and_no_connector_is_in_it(tmp_path):
    (tmp_path / "extracts.yaml").write_text(SPEC, encoding="utf-8")
    script = Path(__file__).parents[2] / "scripts" / "profile-definitions"
    env = {**os.environ, "TIR_SPECS": str(tmp_path / "extracts.yaml"), "TIR_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert " s more, " in done.stdout
    (packages,) = [line for line in done.stdout.splitlines() if line.startswith("packages: ")]
    assert "tir_dagster" in packages
    assert not HEAVY & set(packages.split()), done.stdout


def test_every_asset_has_a_description_a_kind_and_a_group_and_tables_and_datasources_their_names():
    defs = build_defs(specs=parse_specs(SPEC, "test.yaml"))
    dg.Definitions.validate_loadable(defs)
    for spec in defs.resolve_all_asset_specs():
        assert spec.description, spec.key
        assert spec.kinds, spec.key
        assert spec.group_name == spec.key.path[0]
        if spec.key.path[-1] == "source_table":
            assert spec.metadata["dagster/table_name"].startswith("MYDB.MYSCHEMA."), spec.key
        if spec.key.path[-1] == "published_datasource":
            name = spec.key.path[0]
            assert spec.metadata["dagster/table_name"] in ("myproject/mydatasource", "myproject/customers")
            assert f"Refresh now:** launch the job `{name}_refresh_now`" in spec.description
            assert f"turn on the sensors `{name}_source` and `{name}_refresh`" in spec.description
            assert spec.metadata["tir/report"].value.endswith(f"extracts/{name}/report.html")
        if spec.key.path[-1] == "purged_extract":
            assert "the other numbers are of the whole run" in spec.description


def test_joined_tables_are_above_the_extract():
    declared = SPEC.replace(
        "source: MYDB.MYSCHEMA.MYTABLE",
        "query: SELECT O.ORDER_ID, O.ORDER_DATE, P.NAME FROM MYDB.MYSCHEMA.MYTABLE AS O LEFT JOIN MYDB.MYSCHEMA.PRODUCTS AS P "
        "ON P.ID = O.PRODUCT",
        1,
    )
    graph = build_defs(specs=parse_specs(declared, "test.yaml")).resolve_asset_graph()
    keys = extract_keys(parse_specs(declared, "test.yaml")[0])
    joined = dg.AssetKey(["MYDB", "MYSCHEMA", "PRODUCTS"])
    assert graph.get(keys.changed_keys).parent_keys == {keys.source_table, joined}


def test_whoever_materializes_all_is_only_asked_for_slices():
    graph = build_defs(specs=parse_specs(SPEC, "test.yaml")).resolve_asset_graph()
    asked = {
        key.path[-1]: graph.get(key).partitions_def for key in graph.materializable_asset_keys if "orders" in key.path
    }
    assert set(asked) == {"purged_extract", "published_datasource"}, "nobody can name a new change set"
    assert asked["published_datasource"] is None


def test_sensors_wait_to_be_switched_on():
    defs = build_defs(specs=parse_specs(SPEC, "test.yaml"))
    sensors = defs.get_repository_def().sensor_defs
    assert len(sensors) == 4
    assert {sensor.default_status for sensor in sensors} == {dg.DefaultSensorStatus.STOPPED}


def test_the_block_spark_is_in_the_resource_whichever_way_it_is_declared(tmp_path, monkeypatch):
    specs = tmp_path / "specs.yaml"
    specs.write_text("loads: []\nspark: {master: yarn, staging: /mnt/rows}\n", encoding="utf-8")
    monkeypatch.setenv("TIR_SPECS", str(specs))
    declared = {"spark.master": "yarn", "spark.tir.staging": "/mnt/rows", "spark.tir.staging.lifetime": "86400"}

    def settings(resources):
        return resources["pyspark"].spark_config

    assert settings(build_defs().resources) == settings(environment_resources()) == declared
    assert settings(environment_resources(spark={"remote": "sc://host:1"})) == {"spark.remote": "sc://host:1"}
    monkeypatch.delenv("TIR_SPECS")
    assert settings(environment_resources()) == {}
