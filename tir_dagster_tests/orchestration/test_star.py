"""An extract of several related tables: each follows its own source, Tableau finds how they are related, nobody sees one without the other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauhyperapi import HyperProcess, Telemetry

from tir_dagster.changes.plan import Reason
from tir_dagster.errors import DatasourceError, ExtractError, GuardError, SpecError, VerificationError
from tir_dagster.hyper.engine import connect
from tir_dagster.refresh import survey
from tir_dagster.refresh.context import tableau_for
from tir_dagster.refresh.deliveries import trigger
from tir_dagster.refresh.rollback import make_version, plan_rollback
from tir_dagster.refresh.verify import ExtractVerification
from tir_dagster.sandbox.tableau.packages import SnowflakeConnection
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.hyper.helpers import run
from tir_dagster_tests.orchestration.star import DATABASE, PROJECT, Star
from tir_dagster_tests.packages import document_of, plain, untouched
from tir_dagster_tests.star_package import EXTRACT_NAMES, ROWS, TABLES, create_star, star_package

MARCH = "'2025-03-05'::DATE"


@pytest.fixture(scope="module")
def prepared(sandbox: Sandbox) -> Sandbox:
    sandbox.prepare(DATABASE, PROJECT)
    return sandbox


@pytest.fixture
def stars(prepared, spark, tmp_path) -> Iterator[Any]:
    made: list[Star] = []

    def make(**options: Any) -> Star:
        star = Star(prepared, spark, tmp_path, **options)
        made.append(star)
        for number in "12":
            star.act(("customer", number, f"'customer {number}'"))
        star.act(("entitle", "'north'", "'ann, bob'"))
        rows = ", ".join(f"({key}, {1 + key % 2}, 'north', {MARCH}, 'v', '2025-01-01')" for key in range(20))
        star.sql(f"INSERT INTO SALES VALUES {rows}")
        return star

    yield make
    for star in made:
        star.close()


@pytest.fixture
def star(stars) -> Star:
    star: Star = stars()
    star.refresh()
    assert star.published_rows() == star.source_rows()
    return star


def moved(star: Star) -> dict[str, tuple[int, int]]:
    """Rows removed and added by table."""
    manifest = star.version.manifest
    return {name: (part["rows_purged"], part["rows_appended"]) for name, part in manifest["tables"].items()}


def test_a_change_of_a_dimension_moves_one_row(star: Star):
    star.act(("customer", "1", "'renamed'"))
    plan = star.refresh()

    assert moved(star) == {"SALES": (0, 0), "CUSTOMERS": (1, 1), "ENTITLEMENTS": (0, 0)}
    assert [star.version.manifest[name] for name in ("keys", "rows_purged", "rows_appended")] == [1, 1, 1]
    assert plan.sentence().endswith(
        "incremental refresh: CUSTOMERS 1 keys in 1 slices: 1 rows removed, 1 added (SALES and ENTITLEMENTS as before)."
    )
    assert star.published_rows() == star.source_rows()


def test_a_change_of_the_entitlements_alone_moves_nothing_else(star: Star):
    before = star.version.of("SALES").manifest
    star.act(("entitle", "'north'", "'ann'"))
    star.act(("entitle", "'south'", "'bob'"))
    star.refresh()

    assert moved(star) == {"SALES": (0, 0), "CUSTOMERS": (0, 0), "ENTITLEMENTS": (1, 2)}
    assert star.version.of("SALES").manifest["fingerprint"] == before["fingerprint"]
    assert star.published_rows() == star.source_rows()


def test_all_tables_show_one_version_of_the_source(star: Star):
    star.act(("customer", "1", "'renamed'"))
    star.act(("sale", "3", "'w'"))
    looked = star.refresher.look(star.confirmed)
    surveyed = star.refresher.survey(looked)
    assert len({surveyed.of(table).version for table in star.spec.parts}) == 1


def test_a_change_right_after_the_token_of_an_unchanged_table_is_found_next_time(stars, monkeypatch):
    star: Star = stars()
    star.sql("ALTER TABLE CUSTOMERS SET CHANGE_TRACKING = TRUE")
    tables = star.mapping()["tables"]
    tables[0]["changes"] = {"detector": "feed"}
    # A comparison of whole slices would repair it.
    star.settings = {"tables": tables, "verify": {"slices_per_run": 0}}
    star.refresher = star.new_refresher()
    star.refresh()
    star.act(("sale", "3", "'w'"))
    real, readings = survey.read_tokens, []

    def read_tokens(*args: Any) -> Any:
        readings.append(real(*args))
        if len(readings) == 1:
            # The pinned version shows it, and the token does not.
            star.act(("customer", "1", "'renamed'"))
        return readings[-1]

    monkeypatch.setattr(survey, "read_tokens", read_tokens)
    star.refresh()
    assert len(readings) > 1
    monkeypatch.undo()
    star.refresh()
    assert star.published_rows() == star.source_rows()


def test_slices_stay_verified_while_only_another_table_changes(stars):
    star: Star = stars(settings={"verify": {"slices_per_run": 1}})
    star.act(("sell", "50", "1", "'north'", "'2025-04-05'::DATE", "'v'"))
    star.refresh()
    star.act(("sale", "3", "'w'"))
    star.refresh()
    known = star.version.of("SALES").manifest["verified"]
    assert known
    star.act(("customer", "1", "'renamed'"))
    star.refresh()
    assert moved(star)["SALES"] == (0, 0)
    assert star.version.of("SALES").manifest["verified"] == known


KEYS = "SELECT conname, contype FROM pg_catalog.pg_constraint"


@pytest.mark.parametrize("delivery", ["republish", "patch"])
def test_the_published_file_declares_the_keys_that_tableau_relates_tables_by(stars, delivery):
    star = stars(delivery=delivery)
    star.refresh()
    kinds = Counter(kind for _, kind in star.published({"keys": KEYS})["keys"])
    assert kinds == {"p": 2, "f": 2}
    with connect(star.version.extract) as connection:
        assert connection.execute_list_query(KEYS) == [], "Hyper believes keys, so files that are compared have none"


def test_a_patch_brings_all_tables_in_one_request(stars, monkeypatch):
    star = stars(delivery="patch")
    star.refresh()
    sent = batches(monkeypatch)
    star.act(("customer", "3", "'new'"))
    star.act(("sell", "50", "3", "'south'", MARCH, "'v'"))
    star.act(("entitle", "'south'", "'ann'"))
    star.refresh()

    (actions,) = sent
    assert [(action["action"], action["target-table"]) for action in actions] == [
        (kind, table) for table in ("CUSTOMERS", "ENTITLEMENTS", "SALES") for kind in ("delete", "insert")
    ], "what is referred to comes first"
    assert star.published_rows() == star.source_rows()


def test_a_patch_that_is_too_large_goes_table_by_table_those_that_others_refer_to_first(stars, monkeypatch):
    star = stars(delivery="patch")
    datasource = replace(star.refresher.spec.datasource, patch_limit_mb=1.0)
    star.refresher.change(spec=replace(star.refresher.spec, datasource=datasource))
    star.refresh()
    sent = batches(monkeypatch)
    lines: list[str] = []
    star.refresher.listen(lines.append)
    long = Random(1)
    star.act(("customer", "3", f"'{long.randbytes(400_000).hex()}'"))
    star.act(("sell", "50", "3", "'south'", MARCH, f"'{long.randbytes(400_000).hex()}'"))
    star.act(("entitle", "'south'", "'ann'"))
    star.refresh()

    assert [actions[0]["target-table"] for actions in sent] == ["CUSTOMERS", "ENTITLEMENTS", "SALES"]
    assert any("sent table by table, CUSTOMERS, ENTITLEMENTS, SALES" in line for line in lines)
    assert star.published_rows() == star.source_rows()


def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """The actions of each request that changes data, as they are sent."""
    sent: list[list[dict[str, Any]]] = []
    endpoint = TSC.server.endpoint.Endpoint
    real = endpoint.patch_request

    def patch_request(self: Any, url: str, data: Any, *args: Any, **others: Any) -> Any:
        sent.append(json.loads(data)["actions"])
        return real(self, url, data, *args, **others)

    monkeypatch.setattr(endpoint, "patch_request", patch_request)
    return sent


# What the rows must keep


def test_a_referred_row_without_a_key_is_refused_before_anything_is_published(star: Star):
    star.sql("INSERT INTO CUSTOMERS VALUES (NULL, 'nobody')")
    with pytest.raises(GuardError, match="1 rows of CUSTOMERS have no ID, by which other tables refer to it"):
        star.refresh()
    star.sql("DELETE FROM CUSTOMERS WHERE ID IS NULL")
    star.refresh()
    assert star.published_rows() == star.source_rows()


def test_two_referred_rows_of_one_key_are_refused(star: Star):
    star.sql("INSERT INTO CUSTOMERS VALUES (1, 'again')")
    with pytest.raises(GuardError, match="1 values of ID are in several rows of CUSTOMERS, and SALES refers to it"):
        star.refresh()


def test_rows_without_a_partner_are_told_where_all_should_have_one(stars):
    star = stars()
    relationships = star.mapping()["relationships"]
    relationships[0]["integrity"] = "all"
    star.settings = {"relationships": relationships}
    star.refresher = star.new_refresher()
    star.act(("sell", "99", "7", "'north'", MARCH, "'v'"))
    star.refresh()
    assert any("1 rows of SALES refer to rows that CUSTOMERS does not have" in line for line in star.refresher.warnings)


def test_a_dimension_that_is_nearly_empty_stops_the_refresh_and_is_named(star: Star):
    star.sql("DELETE FROM CUSTOMERS")
    with pytest.raises(GuardError, match="the source of CUSTOMERS is empty, its table has 2 rows"):
        star.refresh(allow_empty=False)


def test_a_wrong_row_of_a_dimension_is_found_and_its_slice_is_replaced(star: Star):
    run(star.version.extract, """UPDATE "Extract"."CUSTOMERS" SET "NAME" = 'wrong' WHERE "ID" = 1""")
    confirmed = star.confirmed
    assert confirmed is not None
    verification = ExtractVerification(star.refresher.context, confirmed)
    finding = verification.equals_source()
    assert not finding.passed
    assert list(finding.slices) == ["CUSTOMERS · all"]
    differences = verification.differing_rows(finding.slices)["CUSTOMERS"]
    assert [(found.kind, found.key, found.columns) for found in differences.found] == [("stale", (1,), ("NAME",))]

    star.refresh(resync_in={"CUSTOMERS": ("all",)}, hinted=True)
    assert ExtractVerification(star.refresher.context, star.confirmed or confirmed).equals_source().passed
    assert star.published_rows() == star.source_rows()


def test_a_file_that_does_not_hold_what_was_read_is_named_with_its_table(star: Star, monkeypatch):
    from tir_dagster.refresh import apply as stage

    real = stage.fill_extract

    def spoilt(workspace: Any, *args: Any, **options: Any) -> Any:
        applied = real(workspace, *args, **options)
        run(workspace.extract, """UPDATE "Extract"."CUSTOMERS" SET "NAME" = 'wrong'""")
        return applied

    monkeypatch.setattr(stage, "fill_extract", spoilt)
    star.act(("customer", "1", "'renamed'"))
    with pytest.raises(VerificationError, match="does not hold in its table CUSTOMERS the rows that were read"):
        star.refresh()


# What the spec says


def test_another_set_of_tables_loads_everything(star: Star):
    mapping = star.mapping()
    mapping["tables"].pop()
    mapping["relationships"].pop()
    star.refresher = refresher_of(star, mapping)
    before = star.version
    assert star.refresh().reason is Reason.DEFINITION_CHANGED
    assert set(star.version.tables) == {"SALES", "CUSTOMERS"}
    assert star.refresh().decision == "none"
    looked = star.refresher.look(star.confirmed)
    with pytest.raises(ExtractError, match=f"the spec declares other tables than version {before.id} has"):
        plan_rollback(star.refresher.context, looked, before.id)


def test_another_main_table_loads_everything(star: Star):
    mapping = star.mapping()
    customers, sales, _ = mapping["tables"]
    customers["main"], sales["main"] = True, False
    star.refresher = refresher_of(star, mapping)
    assert star.refresh().reason is Reason.DEFINITION_CHANGED
    assert star.version.tables[0] == "CUSTOMERS"
    assert star.refresh().decision == "none"


def test_an_older_version_is_not_restored_under_relationships_that_its_file_cannot_declare(star: Star):
    before = star.version
    mapping = star.mapping()
    mapping["relationships"][0] = {"table": "CUSTOMERS", "refers_to": "SALES", "columns": {"ID": "K"}}
    mapping["relationships"][1] = {"table": "ENTITLEMENTS", "refers_to": "CUSTOMERS", "columns": {"USERS": "NAME"}}
    star.refresher = refresher_of(star, mapping)
    star.act(("customer", "1", "'renamed'"))
    star.refresh()
    looked = star.refresher.look(star.confirmed)
    rollback = plan_rollback(star.refresher.context, looked, before.id)
    with pytest.raises(GuardError, match="so its file cannot declare CUSTOMERS → SALES"):
        make_version(star.refresher.context, looked, rollback)


def test_an_extract_of_one_table_becomes_one_of_several_and_back(stars):
    star = stars()
    several = star.mapping()
    one = {name: value for name, value in several.items() if name not in ("tables", "relationships")}
    sales = next(table for table in several["tables"] if table["name"] == "SALES")
    one |= {name: value for name, value in sales.items() if name not in ("name", "main")}
    for mapping, reason in (
        (one, Reason.FIRST_LOAD),
        (several, Reason.DEFINITION_CHANGED),
        (one, Reason.DEFINITION_CHANGED),
        (several, Reason.DEFINITION_CHANGED),
    ):
        star.refresher = refresher_of(star, mapping)
        assert star.refresh().reason is reason
        assert star.refresh().decision == "none"
    assert star.published_rows() == star.source_rows()


def refresher_of(star: Star, mapping: dict[str, Any]) -> Any:
    star.settings = {}
    made = star.new_refresher()
    made.change(spec=spec_from_mapping(mapping, "a star"))
    return made


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"CUSTOMR": "ID"}, r"relationships\[0\].columns names CUSTOMR, which SALES does not have. It has K, CUSTOMER"),
        ({"CUSTOMER": "NO"}, r"relationships\[0\].columns names NO, which CUSTOMERS does not have. It has ID, NAME"),
        (
            {"CUSTOMER": "NAME"},
            r"relates SALES.CUSTOMER \(.*\) to CUSTOMERS.NAME \(TEXT\): Tableau relates columns of one",
        ),
    ],
)
def test_a_relationship_over_columns_that_are_not_there_is_refused(stars, columns, message):
    star = stars()
    mapping = star.mapping()
    mapping["relationships"][0]["columns"] = columns
    star.refresher = refresher_of(star, mapping)
    with pytest.raises(SpecError, match=message):
        star.refresh()


def test_what_the_keys_of_a_file_cannot_say_is_refused(stars):
    star = stars()
    mapping = star.mapping()
    mapping["relationships"][1] = {
        "table": "ENTITLEMENTS",
        "refers_to": "SALES",
        "columns": ["REGION"],
        "cardinality": "many_to_many",
    }
    star.refresher = refresher_of(star, mapping)
    with pytest.raises(SpecError, match=r"ENTITLEMENTS → SALES is many_to_many.*Build the datasource in Tableau"):
        star.refresh()


# A datasource that people built


@pytest.fixture
def taken_over(stars, prepared, tmp_path) -> Star:
    """A package of several logical tables, published by somebody, and a spec for it."""
    star: Star = stars()
    place = f"{DATABASE}.{star.schema}"
    create_star(star.sql, place)
    connection = SnowflakeConnection(
        server=f"{star.env['SNOWFLAKE_ACCOUNT']}.snowflakecomputing.com",
        dbname=DATABASE,
        schema=star.schema,
        warehouse="WH",
        role="SYSADMIN",
        username=star.env["SNOWFLAKE_USER"],
    )
    target = tmp_path / f"{star.name}.tdsx"
    with HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process:
        star_package(target, connection, rows=ROWS, hyper=process.endpoint)
    with prepared.tableau() as server:
        (project,) = [one for one in TSC.Pager(server.projects) if one.name == PROJECT]
        server.datasources.publish(TSC.DatasourceItem(project.id, name=star.name), str(target), mode="CreateNew")
    keys = {"SALES": ["SALE_ID"], "PRODUCTS": ["PRODUCT"], "STORES": ["STORE"], "ENTITLEMENTS": ["USERNAME", "REGION"]}
    mapping = {
        "name": star.name,
        "datasource": {"project": PROJECT, "name": star.name},
        "tables": [{"name": name, "source": f"{place}.{name}", "row_key": key} for name, key in keys.items()],
        "relationships": [
            {"table": "SALES", "refers_to": "PRODUCTS", "columns": ["PRODUCT"], "integrity": "all"},
            {"table": "SALES", "refers_to": "STORES", "columns": ["STORE"]},
            {
                "table": "STORES",
                "refers_to": "ENTITLEMENTS",
                "columns": ["REGION"],
                "cardinality": "many_to_many",
            },
        ],
        "thresholds": {"quiet_period": "0 seconds", "full_share": 1.0},
    }
    star.refresher = refresher_of(star, mapping)
    return star


def test_a_package_of_several_logical_tables_is_taken_over_and_kept_to_the_letter(taken_over: Star, prepared, tmp_path):
    before = document_of(tmp_path / f"{taken_over.name}.tdsx")
    taken_over.refresh()
    assert stored_rows(taken_over) == source_rows(taken_over)

    taken_over.sql("UPDATE PRODUCTS SET COLOR = 'blue' WHERE PRODUCT = 11")
    taken_over.sql("INSERT INTO ENTITLEMENTS VALUES ('cleo', 'north')")
    plan = taken_over.refresh()
    assert plan.decision == "incremental"
    assert moved(taken_over) == {"SALES": (0, 0), "PRODUCTS": (1, 1), "STORES": (0, 0), "ENTITLEMENTS": (0, 1)}
    assert stored_rows(taken_over) == source_rows(taken_over)
    with prepared.tableau() as server:
        (datasource,) = server.datasources.filter(name=taken_over.name)
        seen = Path(server.datasources.download(datasource.id, filepath=str(tmp_path / "seen")))
    assert untouched(document_of(seen)) == untouched(before), "something else than the refresh information changed"


def test_a_package_that_does_not_fit_is_refused_with_all_differences(taken_over: Star):
    spec = taken_over.refresher.spec
    tables = tuple(
        replace(table, name="PRODUKTE", source=f"{DATABASE}.{taken_over.schema}.CUSTOMERS", row_key=("ID",))
        if table.name == "PRODUCTS"
        else table
        for table in spec.tables
    )
    relationships = tuple(
        replace(one, refers_to="PRODUKTE", columns={"PRODUCT": "ID"}) if one.refers_to == "PRODUCTS" else one
        for one in spec.relationships
    )
    taken_over.refresher.change(spec=replace(spec, tables=tables, relationships=relationships))
    with pytest.raises(DatasourceError, match=r"does not show what the spec says: .*PRODUKTE"):
        taken_over.refresh()


def test_tableaus_own_refresh_is_started_when_any_table_changed(taken_over: Star, prepared):
    with prepared.tableau() as server:
        (datasource,) = server.datasources.filter(name=taken_over.name)
        server.datasources.populate_connections(datasource)
        (connection,) = datasource.connections
        connection.username, connection.password = (
            taken_over.env[f"SNOWFLAKE_{name}"] for name in ("USER", "PASSWORD")
        )
        connection.embed_password = True
        server.datasources.update_connection(datasource, connection)
    spec = taken_over.refresher.spec
    taken_over.refresher.change(spec=replace(spec, delivery="trigger", relationships=()))
    context = taken_over.refresher.context
    context = replace(context, tableau=tableau_for(context.tableau, context.spec))

    def refresh(confirmed: Any) -> Any:
        watched = trigger.watch(context)
        plan = trigger.plan_trigger(context.spec, watched, confirmed, "changes")
        return trigger.refresh_on_server(context, plan, watched).confirmation if plan.decision != "none" else None

    confirmed = refresh(None)
    assert stored_rows(taken_over) == source_rows(taken_over)
    assert refresh(confirmed) is None
    taken_over.sql("UPDATE STORES SET CITY = 'Basel' WHERE STORE = 100")
    assert refresh(confirmed) is not None
    assert stored_rows(taken_over) == source_rows(taken_over)


def source_rows(star: Star) -> dict[str, Counter[tuple[Any, ...]]]:
    return {
        table.name: Counter(
            tuple(map(plain, row))
            for row in star.sql(f"SELECT {names(table)} FROM {DATABASE}.{star.schema}.{table.name}")
        )
        for table in TABLES
    }


def stored_rows(star: Star) -> dict[str, Counter[tuple[Any, ...]]]:
    queries = {table.name: f'SELECT * FROM "Extract"."{EXTRACT_NAMES[table.name]}"' for table in TABLES}
    return {name: Counter(tuple(map(plain, row)) for row in rows) for name, rows in star.published(queries).items()}


def names(table: Any) -> str:
    return ", ".join(column.remote_name for column in table.columns)


def test_a_small_table_may_lose_more_of_its_rows_than_others(star: Star):
    star.sql("DELETE FROM CUSTOMERS WHERE ID = 1")
    with pytest.raises(GuardError, match="1 of 2 rows of CUSTOMERS would vanish"):
        star.refresh(allow_empty=False)
    mapping = star.mapping()
    for table in mapping["tables"]:
        if table["name"] == "CUSTOMERS":
            table["delete_share"] = 0.9
    star.refresher = refresher_of(star, mapping)
    star.refresh(allow_empty=False)
    assert moved(star)["CUSTOMERS"] == (1, 0)


def test_a_table_that_was_meant_to_be_empty_does_not_stop_a_full_load(star: Star):
    star.sql("DELETE FROM ENTITLEMENTS")
    star.refresh()
    star.sql("UPDATE SALES SET V = 'again'")
    star.refresh("full", allow_empty=False)
    assert star.published_rows() == star.source_rows()


def test_tables_in_another_order_change_nothing(star: Star):
    mapping = star.mapping()
    mapping["tables"] = mapping["tables"][::-1]
    star.refresher = refresher_of(star, mapping)
    assert star.refresh().decision == "none"
