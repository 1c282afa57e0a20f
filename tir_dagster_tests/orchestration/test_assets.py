"""The assets as Dagster runs them: by hand on slices, and by the sensors."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
import pytest

from tir_dagster.definitions import build_defs
from tir_dagster.errors import SpecError
from tir_dagster.hyper.engine import connect
from tir_dagster.orchestration.assets import build_assets
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.orchestration.metadata import last_confirmation
from tir_dagster.orchestration.names import ExtractKeys, application_config, detection_config, extract_keys
from tir_dagster.orchestration.partitions import RANGE_END, RANGE_START, failed_slices
from tir_dagster.orchestration.resources import environment_resources
from tir_dagster.orchestration.sensing.sensors import Watch
from tir_dagster.orchestration.translation import PARTS, extract_assets
from tir_dagster.refresh.verify import ExtractVerification
from tir_dagster.spec.extract import Checks, Upstream, Verify
from tir_dagster_tests.orchestration.jobs import detect, events, refresh_tick, run, source_tick
from tir_dagster_tests.orchestration.shown import Shown, prepare
from tir_dagster_tests.sandbox.tableau.helpers import Admin

# Every change moves the watermark, unless a test means one that does not.
STAMP = "UPDATED_AT = DATEADD('second', 1, (SELECT MAX(UPDATED_AT) FROM MYTABLE))"
KEYS = ExtractKeys(*(dg.AssetKey(["orders", part]) for part in PARTS))
PUBLISHING = "orders__published_datasource"


@pytest.fixture(scope="module")
def defs(place):
    return build_defs(specs=(place.spec,))


@pytest.fixture
def instance(place):
    with dagster_instance() as history:
        yield history


def months(place) -> list[str]:
    query = "SELECT DISTINCT TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') FROM MYTABLE WHERE ORDER_DATE IS NOT NULL"
    return sorted(row[0] for row in place.sql(query))


def last_observed(instance, key: dg.AssetKey, name: str = "tir/plan") -> str:
    (newest,) = instance.fetch_observations(key, limit=1).records
    return newest.asset_observation.metadata[name].value


def test_a_slice_changed_behind_the_watermarks_back_is_repaired_by_a_run_on_a_range(loaded, defs, instance):
    march, april, may = months(loaded)[3:6]
    changed = f"WHERE TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') = '{april}' AND ORDER_ID % 2 = 0"
    loaded.sql(f"UPDATE MYTABLE SET NOTE = 'behind' {changed}")
    loaded.tag("dear")
    Admin(loaded.sandbox.tableau_url).fault("status", method="PUT", path="/tags$", status=403, code="403004")
    result = run(defs, instance, "orders_refresh", tags={RANGE_START: march, RANGE_END: may})
    assert loaded.published_rows() == loaded.source_rows()
    purged = events(result, "purged_extract")
    assert list(purged) == [march, april, may]
    counted = "SELECT COUNT(*) FROM MYTABLE WHERE TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') = '{}'"
    held = [loaded.sql(counted.format(name))[0][0] for name in (march, april, may)]
    assert [purged[name]["tir/slice_appended"] for name in (march, april, may)] == held, "all rows of the slices"
    assert [purged[name]["dagster/partition_row_count"] for name in (march, april, may)] == held
    assert purged[april]["dagster/row_count"] == sum(loaded.source_rows().values())
    assert (purged[april]["tir/mode"], purged[april]["tir/decision"]) == ("slices", "incremental")
    assert "verify" in purged[april]["tir/stages"]
    (published,) = events(result, "published_datasource").values()
    assert published["tir/version"] == purged[april]["tir/version"]
    assert published["dagster/uri"].startswith("http")
    assert ["Could not put back the tags (dear)" in warning for warning in published["tir/warnings"]] == [True]
    for metadata in (purged[april], published):
        assert "ORDER_ID" in [column.name for column in metadata["dagster/column_schema"].columns]
    lineage = published["dagster/column_lineage"].deps_by_column["ORDER_ID"]
    assert lineage == [dg.TableColumnDep(extract_keys(loaded.spec).purged_extract, "ORDER_ID")]
    assert checked(result) == {"rows_add_up": True, "equals_source": True}, "the gate, not the verification"
    prints = {purged[name]["tir/slice_fingerprint"] for name in (march, april, may)}
    assert len(prints) == 3
    assert all(prints)


def checked(result, asset: str = "purged_extract") -> dict[str, bool]:
    evaluations = result.get_asset_check_evaluations()
    return {
        evaluation.check_name: evaluation.passed for evaluation in evaluations if evaluation.asset_key.path[-1] == asset
    }


def test_a_reversed_range_is_refused_and_nothing_is_touched(loaded, defs, instance):
    before = last_confirmation(instance, extract_keys(loaded.spec).published_datasource)
    first, last = months(loaded)[2:4]
    with pytest.raises(SpecError, match=f"the range {last}..{first} is reversed"):
        run(defs, instance, "orders_refresh", tags={RANGE_START: last, RANGE_END: first})
    assert last_confirmation(instance, extract_keys(loaded.spec).published_datasource) == before


def test_a_run_where_nothing_is_to_be_done_publishes_nothing_and_says_so(loaded, defs, instance):
    keys = extract_keys(loaded.spec)
    before = last_confirmation(instance, keys.published_datasource)
    month = months(loaded)[3]
    # As a sensor asks that comes too late: its change set is settled, and the source has not changed since.
    config = application_config(keys, "settled already")
    result = run(defs, instance, "orders_refresh", config=config, tags={RANGE_START: month, RANGE_END: month})
    (metadata,) = events(result, "purged_extract").values()
    assert (metadata["tir/decision"], metadata["tir/version"]) == ("none", before.version)
    assert "nothing" in metadata["tir/plan"]
    assert events(result, "published_datasource") == {}
    assert "nothing to publish" in last_observed(instance, keys.published_datasource)
    assert last_confirmation(instance, keys.published_datasource) == before


def detect_wrongly(defs, instance, ident: str) -> dg.ExecuteInProcessResult:
    """A detection that fails before it stages anything."""
    instance.add_dynamic_partitions("orders_change_sets", [ident])
    config = detection_config(KEYS, hints=["no hint"])
    return run(defs, instance, "orders_detect", partition_key=ident, config=config, raise_on_error=False)


def test_changes_reach_tableau_by_the_sensors_alone_also_those_that_an_upstream_asset_hints_at(loaded, instance):
    defs = build_defs(specs=(replace(loaded.spec, upstream={"raw/orders": Upstream("day")}),))
    month = months(loaded)[2]
    reloaded = f"TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') = '{month}' AND ORDER_ID % 7 = 0"
    loaded.sql(f"UPDATE MYTABLE SET NOTE = 'sensed', {STAMP} WHERE ORDER_ID % 50 = 0")
    # Behind the watermark's back; but the asset that loads the table was materialized for a day of that month.
    loaded.sql(f"UPDATE MYTABLE SET NOTE = 'reloaded' WHERE {reloaded}")
    changed = loaded.sql(f"SELECT COUNT(*) FROM MYTABLE WHERE ORDER_ID % 50 = 0 OR ({reloaded})")[0][0]
    instance.report_runless_asset_event(dg.AssetMaterialization(["raw", "orders"], partition=f"{month}-10"))
    assert not detect_wrongly(defs, instance, "0001").success
    asked, request, result = detect(defs, instance)
    assert "/raw/orders@" in request.run_key
    (metadata,) = events(result, "changed_keys").values()
    assert metadata["tir/keys"] == metadata["dagster/partition_row_count"] == changed, (
        "what differs, not the whole month"
    )
    assert "ORDER_ID" in [column.name for column in metadata["dagster/column_schema"].columns]
    lineage = metadata["dagster/column_lineage"].deps_by_column["ORDER_ID"]
    assert lineage == [dg.TableColumnDep(extract_keys(loaded.spec).source_table, "ORDER_ID")]
    (refresh,) = refresh_tick(defs, instance).run_requests
    assert refresh.run_key == request.partition_key
    done = run(defs, instance, "orders_refresh", tags=refresh.tags, config=refresh.run_config)
    assert loaded.published_rows() == loaded.source_rows()
    (published,) = events(done, "published_datasource").values()
    assert published["tir/change_sets"] == [request.partition_key]
    assert checked(done, "published_datasource") == {"equals_source": True, "unique_row_key": True}, "not reset"
    left = instance.get_dynamic_partitions("orders_change_sets")
    assert ("0001" in left, request.partition_key in left) == (False, True), "what failed before is superseded"
    # A second refresh of the same change set is needless and harmless.
    again = run(defs, instance, "orders_refresh", tags=refresh.tags, config=refresh.run_config)
    assert events(again, "published_datasource") == {}
    assert "is published" in refresh_tick(defs, instance).skip_message
    # The hint is older than what is confirmed now.
    assert "has not changed" in source_tick(defs, instance, asked.cursor).skip_reason.skip_message


def test_a_detection_that_found_nothing_leaves_no_partition_behind(loaded, defs, instance):
    loaded.sql("UPDATE MYTABLE SET NOTE = NOTE WHERE ORDER_ID % 50 = 0")
    assert not detect_wrongly(defs, instance, "0002").success
    asked, request, result = detect(defs, instance)
    assert events(result, "changed_keys") == {}
    assert "0002" not in instance.get_dynamic_partitions("orders_change_sets"), "what failed before is superseded"
    assert "nothing" in last_observed(instance, extract_keys(loaded.spec).source_table)
    after = source_tick(defs, instance, asked.cursor)
    (deleted,) = after.dynamic_partitions_requests
    assert (type(deleted).__name__, deleted.partition_keys) == (
        "DeleteDynamicPartitionsRequest",
        [request.partition_key],
    )
    assert "already checked" in after.skip_reason.skip_message
    assert source_tick(defs, instance, after.cursor).dynamic_partitions_requests == []


def materialize_alone(defs, instance) -> dg.ExecuteInProcessResult:
    """As somebody launches the job that asks for nothing, or clicks "Materialize" on the datasource."""
    return run(defs, instance, "orders_refresh_now")


def test_materializing_the_datasource_alone_refreshes_it_and_its_slices_show_that(loaded, defs, instance):
    month = months(loaded)[4]
    inside = f"TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') = '{month}' AND ORDER_ID % 5 = 0"
    loaded.sql(f"UPDATE MYTABLE SET NOTE = 'clicked', {STAMP} WHERE {inside}")
    result = materialize_alone(defs, instance)
    assert loaded.published_rows() == loaded.source_rows()
    metadata = {
        (event.asset_key, event.partition): event.metadata
        for event in result.asset_materializations_for_node(PUBLISHING)
    }
    assert set(metadata) == {(KEYS.purged_extract, month), (KEYS.published_datasource, None)}
    changed = loaded.sql(f"SELECT COUNT(*) FROM MYTABLE WHERE {inside}")[0][0]
    assert metadata[KEYS.purged_extract, month]["tir/slice_appended"].value == changed
    published = metadata[KEYS.published_datasource, None]
    assert published["tir/plan"].value.startswith(f"orders: incremental refresh of {changed} keys in 1 slices")
    assert (published["tir/rows_purged"].value, published["tir/rows_appended"].value) == (changed, changed)
    assert published["tir/rebuilt_above_megabytes"].value > published["tir/extract_megabytes"].value > 0
    assert published["tir/seconds_publish"].value > 0
    assert next(iter(published)) == "tir/plan", "what people look for comes first"
    assert [*published][-1] == "tir/confirmation", "what machines read comes last"
    assert checked(result) == {"rows_add_up": True, "equals_source": True}
    assert materialize_alone(defs, instance).asset_materializations_for_node(PUBLISHING) == [], "nothing changed since"
    assert "nothing to publish" in last_observed(instance, KEYS.published_datasource)


def test_another_asset_reads_the_extract_by_its_handle(loaded, instance):
    keys = extract_keys(loaded.spec)
    seen = []

    @dg.asset(ins={"extract": dg.AssetIn(keys.purged_extract, partition_mapping=dg.AllPartitionMapping())})
    def report(extract) -> None:
        seen.append(extract)

    every = [*build_assets(extract_assets(loaded.spec)), report]
    dg.materialize(every, selection=[report], instance=instance, resources=environment_resources())
    assert seen[0].id == last_confirmation(instance, keys.published_datasource).version
    assert seen[0].extract.stat().st_size > 0


# Checks


def lose_a_row(loaded, instance, month: str) -> None:
    """Somebody's disk or hand: the local version lacks a row that the ledger knows and the source has."""
    confirmed = last_confirmation(instance, extract_keys(loaded.spec).published_datasource)
    extract = loaded.folder / "state" / "extracts" / "orders" / "versions" / confirmed.version / "extract.hyper"
    with connect(extract) as connection:
        where = f"TO_CHAR(\"ORDER_DATE\", 'YYYY-MM') = '{month}'"
        first_row = f'SELECT MIN("ORDER_ID") FROM "Extract"."Extract" WHERE {where}'
        assert connection.execute_command(f'DELETE FROM "Extract"."Extract" WHERE "ORDER_ID" = ({first_row})') == 1


