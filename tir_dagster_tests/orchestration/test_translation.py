"""How an extract's assets look and when they run: keys, the translator, pools, freshness, schedules, conditions."""

from __future__ import annotations

import warnings
from dataclasses import replace
from datetime import timedelta

import dagster as dg
import pytest
import yaml
from dagster_shared.libraries import DagsterLibraryRegistry
from dagster_tableau import DagsterTableauTranslator, TableauContentType, TableauTranslatorData
from dagster_tableau.translator import TableauContentData, TableauWorkspaceData

from tir_dagster import ExtractTranslator, build_extract_defs
from tir_dagster.definitions import build_defs
from tir_dagster.errors import SpecError
from tir_dagster.orchestration.home import DAGSTER_YAML
from tir_dagster.orchestration.names import pool_name
from tir_dagster.orchestration.partitions import RANGE_END, RANGE_START, ManySlicesWarning
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster.spec.tables import Slices

BASE = {
    "name": "orders",
    "source": "MYDB.MYSCHEMA.MYTABLE",
    "row_key": "ORDER_ID",
    "slices": {"column": "ORDER_DATE", "by": "month", "start": "2025-01", "zone": "Europe/Berlin"},
    "datasource": {"project": "My project", "name": "Sales: all"},
}


def an_extract(**fields) -> ExtractSpec:
    return spec_from_mapping({**BASE, **fields}, "a test")


def complaint(**fields) -> str:
    with pytest.raises(SpecError) as failure:
        an_extract(**fields)
    return str(failure.value)


class Ours(ExtractTranslator):
    def get_asset_spec(self, extract, part, default):
        key = dg.AssetKey(["sales", extract.name, part])
        changed = default.replace_attributes(key=key, group_name="sales", owners=["team:sales"], description="ours")
        return changed.merge_attributes(tags={"tier": "gold"})


def test_a_translator_changes_keys_groups_owners_tags_and_descriptions():
    defs = build_defs(specs=(an_extract(),), translator=Ours())
    dg.Definitions.validate_loadable(defs)
    specs = {spec.key.path[-1]: spec for spec in defs.resolve_all_asset_specs()}
    for part in ("source_table", "changed_keys", "purged_extract", "published_datasource"):
        assert specs[part].key == dg.AssetKey(["sales", "orders", part])
        assert (specs[part].group_name, specs[part].owners) == ("sales", ["team:sales"])
        assert (specs[part].description, specs[part].tags["tier"]) == ("ours", "gold")
        assert specs[part].kinds, "what the translator leaves alone stays"
    graph = defs.resolve_asset_graph()
    assert graph.get(specs["purged_extract"].key).parent_keys == {specs["changed_keys"].key}
    checks = {key.asset_key.path[-1]: key.asset_key for key in graph.asset_check_keys}
    assert checks == {name: specs[name].key for name in ("purged_extract", "published_datasource")}


def test_a_trigger_is_translated_too():
    defs = build_defs(specs=(an_extract(delivery="trigger"),), translator=Ours())
    assert {asset.key.path[0] for asset in defs.resolve_all_asset_specs()} == {"sales"}


def test_the_datasources_key_can_be_the_one_of_dagster_tableau():
    properties = {"luid": "1", "name": "Sales: all", "hasExtracts": True, "isPublished": True, "workbook": None}
    content = TableauContentData(content_type=TableauContentType.DATA_SOURCE, properties=properties)
    workspace = TableauWorkspaceData.from_content_data("site", [content])
    data = TableauTranslatorData(content_data=content, workspace_data=workspace)
    tableau_key = DagsterTableauTranslator().get_asset_spec(data).key
    spec = an_extract(asset_keys={"published_datasource": tableau_key.to_user_string()})
    assert tableau_key in build_defs(specs=(spec,)).resolve_asset_graph().get_all_asset_keys()


def test_a_source_table_that_somebody_else_defines_is_joined_and_may_serve_two_extracts():
    @dg.asset(key=["raw", "orders"])
    def loaded() -> None: ...

    keys = {"source_table": "raw/orders"}
    both = [an_extract(asset_keys=keys), an_extract(name="orders_too", asset_keys=keys)]
    merged = dg.Definitions.merge(build_defs(specs=both), dg.Definitions(assets=[loaded]))
    dg.Definitions.validate_loadable(merged)
    children = merged.resolve_asset_graph().get(dg.AssetKey(["raw", "orders"])).child_keys
    assert children == {dg.AssetKey([name, "changed_keys"]) for name in ("orders", "orders_too")}


def test_wrong_asset_keys_schedules_and_checks_are_refused_with_what_to_write():
    assert "asset_keys.table: unknown asset; known are source_table," in complaint(asset_keys={"table": "a"})
    assert "asset_keys.source_table: 'a//b' has an empty part" in complaint(asset_keys={"source_table": "a//b"})
    for wrong in ("nightly", "0 25 * * *", "0 3 * *"):
        assert f"schedules.verify: '{wrong}' is no cron expression" in complaint(schedules={"verify": wrong})
    assert "checks.row_jump: give a share above 0" in complaint(checks={"row_jump": 0})
    assert "freshness: 'soon' is no duration" in complaint(freshness="soon")
    assert "keeps no version to verify" in complaint(delivery="trigger", schedules={"verify": "0 3 * * *"})


