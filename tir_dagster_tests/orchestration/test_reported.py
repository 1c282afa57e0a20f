"""Reports in Dagster's log, hints and upstream materializations: each is used once, whatever the clocks say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest

from tir_dagster.changes.plan import Known
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.orchestration.preparing import prepare_detection
from tir_dagster.orchestration.watching import news
from tir_dagster.refresh.flow import Looked, Refresher
from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.steps import Prepared
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
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def confirmed_at(moment: datetime, reports: frozenset[int] = frozenset()) -> Confirmation:
    known, version = Known(*("" for _ in Known.__dataclass_fields__)), str(SourceVersion(moment))
    made = Confirmation("orders", "v1", version, known, None, "id", "1", "", 1, ())
    return replace(made, reports=tuple(sorted(reports))) if reports else made


def prepared(
    instance: dg.DagsterInstance, folder: Path, confirmed: Confirmation | None, *, pinned: datetime
) -> Prepared:
    """What a detection starts from; the warehouse shows the moment `pinned`."""
    refresher: Any = SimpleNamespace(
        spec=SPEC,
        change_sets=ChangeSetStore(folder),
        survey=lambda _: SimpleNamespace(version=SourceVersion(pinned)),
        log=lambda _: None,
    )
    looked: Any = SimpleNamespace(confirmed=confirmed)
    return prepare_detection(cast("Refresher", refresher), cast("Looked", looked), instance, KEYS)


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_that_dagster_stamps_before_the_last_pin_is_used(instance, tmp_path, report):
    now = datetime.now(UTC)
    instance.report_runless_asset_event(REPORTS[report])
    confirmed = confirmed_at(now + timedelta(seconds=3))
    assert prepared(instance, tmp_path, confirmed, pinned=now + timedelta(seconds=9)).hinted
    assert news(instance, SPEC, KEYS, confirmed), "the sensor starts a detection"


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("first", [True, False], ids=["by the first load", "by a refresh"])
def test_a_report_that_was_used_is_not_used_again(instance, tmp_path, report, first):
    now = datetime.now(UTC)
    instance.report_runless_asset_event(REPORTS[report])
    before = None if first else confirmed_at(now - timedelta(hours=1))
    using = prepared(instance, tmp_path, before, pinned=now + timedelta(seconds=3))
    confirmed = confirmed_at(now + timedelta(seconds=3), using.shown_reports)
    assert not prepared(instance, tmp_path, confirmed, pinned=now + timedelta(seconds=9)).hinted
    assert news(instance, SPEC, KEYS, confirmed) == ""


def test_what_is_too_old_to_be_met_again_is_not_kept(instance, tmp_path):
    instance.report_runless_asset_event(REPORTS["a hint"])
    now = datetime.now(UTC)
    using = prepared(instance, tmp_path, confirmed_at(now - timedelta(hours=1)), pinned=now + timedelta(hours=1))
    assert (len(using.reports), using.shown_reports) == (1, frozenset())