def verified(defs, instance) -> dict[str, dg.AssetCheckEvaluation]:
    return {
        evaluation.check_name: evaluation
        for evaluation in run(defs, instance, "orders_verify").get_asset_check_evaluations()
    }


def test_drift_stops_a_publish_is_a_failed_check_that_names_the_slice_and_is_mended_by_the_next_refresh(
    loaded, instance
):
    spec = replace(loaded.spec, checks=Checks(row_jump=0.0001, server=True), verify=Verify(each="slices"))
    defs = build_defs(specs=(spec,))
    month, following = months(loaded)[7:9]
    lose_a_row(loaded, instance, month)
    # A change in the same slice: the gate compares the whole slice with the source.
    keys = extract_keys(loaded.spec)
    before = last_confirmation(instance, keys.published_datasource)
    last = f"SELECT MAX(ORDER_ID) FROM MYTABLE WHERE TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') = '{month}'"
    loaded.sql(f"UPDATE MYTABLE SET NOTE = 'gated', {STAMP} WHERE ORDER_ID = ({last})")
    config, tags = application_config(keys, "none is pending"), {RANGE_START: month, RANGE_END: month}
    both = {RANGE_START: month, RANGE_END: following}
    stopped = run(defs, instance, "orders_refresh", config=config, tags=both, raise_on_error=False)
    assert not stopped.success
    assert failed_slices(instance, loaded.spec, keys.purged_extract) == [month, following]
    (failed,) = stopped.get_asset_check_evaluations()
    assert (failed.check_name, failed.passed, failed.blocking) == ("equals_source", False, True)
    assert f"in {month} for example" in failed.description
    assert last_confirmation(instance, keys.published_datasource) == before, "nothing was published"
    checks = verified(defs, instance)
    assert not checks["equals_source"].passed
    assert checks["equals_source"].severity is dg.AssetCheckSeverity.ERROR
    assert checks["equals_source"].metadata["tir/different_slices"].value == [month]
    assert f"at once: tir refresh orders --slices {month}..{month}" in checks["equals_source"].description
    assert "rows: extract" in checks["equals_source"].metadata["tir/different"].value
    assert checks["server_holds_it"].passed, "only the local version lost something"
    assert str(Watch.parse(source_tick(defs, instance, None).cursor).token).endswith(f"/drift@{before.version}")
    # As the sensor asks again: nobody names the slice.
    repaired = run(defs, instance, "orders_refresh", config=config, tags=tags)
    assert loaded.published_rows() == loaded.source_rows()
    assert checked(repaired) == {"rows_add_up": True, "equals_source": True, "row_count_jump": True}
    assert failed_slices(instance, loaded.spec, keys.purged_extract) == [], "the next version holds them all"


