"""An extract of several tables as people meet it: in Dagster's assets, `tir plan`, `verify`, `why`, `history`, `rollback` and `status`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import dagster as dg
import pytest
import yaml
from click.testing import CliRunner

from tir_dagster.cli.main import tir
from tir_dagster.definitions import build_defs
from tir_dagster.orchestration.home import dagster_instance, tir_home
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.refresh.state.versions import Version, VersionStore
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.hyper.helpers import run
from tir_dagster_tests.orchestration.star import DATABASE, PROJECT, Star

FAILED = 1
Say = Callable[..., Any]


@pytest.fixture(scope="module")
def star(sandbox: Sandbox, spark, tmp_path_factory) -> Iterator[Star]:
    """A star whose first version is published, by commands."""
    sandbox.prepare(DATABASE, PROJECT)
    folder = tmp_path_factory.mktemp("star")
    with pytest.MonkeyPatch.context() as patch:
        star = Star(sandbox, spark, folder)
        for name, value in star.env.items():
            patch.setenv(name, value)
        patch.setenv("TIR_HOME", str(folder / "state"))
        patch.setenv("DAGSTER_HOME", str(folder / "dagster"))
        specs = folder / "extracts.yaml"
        specs.write_text(yaml.safe_dump({"extracts": [star.mapping()]}), encoding="utf-8")
        patch.setenv("TIR_SPECS", str(specs))
        for number in "12":
            star.act(("customer", number, f"'customer {number}'"))
        star.act(("entitle", "'north'", "'ann'"))
        star.sql(
            "INSERT INTO SALES VALUES (1, 1, 'north', '2025-03-05', 'a', '2025-01-01'), (2, 2, 'north', '2025-04-05', 'b', '2025-01-01')"
        )
        say("refresh", star.name)
        yield star
        star.close()


def say(*arguments: str, code: int = 0) -> Any:
    """Run a command: its JSON with `--json`, else what it printed."""
    result = CliRunner().invoke(tir, list(arguments))
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if "--json" in arguments and result.stdout else result.output


def newest(star: Star) -> Version:
    version = VersionStore(tir_home() / "extracts" / star.name / "versions").latest()
    assert version is not None
    return version


def test_a_plan_tells_of_each_table(star: Star):
    star.act(("customer", "1", "'renamed'"))
    plan = say("plan", star.name, "--json")
    assert {name: part["decision"] for name, part in plan["tables"].items()} == {
        "SALES": "none",
        "CUSTOMERS": "incremental",
        "ENTITLEMENTS": "none",
    }
    assert plan["tables"]["CUSTOMERS"]["keys"] == {"changed": 1, "new": 0, "gone": 0}
    assert (plan["rows"], plan["rows_after"]) == (5, 5)
    text = say("plan", star.name)
    assert "SALES: as it is" in text
    assert "found by    diff on" in text

    outcome = say("refresh", star.name, "--json")
    assert (outcome["rows_purged"], outcome["rows_appended"], outcome["slices"]) == (1, 1, ["CUSTOMERS · all"])
    assert star.published_rows() == star.source_rows()
    assert say("plan", star.name, "--json")["decision"] == "none"


def test_the_assets_show_all_tables(star: Star):
    definitions = build_defs(specs=(star.spec,))
    graph = definitions.resolve_asset_graph()
    parents = graph.get(extract_keys(star.spec).changed_keys).parent_keys
    assert {key.path[-1] for key in parents} == {"source_table", "CUSTOMERS", "ENTITLEMENTS"}
    with dagster_instance() as instance:
        event = instance.get_latest_materialization_event(extract_keys(star.spec).published_datasource)
    assert event is not None
    materialization = event.asset_materialization
    assert materialization is not None
    metadata = materialization.metadata
    assert metadata["tir/keys_by_table"].value == {"SALES": 0, "CUSTOMERS": 1, "ENTITLEMENTS": 0}
    assert metadata["dagster/row_count"].value == 5
    schema = metadata["dagster/column_schema"].value
    assert isinstance(schema, dg.TableSchema)
    assert {"SALES.K", "CUSTOMERS.NAME", "ENTITLEMENTS.USERS"} <= {column.name for column in schema.columns}


def test_a_wrong_row_is_found_in_its_table_explained_repaired_and_rolled_back(star: Star):
    good = newest(star).id
    star.act(("customer", "2", "'as it must be'"))
    say("refresh", star.name)
    version = newest(star)
    run(version.extract, """UPDATE "Extract"."CUSTOMERS" SET "NAME" = 'spoilt' WHERE "ID" = 2""")

    wrong = say("verify", star.name, "--all-slices", "--rows", "--json", code=FAILED)
    assert list(wrong["slices"]) == ["CUSTOMERS · all"]
    (row,) = wrong["rows"]
    assert (row["kind"], row["slice"], row["key"], row["columns"]) == (
        "stale",
        "CUSTOMERS · all",
        {"ID": "2"},
        ["NAME"],
    )
    assert row["last_replaced"] == version.id

    status = say("status", "--json", code=FAILED)
    assert any("CUSTOMERS · all" in note for note in status["lines"][0]["notes"])

    repaired = say("verify", star.name, "--all-slices", "--repair", "--json")
    assert (repaired["repaired"], repaired["steps"]) == (True, ["replaced the slices that differ"])
    assert star.published_rows() == star.source_rows()

    why = say("why", star.name, "--table", "customers", "--key", "2", "--json")
    assert why["subject"] == "CUSTOMERS, ID = 2"
    assert ["customer 2", "as it must be"] in [step["changes"].get("NAME") for step in why["steps"]]
    unknown = say("why", star.name, "--table", "custmers", "--key", "2", code=2)
    assert "has no table 'custmers'. It has SALES, CUSTOMERS, ENTITLEMENTS." in unknown

    history = say("history", star.name, "--json")
    assert history["versions"][0]["slices"] == 4

    say("rollback", star.name, "--to", good)
    names = {row[1] for row in star.published_rows()["CUSTOMERS"]}
    assert "str customer 2" in names
    say("refresh", star.name)
    assert star.published_rows() == star.source_rows()


def test_slices_that_are_asked_for_are_those_of_the_main_table(star: Star):
    star.sql("UPDATE SALES SET V = 'without a stamp' WHERE K = 1")
    outcome = say("refresh", star.name, "--slices", "2025-03", "--json")
    assert (outcome["slices"], outcome["rows_appended"]) == (["SALES · 2025-03"], 1)
    assert star.published_rows() == star.source_rows()
