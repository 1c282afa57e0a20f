"""Random histories of a table, and one extract for each layout that follows them."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from tir_dagster.changes.plan import Reason
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.history import History, Layout

LAYOUTS = [
    Layout(),
    Layout(key_type="VARCHAR", by="week"),
    Layout(key_type="NUMBER(12,2)", by="none"),
    Layout(key_type="DATE", date_type="TIMESTAMP_NTZ", by="day"),
    Layout(key_type="TIMESTAMP_NTZ", row_key=("K", "L")),
    Layout(row_key=("L", "K"), watermark=False),
    Layout(mark_type="NUMBER(38,0)"),
    Layout(row_key=(), by="month"),
    Layout(row_key=(), by="week", date_type="TIMESTAMP_NTZ"),
]
KEYS = {
    "NUMBER(38,0)": ["NULL", "0", "1", "2", "3"],
    "VARCHAR": ["NULL", "''", "'a'", "'A'", "'é|~'"],
    "NUMBER(12,2)": ["NULL", "0.10", "0.1", "-7"],
    "DATE": ["NULL", "'0001-01-01'::DATE", "'2025-03-01'::DATE", "'9999-12-31'::DATE"],
    "TIMESTAMP_NTZ": [
        "NULL",
        "'2025-03-01 00:00:00'::TIMESTAMP_NTZ",
        "'2025-03-01 00:00:00.000001'::TIMESTAMP_NTZ",
    ],
}
OTHERS = st.sampled_from(["NULL", "'x'", "'y'"])
DATES = st.sampled_from(
    ["NULL", "'2025-03-05'", "'2025-03-31'", "'2025-04-07'", "'2025-05-12'", "'1999-12-31'", "'9999-12-31'"]
)


def keys_of(layout: Layout) -> list[str]:
    return [key for key in KEYS[layout.key_type] if key != "NULL" or not layout.whole_key]


@st.composite
def histories(draw, layouts=LAYOUTS):
    layout = draw(st.sampled_from(layouts))
    keys = st.sampled_from(keys_of(layout))
    values = st.sampled_from(["NULL", "'a'", "'b'"])
    dates = DATES.map(lambda text: text if text == "NULL" else f"{text}::{layout.date_type}")
    insert = st.tuples(st.sampled_from(["insert", "insert", "insert unstamped"]), keys, OTHERS, dates, values)
    step = st.one_of(
        insert,
        st.tuples(st.just("update"), keys, values),
        st.tuples(st.just("rekey"), keys, keys),
        st.tuples(st.just("move"), keys, dates),
        st.tuples(st.just("touch"), keys),
        st.tuples(st.just("delete"), keys),
        st.tuples(st.just("delete where"), values),
        st.tuples(st.just("reload")),
    )
    lost = draw(st.sampled_from(["none", "staged", "verified", "published"]))
    before = draw(st.lists(step, min_size=1, max_size=4))
    after = draw(st.lists(step, min_size=1, max_size=4))
    mode = draw(st.sampled_from(["changes", "changes", "slices", "full"]))
    return layout, before, lost, after, mode


def random_histories(count: int):
    return settings(
        max_examples=count,
        deadline=None,
        # Not shrunk: a smaller history that fails costs minutes; this one is printed as it is.
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
        derandomize="TIR_HISTORIES" not in os.environ,
    )


class Extracts:
    """One extract for each layout, loaded when it is first needed; what happens to it goes on from one history to the next."""

    def __init__(self, sandbox: Sandbox, spark: SparkSession | None, folder: Path) -> None:
        self._sandbox, self._spark, self._folder = sandbox, spark, folder
        self._made: dict[Layout, History] = {}

    def of(self, layout: Layout) -> History:
        if layout not in self._made:
            folder = self._folder / f"history{len(self._made)}"
            folder.mkdir(parents=True)
            history = History(self._sandbox, self._spark, folder, layout)
            for number, key in enumerate([*keys_of(layout), *keys_of(layout)]):
                date = f"'2025-0{3 + number % 3}-0{1 + number % 9}'::{layout.date_type}"
                history.act(("insert", key, "'x'", "NULL" if number == 1 else date, "'a'"))
            assert history.refresh().reason is Reason.FIRST_LOAD
            assert history.published_rows() == history.source_rows()
            self._made[layout] = history
        return self._made[layout]

    def close(self) -> None:
        for history in self._made.values():
            history.close()


def play(history: History, before, lost, after, mode) -> None:
    for step in before:
        history.act(step)
    if lost != "none":
        note(f"crash after {lost}: {history.refresh(until=lost).sentence()}")
    for step in after:
        history.act(step)
    plan = history.refresh(mode)
    note(plan.sentence())
    assert history.published_rows() == history.source_rows()
    assert mode == "full" or plan.reason in (None, Reason.COST_THRESHOLD), "nothing here asks for a full refresh"
    assert history.refresh().decision == "none", "a second refresh found something to do"