def test_many_more_rows_than_before_are_told_and_a_publish_that_failed_goes_on_where_it_stopped(loaded, instance):
    defs = build_defs(specs=(replace(loaded.spec, checks=Checks(row_jump=0.0001)),))
    stamp = "DATEADD('second', 1, (SELECT MAX(UPDATED_AT) FROM MYTABLE))"
    loaded.sql(
        f"INSERT INTO MYTABLE (ORDER_ID, ORDER_DATE, CUSTOMER, QUANTITY, UPDATED_AT) SELECT ORDER_ID + 9000000, ORDER_DATE, 'new', 1, {stamp} "
        "FROM MYTABLE WHERE ORDER_DATE IS NOT NULL LIMIT 10"
    )
    month = months(loaded)[-1]
    config = application_config(extract_keys(loaded.spec), "none is pending")
    tags, admin = {RANGE_START: month, RANGE_END: month}, Admin(loaded.sandbox.tableau_url)
    admin.fault("status", method="POST", path="/(fileUploads|datasources)$", status=403, code="403004", message="No.")
    stopped = run(defs, instance, "orders_refresh", config=config, tags=tags, raise_on_error=False)
    admin.clear_faults()
    assert checked(stopped) == {"rows_add_up": True, "equals_source": True, "row_count_jump": False}
    assert stopped.get_failed_step_keys() == {"orders__published_datasource"}
    # As Dagster re-executes from the failure: the step alone, in a run that knows nothing of the first but its handle.
    published = [extract_keys(loaded.spec).published_datasource]
    assert run(defs, instance, "orders_refresh", tags=tags, asset_selection=published).success
    assert loaded.published_rows() == loaded.source_rows()