def test_freshness_becomes_dagsters_policy_on_the_datasource_alone():
    defs = build_defs(specs=(an_extract(freshness="6 hours"),))
    policies = {asset.key.path[-1]: asset.freshness_policy for asset in defs.resolve_all_asset_specs()}
    assert policies.pop("published_datasource") == dg.FreshnessPolicy.time_window(timedelta(hours=6))
    assert set(policies.values()) == {None}


def test_there_are_no_schedules_unless_the_spec_asks_for_them():
    assert list(build_extract_defs(an_extract()).schedules or []) == []


def test_schedules_run_in_the_slices_zone_and_a_full_refresh_is_one_run():
    spec = an_extract(schedules={"verify": "0 3 * * *", "full_refresh": "0 4 * * SUN"})
    repository = build_defs(specs=(spec,)).get_repository_def()
    schedules = {schedule.name: schedule for schedule in repository.schedule_defs}
    assert {schedule.execution_timezone for schedule in schedules.values()} == {"Europe/Berlin"}
    assert {name: schedule.job_name for name, schedule in schedules.items()} == {
        "orders_verify": "orders_verify",
        "orders_full_refresh": "orders_refresh",
    }
    (request,) = schedules["orders_full_refresh"].evaluate_tick(dg.build_schedule_context()).run_requests
    assert request.run_config == {"ops": {"orders__purged_extract": {"config": {"full": True}}}}
    assert request.tags[RANGE_START] == request.tags[RANGE_END]


def test_everything_that_touches_a_datasource_is_in_its_pool():
    defs = build_defs(specs=(an_extract(),))
    jobs = [defs.resolve_job_def(f"orders_{name}") for name in ("detect", "refresh")]
    pools = {node.name.rpartition("__")[2]: node.definition.pools for job in jobs for node in job.nodes}
    named = {"tableau_my_project_sales_all"}
    assert pools == dict.fromkeys(("changed_keys", "purged_extract", "published_datasource"), named)
    assert pool_name(an_extract(name="other")) in named, "by datasource, not by extract"


def test_the_example_settings_are_what_dagster_accepts(tmp_path):
    (tmp_path / "dagster.yaml").write_text(DAGSTER_YAML.read_text(encoding="utf-8"), encoding="utf-8")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.freshness_enabled
        assert not instance.telemetry_enabled
        assert instance.run_retries_enabled
        assert instance.run_monitoring_enabled
        settings = yaml.safe_load(DAGSTER_YAML.read_text(encoding="utf-8"))
        # Without it a cancelled run blocks the pool for ever.
        assert settings["run_monitoring"]["free_slots_after_run_end_seconds"] > 0
        config = instance.get_concurrency_config()
    assert config.pool_config.default_pool_limit == 1
    assert config.pool_config.pool_granularity.value == "run"


def test_more_slices_than_is_sensible_are_warned_of_at_load():
    with pytest.warns(ManySlicesWarning, match=r"orders has 1,\d+ slices by day.*Slice by a coarser unit"):
        build_extract_defs(replace(an_extract(), slices=Slices("day", "ORDER_DATE", "2022-01-01")))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ManySlicesWarning)
        build_extract_defs(an_extract())


def test_dagster_knows_which_library_made_the_definitions():
    assert "tir_dagster" in DagsterLibraryRegistry.get()


# Automation conditions instead of the sensors


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


@pytest.mark.parametrize("sliced", [True, False])
def test_by_condition_an_updated_source_gives_one_run_on_the_newest_slice_and_then_a_publish(instance, sliced):
    spec = an_extract(automation="condition", slices=BASE["slices"] if sliced else {"by": "none"})
    defs = build_defs(specs=(spec,))
    source, purged, published = (
        dg.AssetKey(["orders", name]) for name in ("source_table", "purged_extract", "published_datasource")
    )

    def asked(cursor=None):
        result = dg.evaluate_automation_conditions(defs, instance, cursor=cursor)
        return result, {key: result.get_num_requested(key) for key in (purged, published)}

    result, first = asked()
    assert first == {purged: 0, published: 0}, "nothing was updated since"
    instance.report_runless_asset_event(dg.AssetMaterialization(source))
    result, updated = asked(result.cursor)
    assert updated == {purged: 1, published: 0 if sliced else 1}
    if sliced:
        (partition,) = result.get_requested_partitions(purged)
        newest = defs.resolve_asset_graph().get(purged).partitions_def.get_last_partition_key()
        assert partition == newest
        instance.report_runless_asset_event(dg.AssetMaterialization(purged, partition=newest))
        result, after = asked(result.cursor)
        assert after == {purged: 0, published: 1}
    _, idle = asked(result.cursor)
    assert idle == {purged: 0, published: 0}


def test_by_condition_no_sensor_asks_for_runs():
    spec = an_extract(automation="condition")
    (sensor,) = build_extract_defs(spec).sensors
    assert sensor.name == "orders_source"
    assert sensor.targets == []
    foreign_source = an_extract(automation="condition", asset_keys={"source_table": "raw/orders"})
    assert list(build_extract_defs(foreign_source).sensors) == [], "whoever loads it materializes it"
