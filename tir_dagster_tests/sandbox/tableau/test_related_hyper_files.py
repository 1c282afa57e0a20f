"""Plain .hyper files of several tables: which the server takes, and the data model that it makes of their foreign keys."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauhyperapi import Connection, CreateMode
from tableauserverclient.server.endpoint.exceptions import ServerResponseError

from tir_dagster.sandbox.tableau.archive import BadPackageError
from tir_dagster.sandbox.tableau.extracts import ForeignKey, StoredTable
from tir_dagster.sandbox.tableau.hyper_model import star
from tir_dagster_tests.sandbox.tableau.helpers import OVERWRITE, Admin, Looker, Publisher

TABLES = (
    'CREATE TABLE {s}."products" (id BIGINT NOT NULL, name TEXT, ASSUMED PRIMARY KEY (id))',
    'CREATE TABLE {s}."days" (y INT NOT NULL, d INT NOT NULL, name TEXT, ASSUMED PRIMARY KEY (y, d))',
    'CREATE TABLE {s}."sales" (id BIGINT, product BIGINT, "the year" INT, "the day" INT, amount DOUBLE PRECISION)',
)
KEYS = (
    'ALTER TABLE {s}."sales" ADD ASSUMED FOREIGN KEY (product) REFERENCES {s}."products" (id)',
    'ALTER TABLE {s}."sales" ADD ASSUMED FOREIGN KEY ("the day", "the year") REFERENCES {s}."days" (d, y)',
)
ROWS = ("INSERT INTO {s}.\"products\" VALUES (7, 'desk')", 'INSERT INTO {s}."sales" VALUES (1, 7, 2026, 120, 9.5)')


def related_file(hyper: Any, path: Path, *statements: str, schema: str = "Extract") -> Path:
    with Connection(hyper, path, CreateMode.CREATE_AND_REPLACE) as connection:
        connection.catalog.create_schema_if_not_exists(schema)
        for statement in statements:
            connection.execute_command(statement.replace("{s}", f'"{schema}"'))
    return path


def refused(publisher: Publisher, file: Path) -> ServerResponseError:
    with pytest.raises(ServerResponseError) as error:
        publisher.publish(file)
    assert list(publisher.server.datasources.filter(project_name=publisher.project.name)) == []
    return error.value


@pytest.mark.parametrize("schema", ["Extract", "public"])
def test_declared_keys_become_relationships(publisher: Publisher, hyper: Any, look: Looker, schema: str) -> None:
    file = related_file(hyper, publisher.folder / "star.hyper", *TABLES, *KEYS, *ROWS, schema=schema)
    datasource = publisher.publish(file)
    assert (datasource.datasource_type, datasource.has_extracts) == ("hyper", True)
    downloaded = publisher.download(datasource)
    assert look.rows(downloaded, f'SELECT name FROM "{schema}"."products"') == [["desk"]]
    graph = look.document(downloaded).find("object-graph")
    captions = {entry.get("id"): entry.get("caption") for entry in graph.iter("object")}
    assert list(captions.values()) == ["sales", "products", "days"]
    lines = {
        captions[line.find("second-end-point").get("object-id")]: [part.get("op") for part in line.iter("expression")]
        for line in graph.iter("relationship")
        if captions[line.find("first-end-point").get("object-id")] == "sales"
    }
    assert lines == {
        "products": ["=", "[product]", "[id (products)]"],
        "days": ["AND", "=", "[the year]", "[y]", "=", "[the day]", "[d]"],
    }
    # What the server made can be published again.
    again = publisher.publish(downloaded, mode=OVERWRITE)
    assert publisher.download(again).read_bytes() == downloaded.read_bytes()


def test_tables_that_are_not_related_are_refused_in_tableaus_words(publisher: Publisher, hyper: Any) -> None:
    words = "Could not make a data source from the given Hyper file: it must contain exactly one fact table."
    for statements in (TABLES, (*TABLES, KEYS[0])):
        error = refused(publisher, related_file(hyper, publisher.folder / "apart.hyper", *statements))
        assert error.code == "400000"
        assert f"There was a problem publishing the file 'Orders'. {words} (0x5CE10192: {words})" in error.detail
        job = publisher.publish(publisher.folder / "apart.hyper", as_job=True)
        finished = publisher.finished(job.id)
        assert (finished.finish_code, finished.notes) == (TSC.JobItem.FinishCode.Failed, [])


def test_before_2021_4_several_tables_are_refused(publisher: Publisher, hyper: Any, admin: Admin) -> None:
    file = related_file(hyper, publisher.folder / "star.hyper", *TABLES, *KEYS)
    publisher.server.version = "3.13"
    admin.set(rest_version="3.13", product_version="2021.3.0")
    assert "400011" in str(refused(publisher, file))


def keyed(table: StoredTable, other: StoredTable) -> ForeignKey:
    return ForeignKey(table, ("k",), other, ("k",))


FACT, A, B, C = (StoredTable("Extract", name, ("k",)) for name in ("fact", "a", "b", "c"))


@pytest.mark.parametrize(
    ("tables", "keys", "order"),
    [
        ([A], [], [A]),
        ([A, FACT], [keyed(FACT, A)], [FACT, A]),
        ([A, B, FACT], [keyed(FACT, B), keyed(FACT, A)], [FACT, B, A]),
        ([A, B, FACT], [keyed(A, B), keyed(FACT, A)], [FACT, A, B]),
    ],
    ids=itertools.count(),
)
def test_a_star_begins_with_its_fact_table(
    tables: Sequence[StoredTable], keys: Sequence[ForeignKey], order: Sequence[StoredTable]
) -> None:
    assert star(tables, keys) == order


@pytest.mark.parametrize(
    ("tables", "keys", "why"),
    [
        ([A, FACT], [], "exactly one fact table"),
        ([A, B, FACT], [keyed(FACT, A), keyed(B, A)], "exactly one fact table"),
        ([A, FACT], [keyed(FACT, A), keyed(A, FACT)], "exactly one fact table"),
        ([A, FACT], [keyed(FACT, A), keyed(FACT, A)], r"\[Extract\].\[a\] in more than one way"),
        ([A, B, C, FACT], [keyed(FACT, A), keyed(FACT, B), keyed(A, C), keyed(B, C)], "in more than one way"),
        ([A, B, C, FACT], [keyed(FACT, A), keyed(B, C), keyed(C, B)], r"do not relate .*fact.* to .*b.*c"),
        ([FACT, StoredTable("other", "a", ())], [], "several schemas"),
    ],
    ids=["no keys", "two facts", "a circle", "twice", "two ways", "a circle apart", "two schemas"],
)
def test_other_shapes_are_refused(tables: Sequence[StoredTable], keys: Sequence[ForeignKey], why: str) -> None:
    with pytest.raises(BadPackageError, match=why):
        star(tables, keys)
