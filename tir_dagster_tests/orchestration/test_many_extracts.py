"""Many extracts at once: what they ask of the warehouse together, and that none of them starves or shows wrong rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tir_dagster.orchestration.sensing.watching import FRESH_SECONDS, SharedProbes
from tir_dagster.refresh.state.change_sets import new_id
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster.tableau.access import TableauAccess
from tir_dagster_tests.conftest import Sandbox, Warehouse
from tir_dagster_tests.hyper.helpers import bag
from tir_dagster_tests.packages import plain
from tir_dagster_tests.stages import Refresher

DATABASE, PROJECT = "MANY", "many extracts"
EXTRACTS, TABLES = 20, 5
LAST_CHANGE = "SYSTEM$LAST_CHANGE_COMMIT_TIME"


@pytest.fixture(scope="module")
def ready(sandbox: Sandbox) -> Sandbox:
    sandbox.prepare(DATABASE, PROJECT)
    return sandbox


def asked(warehouse: Warehouse) -> list[str]:
    """The statements since the last look."""
    statements = [query["sql"] for query in warehouse.queries()]
    warehouse.forget_queries()
    return statements


# Sensors


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def five_tables(ready: Sandbox, make_table) -> list[TableName]:
    return [make_table("K INT") for _ in range(TABLES)]


def test_twenty_sensors_over_five_tables_ask_one_query_in_each_round(access, warehouse, five_tables, run):
    clock, tokens = Clock(), []
    probes = SharedProbes(clock)
    # An extract reads one table or joins two: no two neighbours have the same ones.
    needs = {f"e{at}": [five_tables[at % TABLES], *five_tables[: at % 2]] for at in range(EXTRACTS)}
    for _ in range(3):
        run(f"INSERT INTO {five_tables[0].sql} VALUES (1)")
        warehouse.forget_queries()
        answers = {name: probes.probe(access, tables, asker=name) for name, tables in needs.items()}
        tokens.append(
            {name: answers[name][five_tables[0]].token for name, tables in needs.items() if five_tables[0] in tables}
        )
        # The first round learns which tables there are.
        assert tokens[:1] == tokens or len(asked(warehouse)) == 1
        clock.now += 2 * FRESH_SECONDS
    assert all(len(set(seen.values())) == 1 for seen in tokens), "all extracts of a table see the same change"
    assert len({seen["e0"] for seen in tokens}) == 3, "and each round sees its own"


def test_a_missing_table_costs_its_own_extract_a_query_and_the_others_nothing(access, warehouse, five_tables, run):
    clock = Clock()
    probes = SharedProbes(clock)

    def look() -> dict[str, str | None]:
        seen = {
            f"e{at}": probes.probe(access, [table], asker=f"e{at}")[table].token for at, table in enumerate(five_tables)
        }
        clock.now += 2 * FRESH_SECONDS
        return seen

    look()
    run(f"DROP TABLE {five_tables[3].sql}")
    assert [name for name, token in look().items() if token is None] == ["e3"]
    warehouse.forget_queries()
    assert [name for name, token in look().items() if token is None] == ["e3"]
    assert Counter(five_tables[3].name in statement for statement in asked(warehouse)) == {True: 1, False: 2}
    run(f"CREATE TABLE {five_tables[3].sql} (K INT)")
    assert None not in look().values()
    look()
    warehouse.forget_queries()
    assert None not in look().values()
    assert len(asked(warehouse)) == 1


# Refreshes


class Extract:
    """One extract, refreshed stage by stage in this process."""

    def __init__(self, sandbox: Sandbox, home: Path, spec: ExtractSpec) -> None:
        env = sandbox.env
        self.log: list[str] = []
        self.refresher = Refresher(
            spec,
            snowflake=SnowflakeAccess.from_environment(env),
            tableau=TableauAccess.from_environment(env),
            spark=None,
            home=home,
            env=env,
            log=self.log.append,
        )
        self.confirmed: Confirmation | None = None
        self.rows: Counter = Counter()

    def detect(self):
        """Everything before the first change of the extract."""
        looked = self.refresher.look(self.confirmed)
        surveyed = self.refresher.survey(looked)
        plan = self.refresher.plan(looked, surveyed, "changes")
        return looked, self.refresher.detect(looked, surveyed, plan, ident=new_id())[1]

    def refresh(self) -> None:
        with self.refresher.leased("test", wait_seconds=60):
            looked, change_set = self.detect()
            version = self.refresher.apply(looked, change_set)
            self.rows = Counter(tuple(map(plain, row)) for row in bag(version.extract).elements())
            self.confirmed = self.refresher.publish(looked, version).confirmation
            self.refresher.settle(self.confirmed)


@pytest.fixture
def shop(ready: Sandbox, run, tmp_path: Path, request) -> Iterator[dict[str, Extract]]:
    """Four extracts of one table, with different columns and joins, loaded one after the other."""
    run(f"USE SCHEMA {DATABASE}.PUBLIC")
    run(
        "CREATE OR REPLACE TABLE SALES (ID INT, PRODUCT INT, AMOUNT NUMBER(12,2), SOLD TIMESTAMP_NTZ, UPDATED TIMESTAMP_NTZ)"
    )
    run("ALTER TABLE SALES SET CHANGE_TRACKING = TRUE")
    run("CREATE OR REPLACE TABLE PRODUCTS (ID INT, NAME VARCHAR)")
    run("INSERT INTO PRODUCTS SELECT SEQ4(), 'p' || SEQ4() FROM TABLE(GENERATOR(ROWCOUNT => 7))")
    run(
        "INSERT INTO SALES SELECT SEQ4(), SEQ4() % 7, SEQ4() / 4, DATEADD('day', SEQ4(), '2025-01-01'::TIMESTAMP_NTZ), "
        "'2025-06-01'::TIMESTAMP_NTZ FROM TABLE(GENERATOR(ROWCOUNT => 60))"
    )
    detector = request.param
    changes = {"watermark": "UPDATED"} if detector == "watermark" else {"detector": detector}
    table = {"source": f"{DATABASE}.PUBLIC.SALES"}
    joined = {
        "query": f"SELECT s.ID, s.AMOUNT, p.NAME FROM {DATABASE}.PUBLIC.SALES s LEFT JOIN {DATABASE}.PUBLIC.PRODUCTS p "
        "ON s.PRODUCT = p.ID"
    }
    shapes = {
        # First: it pins both tables, and the others the same version.
        "joined": joined,
        "wide": table,
        "narrow": {**table, "columns": ["ID", "AMOUNT"]},
        "sliced": {**table, "slices": {"column": "SOLD", "by": "month", "start": "2025-01"}},
    }
    extracts = {}
    for name, shape in shapes.items():
        declared = {
            "name": name,
            **shape,
            "row_key": ["ID"],
            "changes": changes,
            "datasource": {"project": PROJECT, "name": f"{detector} {name}"},
            "thresholds": {"quiet_period": "0 seconds", "full_share": 1.0},
            "verify": {"slices_per_run": 0},
        }
        extracts[name] = Extract(ready, tmp_path, spec_from_mapping(declared, "many"))
        extracts[name].refresh()
    yield extracts
    run("USE SCHEMA SRC.PUBLIC")


def change(run) -> None:
    run("UPDATE SALES SET AMOUNT = AMOUNT + 1, UPDATED = '2025-06-02' WHERE ID IN (3, 4)")
    run("DELETE FROM SALES WHERE ID = 5")
    run("INSERT INTO SALES VALUES (100, 2, 9.5, '2025-02-03', '2025-06-02')")


SHOWN = {
    "wide": "ID, PRODUCT, AMOUNT, SOLD, UPDATED FROM SALES",
    "narrow": "ID, AMOUNT FROM SALES",
    "sliced": "ID, PRODUCT, AMOUNT, SOLD, UPDATED FROM SALES",
    "joined": "s.ID, s.AMOUNT, p.NAME FROM SALES s LEFT JOIN PRODUCTS p ON s.PRODUCT = p.ID",
}
# A statement that reads what changed: the feed, or a comparison with the old version.
READS_CHANGES = {"feed": r"CHANGES\(", "watermark": r"-1 AS TIR_N", "diff": r"-1 AS TIR_N"}
# A plain table's changes are asked for in the same words; `diff` compares what the extract shows, and a query its own rows.
READERS = {"feed": 1, "watermark": 2, "diff": 3}


DETECTORS = ["feed", "watermark", pytest.param("diff", marks=pytest.mark.long)]


@pytest.mark.parametrize("shop", DETECTORS, indirect=True)
def test_extracts_of_one_table_show_one_version_and_share_one_read_of_its_changes(shop, warehouse, run, request):
    detector = request.node.callspec.params["shop"]
    change(run)
    warehouse.forget_queries()
    with ThreadPoolExecutor(len(shop)) as pool:
        list(pool.map(Extract.refresh, shop.values()))
    reads = [sql for sql in asked(warehouse) if re.search(READS_CHANGES[detector], sql)]
    assert len(reads) == READERS[detector], reads
    assert len({extract.confirmed.source_version for extract in shop.values()}) == 1
    check_rows(shop, run)


@pytest.mark.parametrize("shop", ["feed"], indirect=True)
def test_an_extract_reads_changes_itself_where_the_shared_ones_are_gone(shop, run, tmp_path):
    change(run)
    shop["wide"].refresh()
    (note,) = (tmp_path / "shared").glob("changes-*.json")
    note.write_text(json.dumps({**json.loads(note.read_text()), "query": "00000000-gone"}))
    shop["narrow"].refresh()
    assert "the changes that another extract has read could not be used; they are read again" in shop["narrow"].log
    for damaged in (tmp_path / "shared").glob("*.json"):
        damaged.write_text("{")
    for name in ("sliced", "joined"):
        shop[name].refresh()
    check_rows(shop, run)


def check_rows(shop: dict[str, Extract], run) -> None:
    for name, extract in shop.items():
        assert extract.rows == Counter(tuple(map(plain, row)) for row in run(f"SELECT {SHOWN[name]}")), name
