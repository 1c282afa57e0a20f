"""Random histories over three related tables, with crashes: whatever happened, each table of the extract equals its source."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.star import DATABASE, PROJECT, Star

# `make soak` plays a hundred.
HISTORIES = int(os.environ.get("TIR_HISTORIES", "2"))

_KEY = st.sampled_from(["1", "2", "3", "NULL"])
_CUSTOMER = st.sampled_from(["1", "2", "3"])
_REGION = st.sampled_from(["'north'", "'it''s \"south\"'", "''"])
_DAY = st.sampled_from(["'2025-03-05'::DATE", "'2025-04-07'::DATE", "NULL"])
_TEXT = st.sampled_from(["'a'", "'ä\\n'", "NULL"])
_NULLABLE = st.sampled_from(["NULL"])
_SALES = st.one_of(
    st.tuples(st.just("sell"), _KEY, _CUSTOMER | _NULLABLE, _REGION | _NULLABLE, _DAY, _TEXT),
    st.tuples(st.just("sale"), _KEY, _TEXT),
    st.tuples(st.just("move"), _KEY, _DAY, _CUSTOMER),
    st.tuples(st.just("cancel"), _KEY),
)
_OTHERS = st.one_of(
    st.tuples(st.just("customer"), _CUSTOMER, _TEXT),
    st.tuples(st.just("forget"), _CUSTOMER),
    st.tuples(st.just("entitle"), _REGION, _TEXT),
    st.tuples(st.just("revoke"), _REGION),
)
_STEPS = st.lists(_SALES | _OTHERS, max_size=5)
_CRASH = st.sampled_from(["none", "staged", "verified", "published"])


@pytest.fixture(scope="module")
def prepared(sandbox: Sandbox) -> Sandbox:
    sandbox.prepare(DATABASE, PROJECT)
    return sandbox


@pytest.fixture(scope="module", params=["republish", "patch"])
def star(request, prepared, spark, tmp_path_factory) -> Iterator[Star]:
    star = Star(prepared, spark, tmp_path_factory.mktemp("star"), request.param)
    star.act(("customer", "1", "'a'"))
    star.act(("entitle", "'north'", "'ann'"))
    star.act(("sell", "1", "1", "'north'", "'2025-03-05'::DATE", "'a'"))
    star.refresh()
    yield star
    star.close()


@settings(
    max_examples=HISTORIES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(before=_STEPS, lost=_CRASH, after=_STEPS, mode=st.sampled_from(["changes", "changes", "changes", "full"]))
def test_each_table_equals_its_source_after_any_history(star: Star, before, lost, after, mode):
    for step in before:
        star.act(step)
    if lost != "none":
        note(f"crash after {lost}: {star.refresh(until=lost).sentence()}")
    for step in after:
        star.act(step)
    plan = star.refresh(mode)
    note(plan.sentence())
    assert star.published_rows() == star.source_rows()
    assert star.refresh().decision == "none", "a second refresh found something to do"
