"""The assets as Dagster runs them: by hand on slices, and by the sensors. The tests tell one story."""

from __future__ import annotations

import time
from dataclasses import replace

import dagster as dg
import pytest

from tir_dagster.definitions import build_defs
from tir_dagster.errors import SpecError
from tir_dagster.orchestration.assets import build_assets
from tir_dagster.orchestration.confirmations import last_confirmation
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.orchestration.names import application_config, extract_keys
from tir_dagster.orchestration.partitions import RANGE_END, RANGE_START
from tir_dagster.orchestration.resources import environment_resources
from tir_dagster.orchestration.sensors import Watch

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


@pytest.fixture(scope="module")
def loaded(place):
    assert place.refresh().published
    return place


@pytest.fixture(scope="module")
def defs(place):
    return build_defs(specs=(place.spec,))


@pytest.fixture
def instance(place):
    with dagster_instance() as made:
        yield made


def months(place) -> list[str]:
    query = "SELECT DISTINCT TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') FROM MYTABLE WHERE ORDER_DATE IS NOT NULL"
    return sorted(row[0] for row in place.sql(query))


def run(defs, instance, job: str, *, config=None, **options) -> dg.ExecuteInProcessResult:
    return defs.resolve_job_def(job).execute_in_process(
        instance=instance, run_config={**QUIET, **(config or {})}, **options
    )


def events(result, asset: str) -> dict[str | None, dict]:
    found = result.asset_materializations_for_node(f"orders__{asset}")
    return {
        one.partition: {name: getattr(entry, "value", entry) for name, entry in one.metadata.items()} for one in found
    }


def said(instance, key: dg.AssetKey, name: str = "tir/plan") -> str:
    (newest,) = instance.fetch_observations(key, limit=1).records
    return newest.asset_observation.metadata[name].value


def test_a_slice_changed_behind_the_watermarks_back_is_repaired_by_a_run_on_a_range(loaded, defs, instance):
    march, april, may = months(loaded)[3:6]
    changed = f"WHERE TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') = '{april}' AND ORDER_ID % 2 = 0"
    loaded.sql(f"UPDATE MYTABLE SET NOTE = 'behind' {changed}")
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
    for shown in (purged[april], published):
        assert "ORDER_ID" in [column.name for column in shown["dagster/column_schema"].columns]


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
    (shown,) = events(result, "purged_extract").values()
    assert (shown["tir/decision"], shown["tir/version"]) == ("none", before.version)
    assert "nothing" in shown["tir/plan"]
    assert events(result, "published_datasource") == {}
    assert "nothing to publish" in said(instance, keys.published_datasource)
    assert last_confirmation(instance, keys.published_datasource) == before


def source_tick(defs, instance, cursor: str | None):
    sensor = defs.get_repository_def().get_sensor_def("orders_source")
    resources = {"snowflake": environment_resources()["snowflake"]}
    return sensor(dg.build_sensor_context(instance=instance, cursor=cursor, resources=resources))


def refresh_tick(defs, instance):
    repository = defs.get_repository_def()
    context = dg.build_sensor_context(instance=instance, repository_def=repository)
    return repository.get_sensor_def("orders_refresh").evaluate_tick(context)


def detect(defs, instance):
    """The source sensor until it asks, and the detection it asked for."""
    quiet = replace(Watch.parse(source_tick(defs, instance, None).cursor), since=time.time() - 60)
    asked = source_tick(defs, instance, quiet.to_cursor())
    (request,) = asked.run_requests
    instance.add_dynamic_partitions("orders_change_sets", [request.partition_key])
    result = run(defs, instance, "orders_detect", partition_key=request.partition_key, tags=request.tags)
    return asked, request, result


def test_a_change_reaches_tableau_by_the_sensors_alone(loaded, defs, instance):
    stamp = "UPDATED_AT = DATEADD('second', 1, (SELECT MAX(UPDATED_AT) FROM MYTABLE))"
    loaded.sql(f"UPDATE MYTABLE SET NOTE = 'sensed', {stamp} WHERE ORDER_ID % 50 = 0")
    asked, request, result = detect(defs, instance)
    (found,) = events(result, "changed_keys").values()
    assert found["tir/keys"] == found["dagster/partition_row_count"] > 0
    assert "ORDER_ID" in [column.name for column in found["dagster/column_schema"].columns]
    (refresh,) = refresh_tick(defs, instance).run_requests
    assert refresh.run_key == request.partition_key
    done = run(defs, instance, "orders_refresh", tags=refresh.tags, config=refresh.run_config)
    assert loaded.published_rows() == loaded.source_rows()
    (published,) = events(done, "published_datasource").values()
    assert published["tir/change_sets"] == [request.partition_key]
    # A second refresh of the same change set is needless and harmless.
    again = run(defs, instance, "orders_refresh", tags=refresh.tags, config=refresh.run_config)
    assert events(again, "published_datasource") == {}
    assert "is published" in refresh_tick(defs, instance).skip_message
    assert "has not changed" in source_tick(defs, instance, asked.cursor).skip_reason.skip_message


def test_a_detection_that_found_nothing_leaves_no_partition_behind(loaded, defs, instance):
    loaded.sql("UPDATE MYTABLE SET NOTE = NOTE WHERE ORDER_ID % 50 = 0")
    asked, request, result = detect(defs, instance)
    assert events(result, "changed_keys") == {}
    assert "nothing" in said(instance, extract_keys(loaded.spec).source_table)
    after = source_tick(defs, instance, asked.cursor)
    (deleted,) = after.dynamic_partitions_requests
    assert (type(deleted).__name__, deleted.partition_keys) == (
        "DeleteDynamicPartitionsRequest",
        [request.partition_key],
    )
    assert "already looked at" in after.skip_reason.skip_message
    assert source_tick(defs, instance, after.cursor).dynamic_partitions_requests == []


def test_another_asset_reads_the_extract_by_its_handle(loaded, instance):
    keys = extract_keys(loaded.spec)
    seen = []

    @dg.asset(ins={"extract": dg.AssetIn(keys.purged_extract, partition_mapping=dg.AllPartitionMapping())})
    def report(extract) -> None:
        seen.append(extract)

    every = [*build_assets(loaded.spec), report]
    dg.materialize(every, selection=[report], instance=instance, resources=environment_resources())
    assert seen[0].id == last_confirmation(instance, keys.published_datasource).version
    assert seen[0].extract.stat().st_size > 0
