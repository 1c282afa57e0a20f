"""How an extract's assets look in Dagster: keys, descriptions, kinds, automation conditions; and the hook that changes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import dagster as dg

from tir_dagster.orchestration.metadata import definition_metadata
from tir_dagster.orchestration.names import ExtractKeys, extract_keys, refresh_now_job_name, source_sensor_names
from tir_dagster.orchestration.partitions import slice_partitions
from tir_dagster.orchestration.sensing.upstream import upstream_keys
from tir_dagster.spec.extract import ExtractSpec

Condition = dg.AutomationCondition[Any]


def purged_condition(spec: ExtractSpec, keys: ExtractKeys) -> Condition:
    """Return the condition of `purged_extract`: one run on the newest slice if the source was updated since the last run.

    A run on one slice updates the whole extract. `eager()` would run every slice at each update.
    """
    source = dg.AssetSelection.assets(keys.source_table)
    updated = dg.AutomationCondition.any_deps_match(dg.AutomationCondition.newly_updated()).allow(source)
    due = updated.since_last_handled() & ~dg.AutomationCondition.in_progress()
    return due & dg.AutomationCondition.in_latest_time_window() if slice_partitions(spec.main.slices) else due


def published_condition() -> Condition:
    """Return the condition of `published_datasource`: a dependency was updated. `eager()` would wait for every slice."""
    updated = dg.AutomationCondition.any_deps_updated().since_last_handled()
    return updated & ~dg.AutomationCondition.in_progress()


Part = Literal["source_table", "changed_keys", "purged_extract", "published_datasource"]
PARTS: tuple[Part, ...] = get_args(Part)

_KINDS: Mapping[Part, set[str]] = {
    "source_table": {"snowflake", "table"},
    "changed_keys": {"pyspark", "parquet"},
    "purged_extract": {"tableau", "hyper"},
    "published_datasource": {"tableau", "datasource"},
}


class ExtractTranslator:
    """Override `get_asset_spec` to change what Dagster shows of an extract's assets, or under which keys.

    `default` is the asset without changes; return a changed copy: `default.replace_attributes(owners=["team:sales"])`. The command
    line knows only the keys of the spec (`asset_keys`): change keys there if `tir refresh` should use the same history.
    """

    def get_asset_spec(self, extract: ExtractSpec, part: Part, default: dg.AssetSpec) -> dg.AssetSpec:
        del extract, part
        return default


@dataclass(frozen=True)
class ExtractAssets:
    """The asset specs of one extract, after translation."""

    spec: ExtractSpec
    by_part: Mapping[Part, dg.AssetSpec]
    # The tables that the query reads beside the first one, under the keys that the lineage of columns names.
    joined: Sequence[dg.AssetKey] = ()

    @property
    def keys(self) -> ExtractKeys:
        return ExtractKeys(*(self.by_part[part].key for part in PARTS))

    def attributes(self, part: Part) -> dict[str, Any]:
        """Return the arguments of `@dg.asset` that define how the asset looks."""
        asset = self.by_part[part]
        return {
            "key": asset.key,
            "group_name": asset.group_name,
            "description": asset.description,
            "metadata": dict(asset.metadata),
            "tags": dict(asset.tags),
            "owners": list(asset.owners),
            "freshness_policy": asset.freshness_policy,
            "automation_condition": asset.automation_condition,
        }

    def external(self) -> list[dg.AssetSpec]:
        """Return the source table's asset, unless the spec names an asset that is defined elsewhere."""
        return [] if "source_table" in self.spec.asset_keys else [self.by_part["source_table"]]


def extract_assets(
    spec: ExtractSpec,
    translator: ExtractTranslator | None = None,
    filled_by: Sequence[dg.AssetKey] = (),
) -> ExtractAssets:
    """Build the asset specs; `filled_by` are the loads of the tables that the extract reads."""
    hook = translator or ExtractTranslator()
    assets = {part: hook.get_asset_spec(spec, part, _default(spec, part, filled_by)) for part in PARTS}
    return ExtractAssets(spec, assets, _joined(spec))


def _default(spec: ExtractSpec, part: Part, filled_by: Sequence[dg.AssetKey]) -> dg.AssetSpec:
    keys = extract_keys(spec)
    return dg.AssetSpec(
        key=getattr(keys, part),
        deps=_above(spec, keys, filled_by) if part == "source_table" else (),
        group_name=spec.name,
        kinds=_KINDS[part],
        description=_description(spec, part),
        metadata=definition_metadata(spec, part),
        freshness_policy=_freshness(spec) if part == "published_datasource" else None,
        automation_condition=_condition(spec, part, keys),
    )


def _above(spec: ExtractSpec, keys: ExtractKeys, filled_by: Sequence[dg.AssetKey]) -> list[dg.AssetKey]:
    """Return the assets that fill the source table, except its own asset."""
    return [key for key in dict.fromkeys((*filled_by, *upstream_keys(spec))) if key != keys.source_table]


