"""Upstream assets: which slices a partition's rows may be in, how Dagster sees it, and what was materialized since."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest

from tir_dagster.definitions import build_defs
from tir_dagster.errors import SpecError
from tir_dagster.orchestration.sensing.upstream import (
    materialization_stamps,
    newest_materialization,
    slices_of_partition,
    upstream_changes,
)
from tir_dagster.spec.extract import ExtractSpec, Upstream
from tir_dagster.spec.reading import parse_specs
from tir_dagster.spec.tables import Slices

SPEC = """\
extracts:
  - name: orders
    source: MYDB.MYSCHEMA.MYTABLE
    row_key: ORDER_ID
    slices: {column: DAY, by: month, start: 2025-01}
    datasource: {project: myproject, name: mydatasource}
    upstream: {raw/orders: {partitions: day}}
"""


def an_extract(text: str = SPEC) -> ExtractSpec:
    (spec,) = parse_specs(text, "test.yaml")
    return spec


def sliced(by: str, zone: str = "UTC") -> Slices:
    return Slices(by=by, column="DAY", start="2025-01-01", zone=zone)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slices", "upstream", "partition", "expected"),
    [
        (sliced("month"), Upstream("day"), "2025-03-14", ["2025-03"]),
        (sliced("month"), Upstream("hour"), "2025-03-31-23:00", ["2025-03"]),
        (sliced("month"), Upstream("week"), "2025-03-30", ["2025-03", "2025-04"]),
        (sliced("month"), Upstream("month"), "2025-02-01", ["2025-02"]),
        (sliced("month"), Upstream("month"), "2025-02", ["2025-02"]),
        (
            sliced("week"),
            Upstream("month"),
            "2025-02-01",
            [f"2025-{day}" for day in ("01-27", "02-03", "02-10", "02-17", "02-24")],
        ),
        (
            sliced("day"),
            Upstream("week"),
            "2025-03-30",
            [f"2025-{day}" for day in ("03-30", "03-31", "04-01", "04-02", "04-03", "04-04", "04-05")],
        ),
        # A day in New York ends on the next one in Berlin.
        (sliced("month", "Europe/Berlin"), Upstream("day", "America/New_York"), "2025-03-31", ["2025-03", "2025-04"]),
        (Slices("value", "REGION"), Upstream("value"), "EU", ["EU"]),
        (sliced("month"), Upstream("day"), "2025-03-14|EU", None),
        (sliced("month"), Upstream("day"), None, None),
    ],
)
def test_a_partition_maps_onto_the_slices_that_its_rows_may_be_in(slices, upstream, partition, expected):
    assert slices_of_partition(slices, upstream, partition) == expected


@pytest.mark.parametrize("table", ["orders/source_table", "raw/orders"])
@pytest.mark.parametrize("automation", ["sensor", "condition"])
def test_dagster_maps_the_days_of_a_project_of_ones_own_onto_a_month(table, automation):
    @dg.asset(key=["raw", "orders"], partitions_def=dg.DailyPartitionsDefinition(start_date="2025-03-05"))
    def raw() -> None: ...

    # The asset stands above the source, or is the source.
    named = {"source_table": table} if table == "raw/orders" else {}
    spec = replace(an_extract(), asset_keys=named, automation=automation)
    defs = dg.Definitions.merge(build_defs(specs=(spec,)), dg.Definitions(assets=[raw]))
    dg.Definitions.validate_loadable(defs)
    graph = defs.resolve_asset_graph()
    key, extract_key = dg.AssetKey(["raw", "orders"]), dg.AssetKey(["orders", "purged_extract"])
    assert key in graph.get(dg.AssetKey(["orders", "changed_keys" if named else "source_table"])).parent_keys
    mapping = graph.get_partition_mapping(extract_key, key)
    months = graph.get(extract_key).partitions_def
    mapped = mapping.get_upstream_mapped_partitions_result_for_partitions(
        months.subset_with_partition_keys(["2025-03"]), months, graph.get(key).partitions_def
    )
    days = sorted(mapped.partitions_subset.get_partition_keys())
    assert (days[0], days[-1], len(days)) == ("2025-03-05", "2025-03-31", 27)


def test_what_was_materialized_since_a_moment_tells_the_slices_and_what_is_unclear():
    spec, key = an_extract(), dg.AssetKey(["raw", "orders"])
    now = datetime.now(UTC)
    with dg.DagsterInstance.ephemeral() as instance:
        assert newest_materialization(instance, spec, since=now) is None
        for partition in ("2025-03-14", "2025-03-15", "2025-05-01"):
            instance.report_runless_asset_event(dg.AssetMaterialization(key, partition=partition))
        instance.report_runless_asset_event(dg.AssetMaterialization(["raw", "others"], partition="2025-07-01"))
        before = newest_materialization(instance, spec, since=now)
        assert upstream_changes(instance, spec, since=now).slices == ("2025-03", "2025-05")
        assert len(materialization_stamps(instance, spec, since=now)) == 3
        instance.report_runless_asset_event(dg.AssetMaterialization(key))
        assert upstream_changes(instance, spec, since=now).unclear == ("raw/orders (without a partition)",)
        assert newest_materialization(instance, spec, since=now) not in (None, before)
        assert upstream_changes(instance, spec, since=now + timedelta(hours=1)).slices == ()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("raw/orders:", "raw//orders:"), "has an empty part"),
        (("partitions: day", "partitions: quarter"), "'quarter' is not one of hour, day, week, month, value, none"),
        (("partitions: day", "partitions: value"), "partitions by value map onto slices by value"),
        (("by: month, start: 2025-01", "by: value"), "partitions by day map onto slices by month, week or day"),
        (("partitions: day", "zone: Mars/Olympus"), "is no time zone"),
    ],
)
def test_an_upstream_that_cannot_be_mapped_is_refused(change, sentence):
    with pytest.raises(SpecError, match=sentence):
        an_extract(SPEC.replace(*change))
