"""`tir init` on the sandbox: the file that it writes is a spec that `tir plan` accepts, with its reasons, and nothing is replaced."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tir_dagster.spec.reading import json_schema, load_declared, spec_from_mapping
from tir_dagster_tests.cli.setup.conftest import Site
from tir_dagster_tests.conftest import Sandbox

WRONG_USAGE = 2
DOCS = Path(__file__).parents[3] / "docs" / "first-hour.md"


def words() -> str:
    """The text of the file without its line breaks, also where they are in a comment."""
    return " ".join(Path("extracts.yaml").read_text(encoding="utf-8").replace("# ", "").split())


def init(site: Site, *arguments: str, datasource: str = "orders"):
    return site.run("init", "--datasource", f"{site.project.name}/{datasource}", *arguments)


def written(site: Site, *arguments: str, datasource: str = "orders"):
    """The one extract of the file that the command wrote."""
    result = init(site, *arguments, datasource=datasource)
    assert result.exit_code == 0, result.stderr
    (spec,) = load_declared("extracts.yaml").extracts
    return spec


def test_the_file_has_its_reasons_and_a_schema_for_editors_and_can_be_planned(site: Site):
    table = site.orders()
    result = init(site, table)
    assert result.exit_code == 0, result.stderr
    text = Path("extracts.yaml").read_text(encoding="utf-8")
    assert text.splitlines()[0] == "# yaml-language-server: $schema=./extracts.schema.json"
    assert json.loads(Path("extracts.schema.json").read_text(encoding="utf-8")) == json_schema()
    (spec,) = load_declared("extracts.yaml").extracts
    assert (spec.source, spec.row_key, spec.slices.by, spec.slices.start) == (table, ("ID",), "month", "2026-01")
    assert (spec.changes.detector, spec.delivery) == ("feed", "republish")
    assert "# The declared primary key; no value of it repeats (counted)." in text
    planned = site.run("--specs", "extracts.yaml", "plan", spec.name)
    assert planned.exit_code == 0, planned.stderr
    assert "full refresh" in planned.stdout
    assert f"Next: tir --specs extracts.yaml plan {spec.name}" in result.stdout


@pytest.mark.long
def test_the_docs_show_what_is_written_for_the_sample(seeded: Sandbox, site: Site):
    result = site.run("init", "MYDB.MYSCHEMA.MYTABLE", "--datasource", "myproject/mydatasource")
    assert result.exit_code == 0, result.stderr
    text = Path("extracts.yaml").read_text(encoding="utf-8")
    # Months, and with them some counts, follow the calendar.
    shown, made = (
        " ".join(re.sub(r"\d[\d,.-]*", "N", one).split()) for one in (DOCS.read_text(encoding="utf-8"), text)
    )
    assert made in shown, text


def test_a_file_of_another_name_is_no_schema_to_replace(site: Site):
    Path("extracts.schema.json").write_text("{}", encoding="utf-8")
    result = init(site, site.orders())
    assert (result.exit_code, "is not tir_dagster's schema" in result.stderr) == (WRONG_USAGE, True)
    assert not Path("extracts.yaml").exists()


def test_a_file_is_never_replaced_unless_forced_and_nothing_is_asked_before(site: Site):
    Path("extracts.yaml").write_text("mine", encoding="utf-8")
    result = init(site, "NO.SUCH.TABLE")
    assert result.exit_code == WRONG_USAGE
    assert "extracts.yaml exists. Name another file with --to, add to it with --append" in result.stderr
    assert Path("extracts.yaml").read_text(encoding="utf-8") == "mine"
    assert written(site, site.orders(), "--force").name == "orders"


def test_another_extract_is_appended_and_what_was_there_stays_to_the_letter(site: Site):
    written(site, site.orders())
    before = Path("extracts.yaml").read_text(encoding="utf-8")
    assert init(site, site.orders("MORE"), "--append", datasource="more").exit_code == 0
    after = Path("extracts.yaml").read_text(encoding="utf-8")
    assert after.startswith(before)
    assert [spec.name for spec in load_declared("extracts.yaml").extracts] == ["orders", "more"]


def test_nothing_is_appended_to_a_file_that_ends_with_something_else(site: Site):
    spec = "extracts: [{name: a, source: A.B.C, row_key: ID, datasource: {project: p, name: n}}]\n"
    Path("extracts.yaml").write_text(spec, encoding="utf-8")
    result = init(site, site.orders(), "--append")
    assert result.exit_code == WRONG_USAGE
    assert "nothing was appended" in result.stderr
    assert "- name: orders" in result.stderr
    assert Path("extracts.yaml").read_text(encoding="utf-8") == spec


def test_a_component_is_written_for_a_dg_project(site: Site):
    result = init(site, site.orders(), "--dg")
    assert result.exit_code == 0, result.stderr
    component = yaml.safe_load(Path("defs.yaml").read_text(encoding="utf-8"))
    assert component["type"] == "tir_dagster.TableauExtractComponent"
    assert spec_from_mapping(component["attributes"], "defs.yaml").row_key == ("ID",)


def test_a_wrong_name_is_wrong_usage_with_similar_names(site: Site):
    site.orders()
    result = init(site, f"SETUPS.{site.schema}.ORDRES")
    assert result.exit_code == WRONG_USAGE
    # First: another test's schema, whose name is random, may be near as well.
    assert f"Did you mean SETUPS.{site.schema}.ORDERS" in result.stderr
    assert not Path("extracts.yaml").exists()
    assert "Did you mean the database SETUPS?" in init(site, f"SETUPSS.{site.schema}.ORDERS").stderr


@pytest.mark.parametrize(
    "arguments", [(), ("ORDERS",), ("T.T.T", "--query", "SELECT 1"), ("A.B.C", "--dg", "--append")]
)
def test_without_a_terminal_nothing_is_asked(site: Site, arguments: tuple[str, ...]):
    assert init(site, *arguments).exit_code == WRONG_USAGE


@pytest.mark.long
def test_on_a_terminal_it_asks_for_what_is_missing(site: Site):
    ours, theirs = os.openpty()
    os.write(ours, f"SETUPS.{site.schema}.NOWHERE\n{site.project.name}/orders\n".encode())
    command = [sys.executable, "-m", "tir_dagster.cli.main", "init"]
    asked = subprocess.run(command, stdin=theirs, capture_output=True, text=True, check=False, timeout=600)
    os.close(theirs)
    os.close(ours)
    assert asked.returncode == WRONG_USAGE
    assert "Snowflake table (DATABASE.SCHEMA.TABLE): Tableau datasource (PROJECT/NAME): " in asked.stderr
    assert f"SETUPS.{site.schema}.NOWHERE does not exist" in asked.stderr


def test_a_declared_key_that_repeats_is_not_taken(site: Site):
    table = site.table(
        "T",
        "A NUMBER(38,0) NOT NULL PRIMARY KEY, CODE VARCHAR NOT NULL, DAY DATE",
        "SELECT MOD(SEQ4(), 50), 'c' || SEQ4(), '2026-01-01'::DATE FROM TABLE(GENERATOR(ROWCOUNT => 100))",
    )
    assert written(site, table).row_key == ("CODE",)
    assert "The declared primary key (A) has values that repeat." in words()


def test_two_columns_that_are_unique_together_are_the_key(site: Site):
    table = site.table(
        "LINES",
        "ORDER_ID NUMBER(38,0) NOT NULL, LINE_NO NUMBER(38,0) NOT NULL, AMOUNT NUMBER(12,2)",
        "SELECT FLOOR(SEQ4() / 4), MOD(SEQ4(), 4), 1 FROM TABLE(GENERATOR(ROWCOUNT => 400))",
    )
    assert written(site, table).row_key == ("ORDER_ID", "LINE_NO")


@pytest.mark.long
def test_rows_without_any_key_are_replaced_by_slices(site: Site):
    table = site.table(
        "LOG", "DAY DATE, AMOUNT NUMBER(12,2)", "VALUES ('2026-01-01', 1), ('2026-01-01', 1), ('2026-02-01', 2)"
    )
    spec = written(site, table)
    assert (spec.row_key, spec.slices.column) == ((), "DAY")


@pytest.mark.long
def test_a_view_and_a_table_without_rows_are_described_too(site: Site):
    site.orders()
    site.sql("CREATE VIEW {s}.V AS SELECT ID, DAY FROM {s}.ORDERS")
    assert written(site, f"SETUPS.{site.schema}.V").row_key == ("ID",)
    Path("extracts.yaml").unlink()
    assert written(site, site.table("EMPTY", "ID NUMBER(38,0) NOT NULL PRIMARY KEY, DAY DATE")).row_key == ("ID",)


def test_a_table_of_which_nothing_can_be_replaced_gives_no_file(site: Site):
    table = site.table("F", "X FLOAT", "VALUES (1.5), (2.5)")
    result = init(site, table)
    assert result.exit_code == WRONG_USAGE
    assert "give a row key, or slices" in result.stderr
    assert not Path("extracts.yaml").exists()


@pytest.mark.long
def test_types_that_no_extract_holds_are_left_out(site: Site):
    table = site.table("B", "ID NUMBER(38,0) NOT NULL, PHOTO BINARY", "SELECT 1, NULL UNION ALL SELECT 2, NULL")
    assert written(site, table).columns == ("ID",)


def test_a_join_and_an_aggregate_are_proposed_as_queries(site: Site):
    site.orders()
    site.table("PLACES", "ID NUMBER(38,0), NAME VARCHAR", "VALUES (1, 'a')")
    join = "SELECT o.ID, o.DAY, p.NAME FROM {s}.ORDERS o LEFT JOIN {s}.PLACES p ON o.ID = p.ID".replace(
        "{s}", f"SETUPS.{site.schema}"
    )
    spec = written(site, "--query", join)
    assert (spec.query, spec.row_key, spec.changes.detector) == (join, ("ID",), "feed")
    groups = f"SELECT DAY, SUM(AMOUNT) AS AMOUNT\nFROM SETUPS.{site.schema}.ORDERS\nGROUP BY DAY"
    Path("query.sql").write_text(groups, encoding="utf-8")
    spec = written(site, "--query", "@query.sql", "--force")
    assert (spec.query, spec.row_key) == (groups, ())


def test_a_large_table_is_not_counted_unless_asked(site: Site):
    result = init(site, site.orders(), "--no-count")
    assert result.exit_code == 0, result.stderr
    assert "--count counts them in the warehouse" in result.stderr
    text = words()
    assert "Snowflake does not enforce it, and no value of it was counted." in text
    assert "TO DO: Set slices.start to the first month that has rows" in text


def test_a_datasource_made_in_tableau_keeps_its_columns_and_credentials(site: Site):
    site.orders()
    site.publish_extract("made", table="ORDERS", increment_key="DAY")
    spec = written(site, f"SETUPS.{site.schema}.ORDERS", datasource="made")
    assert spec.datasource.credentials is not None
    assert spec.datasource.credentials.password_env == "SNOWFLAKE_PASSWORD"
    assert site.run("--specs", "extracts.yaml", "plan", "made").exit_code == 0


def test_a_datasource_that_shows_something_else_is_refused_with_the_difference(site: Site):
    site.orders()
    site.publish_extract("made", table="ORDERS")
    result = init(site, site.orders("OTHER"), datasource="made")
    assert result.exit_code == WRONG_USAGE
    assert f"it reads SETUPS.{site.schema}.ORDERS, the spec names SETUPS.{site.schema}.OTHER" in result.stderr


def test_a_datasource_that_cannot_be_kept_by_key_is_refreshed_by_tableau_itself(site: Site):
    site.orders()
    site.publish_extract("unclear", custom_sql="SELECT ID, DAY, AMOUNT FROM ORDERS")
    spec = written(site, f"SETUPS.{site.schema}.ORDERS", datasource="unclear")
    assert (spec.delivery, spec.row_key) == ("trigger", ())
    assert "its query cannot be followed" in words()


@pytest.mark.long
def test_a_datasource_without_an_extract_is_refused(site: Site):
    site.publish_live("live")
    result = init(site, site.orders(), datasource="live")
    assert result.exit_code == WRONG_USAGE
    assert "it reads its source live" in result.stderr


def test_a_project_that_is_not_there_is_told_with_similar_names(site: Site):
    result = site.run("init", site.orders(), "--datasource", f"{site.project.name}x/orders")
    assert (result.exit_code, f"Similar names: '{site.project.name}'" in result.stderr) == (1, True)