def test_what_is_published_is_verified_slice_by_slice_at_its_own_version(loaded, defs, instance):
    # Later than what the extract shows: a lag is no drift.
    loaded.sql(f"UPDATE MYTABLE SET NOTE = 'later', {STAMP} WHERE ORDER_ID % 70 = 0")
    checks = verified(defs, instance)
    assert {name: check.passed for name, check in checks.items()} == {"equals_source": True, "unique_row_key": True}
    rows = last_confirmation(instance, extract_keys(loaded.spec).published_datasource).rows
    assert checks["equals_source"].metadata["dagster/row_count"].value == rows


def test_rows_that_a_mandatory_join_hides_are_counted(places, tmp_path, spark):
    tables = {"SALES": "ID INT, PRODUCT INT", "PRODUCTS": "PRODUCT INT, COLOR VARCHAR"}
    query = "SELECT S.ID, P.COLOR FROM {s}.SALES AS S JOIN {s}.PRODUCTS AS P ON P.PRODUCT = S.PRODUCT"
    shop = Shown(prepare(places), spark, tmp_path, tables, query, {"row_key": "ID"})
    shop.sql("INSERT INTO {s}.PRODUCTS VALUES (1, 'blue'), (1, 'red')")
    shop.sql("INSERT INTO {s}.SALES VALUES (10, 1), (11, NULL), (12, 2), (13, 2)")
    shop.refresh()
    verification = ExtractVerification(shop.refresher.context, shop.confirmed)
    assert verification.equals_source().passed
    joins = verification.mandatory_joins()
    assert not joins.passed
    assert "2 rows refer to keys that SHOWN." in joins.sentence
    assert verification.unique_row_key().counted == {"tir/null_keys": 0, "tir/repeated_keys": 1}
    shop.close()