def _freshness(spec: ExtractSpec) -> dg.FreshnessPolicy | None:
    if spec.freshness is None:
        return None
    return dg.FreshnessPolicy.time_window(fail_window=timedelta(seconds=spec.freshness))


def _condition(spec: ExtractSpec, part: Part, keys: ExtractKeys) -> dg.AutomationCondition[Any] | None:
    if spec.automation != "condition":
        return None
    if part == "purged_extract" and spec.delivery != "trigger":
        return purged_condition(spec, keys)
    return published_condition() if part == "published_datasource" else None


def _joined(spec: ExtractSpec) -> list[dg.AssetKey]:
    """Return further tables that the extract reads."""
    if spec.query is None and not spec.tables:
        return []
    # Here and not above: SQL is parsed by a library that a plain table does not need.
    from tir_dagster.changes.relation import read_tables

    return [dg.AssetKey([table.database, table.schema, table.name]) for table in read_tables(spec)[1:]]


def _description(spec: ExtractSpec, part: Part) -> str:
    datasource = f"The datasource **{spec.datasource.name}** in project **{spec.datasource.project}** on Tableau Server"
    further = f" Watched with it: {', '.join(spec.watch)}." if spec.watch else ""
    if spec.delivery == "trigger" and part == "published_datasource":
        return (
            f"{datasource}, refreshed by its own {spec.datasource.refresh} refresh when {spec.main_table} changes. One event is one "
            f"confirmation.\n\n{_ways_to_refresh(spec)}"
        )
    return {
        "source_table": f"The Snowflake table {spec.main_table}, as the source sensor observes it.{further}",
        "changed_keys": f"The keys of {spec.main_table} whose rows differ from the extract's, with their fresh rows. Each detection that "
        "finds changes adds one change set, which is one partition; it is pending until a publish confirms it. Not materialized by hand: "
        f"the sensor and `tir refresh` start the job that fills it.\n\n{_ways_to_refresh(spec)}",
        "purged_extract": "The Hyper extract on this machine: the changed keys are purged, their fresh rows are in place, and it is "
        "verified against the source. A run by hand on slices re-syncs them.\n\nOf one slice are `tir/slice_purged`, `tir/slice_appended` "
        "and its row count; the other numbers are of the whole run: plot them on `published_datasource`. Slices before the first or after "
        f"the last one with rows may have no event: they are empty, and nothing is missing.\n\n{_ways_to_refresh(spec)}",
        "published_datasource": f"{datasource}: {_how_it_is_kept(spec)} One event is one confirmation: what the server shows, and from "
        f"which version of the source.\n\n{_ways_to_refresh(spec)}\n\n**More:** `tir plan {spec.name}` shows what a refresh would "
        f"move, `tir report {spec.name} --open` what refreshes moved (its page is in the metadata `tir/report`), "
        f"`tir history {spec.name}` lists what was published, `tir why {spec.name} --key …` tells which refreshes changed a row, "
        f"`tir verify {spec.name}` compares it with the source, and the job `{spec.name}_rollback` goes back to a version.",
    }[part]


def _how_it_is_kept(spec: ExtractSpec) -> str:
    """Say in a sentence what a refresh does."""
    ways = {
        "republish": "the whole extract is published again",
        "patch": "only they are sent to the server",
        "server": "Tableau itself reads the newest part again",
    }
    then = ways.get(spec.delivery, spec.delivery)
    if not spec.tables:
        return f"it shows {_source(spec)}. Changes are {_kept_by(spec)}; then {then}."
    tables = "; ".join(f"{name} ({_source(part)}) {_kept_by(part)}" for name, part in spec.parts.items())
    return f"it shows {len(spec.tables)} related tables, each kept by its own keys: changes of {tables}. Then {then}."


def _source(spec: ExtractSpec) -> str:
    return spec.main_table if spec.query is None else f"a query over {spec.main_table}"


def _kept_by(spec: ExtractSpec) -> str:
    watermark = f" {spec.changes.watermark}" if spec.changes.watermark else ""
    return f"found by {spec.changes.by}{watermark} and replaced by {', '.join(spec.row_key) or 'slice'}"


def _ways_to_refresh(spec: ExtractSpec) -> str:
    now = f"**Refresh now:** launch the job `{refresh_now_job_name(spec)}`, or run `tir refresh {spec.name}`."
    if spec.automation == "condition":
        return f"{now} **By itself:** turn on `{spec.name}_source` and `default_automation_condition_sensor` under Automation."
    sensors = [f"`{name}`" for name in source_sensor_names(spec)]
    return f"{now} **By itself:** turn on the sensor{'s' if len(sensors) > 1 else ''} {' and '.join(sensors)} under Automation."
