"""Batches of changes to several tables of one live-to-Hyper datasource: all of a batch or nothing, and errors that name the table."""

from __future__ import annotations

import uuid
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tableauhyperapi import Connection, CreateMode
from tableauserverclient.server.endpoint.exceptions import ServerResponseError

from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.sandbox.tableau.helpers import OVERWRITE, Admin, Looker, Publisher, rewritten
from tir_dagster_tests.sandbox.tableau.live import succeeded

COLUMNS = {
    "sales": "id BIGINT, product BIGINT, amount DOUBLE PRECISION",
    "products": "product BIGINT NOT NULL, name TEXT",
    "stores": "store BIGINT NOT NULL, region TEXT",
}
KEYED = ("products", "stores")
KEYS = (
    'ALTER TABLE "Extract"."products" ADD ASSUMED PRIMARY KEY (product)',
    'ALTER TABLE "Extract"."stores" ADD ASSUMED PRIMARY KEY (store)',
    'ALTER TABLE "Extract"."sales" ADD COLUMN store BIGINT',
    'ALTER TABLE "Extract"."sales" ADD ASSUMED FOREIGN KEY (product) REFERENCES "Extract"."products" (product)',
    'ALTER TABLE "Extract"."sales" ADD ASSUMED FOREIGN KEY (store) REFERENCES "Extract"."stores" (store)',
)
BEFORE = {"sales": [[1, 7, 1.5, 3], [2, 8, 2.5, 3]], "products": [[7, "desk"], [8, "lamp"]], "stores": [[3, "north"]]}
# Table: columns and rows.
Payload = Mapping[str, tuple[str, Sequence[str]]]


def hyper_file(hyper: Any, path: Path, tables: Payload, *more: str) -> Path:
    with Connection(hyper, path, CreateMode.CREATE_AND_REPLACE) as connection:
        connection.execute_command('CREATE SCHEMA "Extract"')
        for name, (columns, _) in tables.items():
            connection.execute_command(f'CREATE TABLE "Extract"."{name}" ({columns})')
        for statement in more:
            connection.execute_command(statement)
        for name, (_, rows) in tables.items():
            for row in rows:
                connection.execute_command(f'INSERT INTO "Extract"."{name}" VALUES {row}')
    return path


def equal(target: str, source: str) -> dict[str, str]:
    return {"op": "eq", "target-col": target, "source-col": source}


def action(kind: str, target: str, source: str, condition: Any = None) -> dict[str, Any]:
    tables = {
        "target-schema": "Extract",
        "target-table": target,
        "source-schema": "Extract",
        "source-table": source,
    }
    return {"action": kind, **tables, **({"condition": condition} if condition else {})}


@dataclass(frozen=True)
class LiveStar:
    """A live-to-Hyper datasource of three tables, and its client."""

    publisher: Publisher
    look: Looker
    datasource: Any

    def send(self, *actions: Any, payload: Payload) -> Any:
        """The job as the PATCH answers it."""
        file = hyper_file(self.look.hyper, self.publisher.folder / f"{uuid.uuid4().hex}.hyper", payload)
        endpoint = self.publisher.server.datasources
        return endpoint.update_hyper_data(
            self.datasource, request_id=str(uuid.uuid4()), actions=actions, payload=str(file)
        )

    def change(self, *actions: Any, payload: Payload) -> Any:
        """The finished job, whatever became of it."""
        return self.publisher.finished(self.send(*actions, payload=payload).id)

    def rows(self) -> dict[str, list[list[Any]]]:
        """All tables of one download."""
        extract = self.publisher.folder / f"{uuid.uuid4().hex}.hyper"
        with zipfile.ZipFile(self.publisher.download(self.datasource)) as archive:
            extract.write_bytes(archive.read("Data/Extracts/datasource.hyper"))
        with Connection(self.look.hyper, extract) as connection:
            return {
                name: connection.execute_list_query(f'SELECT * FROM "Extract"."{name}" ORDER BY 1') for name in COLUMNS
            }


@pytest.fixture
def live(publisher: Publisher, look: Looker, admin: Admin) -> LiveStar:
    admin.set(change_notes=True)
    tables = {
        "sales": (COLUMNS["sales"], ()),
        "products": (COLUMNS["products"], ("(7, 'desk')", "(8, 'lamp')")),
        "stores": (COLUMNS["stores"], ("(3, 'north')",)),
    }
    sales = [f'INSERT INTO "Extract"."sales" VALUES {row}' for row in ("(1, 7, 1.5, 3)", "(2, 8, 2.5, 3)")]
    file = hyper_file(look.hyper, publisher.folder / "star.hyper", tables, *KEYS, *sales)
    return LiveStar(publisher, look, publisher.publish(file, "Star", OVERWRITE))


# One batch: a product more, a product that has another name, sales replaced by their keys.
BATCH = (
    action("upsert", "products", "new products", equal("product", "product")),
    action("delete", "sales", "gone", equal("id", "id")),
    action("insert", "sales", "new sales"),
)
PAYLOAD = {
    "new products": (COLUMNS["products"], ("(8, 'lantern')", "(9, 'chair')")),
    "gone": ("id BIGINT", ("(2)",)),
    "new sales": (f"{COLUMNS['sales']}, store BIGINT", ("(2, 9, 3.5, 3)", "(5, 8, 4.5, 3)")),
}
AFTER = {
    "sales": [[1, 7, 1.5, 3], [2, 9, 3.5, 3], [5, 8, 4.5, 3]],
    "products": [[7, "desk"], [8, "lantern"], [9, "chair"]],
    "stores": BEFORE["stores"],
}


