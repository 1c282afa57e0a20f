"""What a plan counts in the warehouse is what the refresh then moves: keys, and rows by slice."""

from __future__ import annotations

from collections import Counter
from random import Random

import duckdb
import pytest

from tir_dagster.changes.detectors import find_candidates
from tir_dagster.changes.moves import count_moves, rows_by_slice
from tir_dagster.changes.question import ask_question
from tir_dagster.snowflake.versions import SourceVersion
from tir_dagster_tests.changes.following import Detectors, FollowedQuery, row_slice
from tir_dagster_tests.changes.queries import QUERIES
from tir_dagster_tests.changes.warehouse import COLUMNS, STAMP, Warehouse

DETECTORS = (Detectors(), Detectors("watermark", "watermark"), Detectors("feed", "feed"))


def scribble(warehouse: Warehouse, random: Random) -> None:
    """Delete, add and change rows in every table, each with the stamp that a watermark looks for."""
    for table, columns in COLUMNS.items():
        kept = [row for row in warehouse.tables[table] if random.random() < 0.8]
        changed = [
            {**row, "NOTE": random.choice(columns["NOTE"]), STAMP: warehouse.tick()} if random.random() < 0.3 else row
            for row in kept
        ]
        new = [
            {name: warehouse.tick() if name == STAMP else random.choice(values) for name, values in columns.items()}
            for _ in range(random.randint(1, 4))
        ]
        warehouse.write(table, changed + new)


@pytest.mark.parametrize("name", [*QUERIES])
def test_what_is_counted_is_what_the_refresh_moves(name: str):
    random = Random(name)
    warehouse = Warehouse(duckdb.connect(config={"threads": 1}))
    followed = FollowedQuery(warehouse, QUERIES[name], DETECTORS[random.randrange(3)])
    scribble(warehouse, random)
    followed.refresh()
    for _ in range(3):
        scribble(warehouse, random)
        relation, base = followed.relation, followed.base
        assert base is not None
        since, now = SourceVersion.parse(base.confirmation.source_version), warehouse.pin()
        question, _ = ask_question(
            relation,
            warehouse,
            since=since,
            watermark=base.confirmation.watermark,
            version=now,
            changed=set(COLUMNS) & set(relation.tables),
        )
        resync = [row_slice(relation, row) for row in list(base.extract)[:1]] if random.random() < 0.3 else []
        moves = count_moves(relation, question, find_candidates(relation, question), warehouse.query, resync=resync)
        before = base.extract
        plan = followed.refresh(resync=resync)
        assert moves.difference.keys == (plan.keys or 0)
        assert moves.difference.keys == moves.new_keys + moves.gone_keys + moves.changed_keys
        assert moves.candidates >= moves.difference.keys
        after = followed.base.extract
        net = Counter(row_slice(relation, row) for row in after.elements())
        net.subtract(row_slice(relation, row) for row in before.elements())
        counted = Counter(moves.difference.appended)
        counted.subtract(moves.difference.purged)
        assert {key: n for key, n in counted.items() if n} == {key: n for key, n in net.items() if n}
        assert rows_by_slice(relation, now, warehouse.query) == Counter(
            row_slice(relation, row) for row in after.elements()
        )
