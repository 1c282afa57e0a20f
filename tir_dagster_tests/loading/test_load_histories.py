"""Histories of files, made by Hypothesis: twice, out of order, deleting, empty, sent again; the table is what the model says."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tir_dagster_tests.loading.model import Model, Row

# `make soak` plays more of them; each load takes about a second.
EXAMPLES = int(os.environ.get("TIR_HISTORIES", "0")) or 2
# Shrinking would play hundreds of loads: the failing history is small as it is.
PHASES = [Phase.explicit, Phase.generate]
COLUMNS = "ID NUMBER(38,0), NAME VARCHAR, TS TIMESTAMP_NTZ"
HISTORY = "ID NUMBER(38,0), NAME VARCHAR, VALID_FROM TIMESTAMP_NTZ, VALID_TO TIMESTAMP_NTZ, IS_CURRENT BOOLEAN"

rows = st.builds(
    Row, st.integers(1, 4), st.sampled_from(["a", "b", None]), st.integers(1, 6), st.sampled_from([False, False, True])
)
files = st.tuples(st.sampled_from(["f1", "f2", "f3", "f4"]), st.lists(rows, max_size=5).map(tuple))
# What lands before each load; the same path again is a file that was sent again, with the same content or another.
histories = st.lists(st.lists(files, min_size=1, max_size=3), min_size=2, max_size=3)


def content(form: str, rows: tuple[Row, ...]) -> bytes:
    told = [
        {"ID": row.key, "NAME": row.value, "TS": f"2025-01-{row.version:02d}T00:00:00", "OP": "D" if row.gone else "U"}
        for row in rows
    ]
    if form == "json":
        return "".join(json.dumps(row) + "\n" for row in told).encode()
    if form == "csv":
        listed = [",".join(str(value) if value is not None else "" for value in row.values()) for row in told]
        return "\n".join(["ID,NAME,TS,OP", *listed, ""]).encode()
    schema = pa.schema([("ID", pa.int32()), ("NAME", pa.string()), ("TS", pa.timestamp("ms")), ("OP", pa.string())])
    out = io.BytesIO()
    told = [{**row, "TS": datetime.fromisoformat(row["TS"])} for row in told]
    pq.write_table(pa.Table.from_pylist(told, schema), out, row_group_size=2)
    return out.getvalue()


def play(landing, history, *, mode: str, form: str, ordered: bool = True) -> None:
    place = landing(HISTORY if mode == "scd2" else COLUMNS)
    fields = {"key": "ID"}
    fields |= {"order_by": "TS"} if mode != "append" and ordered else {}
    fields |= {"delete_flag": "OP"} if mode in ("merge", "scd2") else {"drift": "tolerate"}
    spec = place.spec(mode=mode, format=form, allow_empty=True, **fields)
    model, before = Model(mode, ordered), Counter()
    for landed in history:
        for path, rows in landed:
            model.land(path, rows)
            place.write(path, content(form, rows))
        model.load()
        loaded = place.load(spec)
        after = shown(place)
        assert after == model.table(), f"{mode} of {form} after {landed}"
        assert told_keys(loaded) == different(before, after), "the keys of all rows that differ, no others"
        before = after
    assert not place.load(spec).load_id, "loading the same files again has nothing to do"
    assert {name for name, *_ in place.ledger()} == set(model.ledger)


def different(before: Counter, after: Counter) -> set[int]:
    return {row[0] for row in (before - after) + (after - before)}


def told_keys(loaded) -> set[int]:
    if loaded.changed is None:
        return set()
    assert loaded.changed.columns == ("ID",)
    return {int(key[0]) for key in loaded.changed.keys}


def shown(place) -> Counter:
    def day(value):
        return value.day if isinstance(value, datetime) else value

    return Counter(tuple(map(day, row)) for row in place.rows())


@pytest.mark.parametrize("mode", ["append", "truncate", "merge", "scd2"])
def test_a_history_of_files_gives_the_table_that_the_model_says(landing, mode):
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)
    @given(history=histories, form=st.sampled_from(["csv", "json", "parquet"]))
    def check(history, form):
        play(landing, history, mode=mode, form=form)

    check()


def test_without_an_order_column_the_later_file_wins(landing):
    @settings(max_examples=max(1, EXAMPLES // 2), deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)
    @given(history=histories)
    def check(history):
        play(landing, history, mode="merge", form="csv", ordered=False)

    check()
