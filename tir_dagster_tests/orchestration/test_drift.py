"""Drift on record: what failed checks say of the confirmed version, and what the next refresh makes of it."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
import pytest

from tir_dagster.errors import EQUALS_SOURCE, SERVER_HOLDS_IT
from tir_dagster.orchestration.checks import Drift, known_drift, verified_drift
from tir_dagster.orchestration.names import ExtractKeys
from tir_dagster_tests.orchestration.confirmations import confirmation

KEYS = ExtractKeys(
    *(
        dg.AssetKey(["orders", name])
        for name in ("source_table", "changed_keys", "purged_extract", "published_datasource")
    )
)
CONFIRMED = confirmation("cs1")


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


def checked(
    instance, asset: dg.AssetKey, slices: list[str], *, passed: bool = False, check: str = EQUALS_SOURCE, **metadata
) -> None:
    warned = dg.AssetCheckSeverity.WARN if metadata.pop("warned", False) else dg.AssetCheckSeverity.ERROR
    fields = {"tir/different_slices": slices, "tir/version": CONFIRMED.version, **metadata}
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(asset_key=asset, check_name=check, passed=passed, metadata=fields, severity=warned)
    )


def test_a_failed_verification_names_the_slices_to_replace(instance):
    assert known_drift(instance, KEYS, CONFIRMED) is None
    checked(instance, KEYS.published_datasource, ["2025-03", "(no date)"])
    assert known_drift(instance, KEYS, CONFIRMED) == Drift(("2025-03", None))
    assert verified_drift(instance, KEYS, CONFIRMED) == "drift@v00000001"
    checked(instance, KEYS.published_datasource, [], passed=True)
    assert known_drift(instance, KEYS, CONFIRMED) is None


def test_what_was_found_in_a_version_before_no_longer_counts(instance):
    checked(instance, KEYS.published_datasource, ["2025-03"])
    newer = replace(CONFIRMED, version="v00000002")
    assert known_drift(instance, KEYS, newer) is None
    assert verified_drift(instance, KEYS, newer) is None
    assert known_drift(instance, KEYS, None) is None


def test_where_the_server_holds_other_rows_everything_is_loaded(instance):
    checked(instance, KEYS.published_datasource, [], check=SERVER_HOLDS_IT)
    assert known_drift(instance, KEYS, CONFIRMED) == Drift((), unrepaired=True)
    assert verified_drift(instance, KEYS, CONFIRMED) == "drift@v00000001"
    assert known_drift(instance, KEYS, replace(CONFIRMED, version="v00000002")) is None
    checked(instance, KEYS.published_datasource, [], passed=True, check=SERVER_HOLDS_IT)
    assert known_drift(instance, KEYS, CONFIRMED) is None


def test_a_check_that_could_not_be_made_is_no_drift(instance):
    checked(instance, KEYS.published_datasource, [], warned=True)
    assert known_drift(instance, KEYS, CONFIRMED) is None


def test_what_stopped_a_refresh_is_replaced_next_and_if_that_is_stopped_too_everything_is_loaded(instance):
    checked(instance, KEYS.published_datasource, ["2025-03"])
    checked(instance, KEYS.purged_extract, ["2025-04"], **{"tir/repair": False})
    assert known_drift(instance, KEYS, CONFIRMED) == Drift(("2025-03", "2025-04"))
    checked(instance, KEYS.purged_extract, ["2025-04"], **{"tir/repair": True})
    assert known_drift(instance, KEYS, CONFIRMED) == Drift(("2025-03", "2025-04"), unrepaired=True)
