"""Reports in Dagster's log, hints and upstream materializations: each is used once, whatever the clocks say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from tir_dagster.changes.plan import SourceState
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.orchestration.requests import News, read_news
from tir_dagster.orchestration.sensing.watching import news
from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.snowflake.versions import SourceVersion
from tir_dagster.spec.reading import spec_from_mapping

SPEC = spec_from_mapping(
    {
        "name": "orders",
        "source": "A.B.C",
        "row_key": "ID",
        "datasource": {"name": "n", "project": "p"},
        "upstream": {"raw/orders": {"partitions": "none"}},
    },
    "a test",
)
KEYS = extract_keys(SPEC)
HINT = {"table": "A.B.C", "type": "MIXED_CHANGES", "scope": {"equal": {"ID": 1}}}
REPORTS = {
    "a hint": dg.AssetMaterialization(["orders", "source_table"], metadata={"tir/hint": HINT}),
    "an upstream asset": dg.AssetMaterialization(["raw", "orders"]),
}


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


def confirmed_at(moment: datetime, reports: frozenset[int] = frozenset()) -> Confirmation:
    known, version = SourceState(*("" for _ in SourceState.__dataclass_fields__)), str(SourceVersion(moment))
    confirmation = Confirmation("orders", "v1", version, known, None, "id", "1", "", 1, ())
    return replace(confirmation, reports=tuple(sorted(reports))) if reports else confirmation


def news_since(instance: dg.DagsterInstance, folder: Path, confirmed: Confirmation | None) -> News:
    """What a detection would read in Dagster's log."""
    context: Any = SimpleNamespace(spec=SPEC, change_sets=ChangeSetStore(folder))
    return read_news(instance, context, confirmed)


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_that_dagster_stamps_before_the_last_pin_is_used(instance, tmp_path, report):
    now = datetime.now(UTC)
    instance.report_runless_asset_event(REPORTS[report])
    confirmed = confirmed_at(now + timedelta(seconds=3))
    assert news_since(instance, tmp_path, confirmed).unused
    assert news(instance, SPEC, KEYS, confirmed), "the sensor starts a detection"


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("first", [True, False], ids=["by the first load", "by a refresh"])
def test_a_report_that_was_used_is_not_used_again(instance, tmp_path, report, first):
    now = datetime.now(UTC)
    instance.report_runless_asset_event(REPORTS[report])
    before = None if first else confirmed_at(now - timedelta(hours=1))
    pinned = now + timedelta(seconds=3)
    used = news_since(instance, tmp_path, before).shown_at(SourceVersion(pinned))
    confirmed = confirmed_at(pinned, frozenset(used))
    assert not news_since(instance, tmp_path, confirmed).unused
    assert news(instance, SPEC, KEYS, confirmed) == ""


def test_what_is_too_old_to_be_met_again_is_not_kept(instance, tmp_path):
    instance.report_runless_asset_event(REPORTS["a hint"])
    now = datetime.now(UTC)
    read = news_since(instance, tmp_path, confirmed_at(now - timedelta(hours=1)))
    assert (len(read.unused), read.shown_at(SourceVersion(now + timedelta(hours=1)))) == (1, ())