def test_one_batch_changes_several_tables_from_several_tables_of_its_payload(live: LiveStar) -> None:
    assert live.rows() == BEFORE
    job = live.change(*BATCH, payload=PAYLOAD)
    assert succeeded(job)
    assert job.notes == [
        "Extract.products: 1 rows updated, 1 rows inserted; Extract.sales: 1 rows deleted; Extract.sales: 2 rows inserted"
    ]
    assert live.rows() == AFTER


def test_a_changed_file_keeps_its_keys_and_its_document(live: LiveStar) -> None:
    before = live.publisher.download(live.datasource)
    live.change(*BATCH, payload=PAYLOAD)
    after = live.publisher.download(live.datasource)
    with zipfile.ZipFile(before) as old, zipfile.ZipFile(after) as new:
        assert new.read("datasource.tds") == old.read("datasource.tds")
        changed = live.publisher.folder / "changed.hyper"
        changed.write_bytes(new.read("Data/Extracts/datasource.hyper"))
    # The server takes it as a plain file only if its foreign keys are there still.
    live.publisher.publish(changed, "Star", OVERWRITE)


FAILING = {
    "a row that matches twice": (
        action("update", "stores", "twice", equal("store", "store")),
        ("twice", COLUMNS["stores"], ("(3, 'a')", "(3, 'b')")),
        "Action 4 (update) failed: Several rows of Extract.twice match one row of Extract.stores.",
    ),
    "no value for a key": (
        action("insert", "stores", "no key"),
        ("no key", "store BIGINT, region TEXT", ("(NULL, 'south')",)),
        "Action 4 (insert) failed: Extract.stores could not be changed: ",
    ),
    "a column of another table": (
        action("insert", "stores", "wrong"),
        ("wrong", COLUMNS["products"], ("(1, 'x')",)),
        "Action 4 (insert) failed: Columns ['product', 'name'] of the source table Extract.wrong are not in Extract.stores.",
    ),
    "a table that is not there": (
        action("delete", "regions", "gone", equal("id", "id")),
        ("unused", "id BIGINT", ()),
        "Action 4 (delete) failed: There was a problem retrieving table information for the target table.",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_an_action_that_fails_undoes_those_on_other_tables_and_names_its_table(live: LiveStar, name: str) -> None:
    failing, (table, columns, rows), why = FAILING[name]
    job = live.change(*BATCH, failing, payload={**PAYLOAD, table: (columns, rows)})
    assert not succeeded(job)
    assert job.notes[0].startswith(why)
    assert live.rows() == BEFORE


def test_readers_see_no_table_without_the_changes_of_the_others(live: LiveStar, admin: Admin) -> None:
    admin.fault("slow_job", path=live.datasource.id, seconds=0.3)
    job = live.send(*BATCH, payload=PAYLOAD)
    seen = []

    def over() -> bool:
        seen.append(live.rows())
        return live.publisher.server.jobs.get_by_id(job.id).completed_at is not None

    wait_for(over, "the job to end")
    assert seen[0] == BEFORE
    assert all(rows in (BEFORE, AFTER) for rows in seen)
    assert live.rows() == AFTER


@pytest.mark.parametrize(
    ("actions", "half", "sales"),
    [(1, False, BEFORE["sales"]), (2, False, AFTER["sales"][:1]), (2, True, AFTER["sales"][:2])],
    ids=["after the first table", "after the delete", "in the middle of the insert"],
)
def test_a_server_that_tears_a_batch_leaves_tables_that_do_not_fit(
    live: LiveStar, admin: Admin, actions: int, half: bool, sales: list[Any]
) -> None:
    admin.fault("torn_job", path=live.datasource.id, actions=actions, half=half, notes="The disk is full.")
    job = live.change(*BATCH, payload=PAYLOAD)
    assert (succeeded(job), job.notes) == (False, ["The disk is full."])
    found = live.rows()
    assert found == {**AFTER, "sales": [row for row in found["sales"] if row in sales]}
    assert len(found["sales"]) == len(sales)


def test_a_package_with_an_object_graph_needs_no_keys_in_its_file(live: LiveStar) -> None:
    """So tables that no foreign key can relate, since neither side is unique, are changed in place, too."""
    tables = {"sales": (f"{COLUMNS['sales']}, store BIGINT", ()), **{name: (COLUMNS[name], ()) for name in KEYED}}
    file = hyper_file(live.look.hyper, live.publisher.folder / "plain.hyper", tables)
    with pytest.raises(ServerResponseError, match="exactly one fact table"):
        live.publisher.publish(file, "Plain")
    made = live.publisher.download(live.datasource)
    member = ("Data/Extracts/datasource.hyper", file.read_bytes())
    package = rewritten(made, made.with_name("package.tdsx"), drop=".hyper", add=[member])
    assert live.publisher.publish(package, "Star", OVERWRITE).id == live.datasource.id
    job = live.change(BATCH[2], payload={"new sales": PAYLOAD["new sales"]})
    assert (job.notes, len(live.rows()["sales"])) == (["2 rows inserted"], 2)
