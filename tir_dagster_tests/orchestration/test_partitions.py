"""Slices of a run, the range that covers touched slices, and which partitions of change sets may go."""

from datetime import UTC, datetime

import dagster as dg
import pytest

from tir_dagster.errors import SpecError
from tir_dagster.orchestration.partitions import (
    HELD,
    KEEP_CHANGE_SETS,
    RANGE_END,
    RANGE_START,
    add_slices,
    change_set_partitions,
    covering_range,
    extract_partitions,
    failed_slices,
    known_slices,
    partitions_in_flight,
    partitions_to_retire,
    rest_of,
    retire_change_sets,
    retire_slices,
    slice_partitions,
    slices_between,
    slices_of_run,
    slices_to_add,
    slices_to_remove,
)
from tir_dagster.spec.extract import Datasource, ExtractSpec
from tir_dagster.spec.tables import Slices

MONTHS = Slices(by="month", column="ORDER_DATE", start="2025-01")
CHANGED_KEYS = dg.AssetKey(["orders", "changed_keys"])


def an_extract(slices: Slices = MONTHS) -> ExtractSpec:
    return ExtractSpec("orders", "DB.S.T", Datasource("d", "p"), row_key=("ID",), slices=slices)


def ranged(first: str, last: str) -> dict[str, str]:
    return {RANGE_START: first, RANGE_END: last}


def test_a_run_is_for_its_partition_or_its_range():
    assert slices_of_run(an_extract(), {"dagster/partition": "2025-02"}) == ["2025-02"]
    assert slices_of_run(an_extract(), ranged("2025-02", "2025-04")) == ["2025-02", "2025-03", "2025-04"]


def test_an_extract_without_slices_has_none_in_any_run():
    assert slices_of_run(an_extract(Slices()), {}) == []


@pytest.mark.parametrize(
    ("tags", "sentence"),
    [
        (ranged("2025-04", "2025-02"), "reversed. Write the earlier slice first: 2025-02..2025-04"),
        (ranged("2025-02", "2099-01"), "no slice '2099-01'"),
        (ranged("2024-12", "2025-02"), "no slice '2024-12'"),
        ({}, "the run names no slice"),
    ],
)
def test_a_range_that_dagster_would_bend_in_silence_is_refused(tags, sentence):
    with pytest.raises(SpecError, match=sentence):
        slices_of_run(an_extract(), tags)


def test_the_current_slice_is_a_partition_too_and_weeks_start_on_monday():
    days = slice_partitions(Slices(by="day", column="D", start="2025-01-01"))
    weeks = slice_partitions(Slices(by="week", column="D", start="2025-01-06"))
    assert days.get_partition_keys()[-1] == f"{datetime.now(UTC):%Y-%m-%d}"
    assert weeks.get_partition_keys()[:2] == ["2025-01-06", "2025-01-13"]


def test_the_covering_range_is_the_smallest_one_and_falls_back_to_the_newest_slice():
    assert covering_range(an_extract(), ["2025-05", None, "2025-02", "1999-01"]) == ranged("2025-02", "2025-05")
    newest = slice_partitions(MONTHS).get_partition_keys()[-1]
    assert covering_range(an_extract(), [None, "1999-01"]) == ranged(newest, newest)
    assert covering_range(an_extract(Slices()), [None]) == {}


# Slices by value

REGIONS = Slices(by="value", column="REGION")
KNOWN = ["(rest)", "EU", "US", "APAC"]


def test_a_range_of_values_follows_the_order_in_which_they_came():
    spec = an_extract(REGIONS)
    assert covering_range(spec, ["APAC", "EU"], KNOWN) == ranged("EU", "APAC")
    assert covering_range(spec, ["EU", None], KNOWN) == ranged("(rest)", "EU")
    assert covering_range(spec, [None, "a...b"], KNOWN) == ranged("(rest)", "(rest)")
    assert slices_of_run(spec, ranged("US", "APAC"), KNOWN) == ["US", "APAC"]
    assert slices_of_run(spec, {"dagster/partition": "US"}, KNOWN) == ["US"]
    with pytest.raises(SpecError, match="reversed"):
        slices_of_run(spec, ranged("APAC", "US"), KNOWN)


def test_values_are_named_between_commas_and_unknown_ones_are_refused():
    spec = an_extract(REGIONS)
    assert slices_between(spec, "US, EU", KNOWN) == ["US", "EU"]
    assert slices_between(spec, "a, b", [*KNOWN, "a, b"]) == ["a, b"], "a comma may be in the value"
    with pytest.raises(SpecError, match="no slice 'MARS': its slices are the values of REGION that it holds"):
        slices_between(spec, "EU,MARS", KNOWN)


def test_what_cannot_be_a_partition_is_the_rest():
    present = [None, "EU", "a...b", "tab\there", "x" * 201]
    assert rest_of(an_extract(REGIONS), [], present) == [None, "a...b", "tab\there", "x" * 201]


def test_values_come_with_a_change_set_and_go_when_nothing_is_left_of_them():
    assert slices_to_add(["(rest)", "EU"], ["US", None, "EU", "a...b"]) == ["US"]
    assert slices_to_add([], [None]) == ["(rest)"]
    assert slices_to_remove(KNOWN, held=["EU"], needed=["US"], in_flight=()) == ["APAC"]
    assert slices_to_remove(KNOWN, held=["EU"], needed=(), in_flight={"APAC"}) == ["US"]


def test_a_value_with_a_run_in_flight_keeps_its_partition():
    spec = an_extract(REGIONS)
    published = dg.AssetKey(["orders", "published_datasource"])
    gone: list[str] = []

    @dg.asset(partitions_def=extract_partitions(spec))
    def running(context: dg.AssetExecutionContext) -> None:
        gone.extend(retire_slices(context.instance, spec, published))

    with dg.DagsterInstance.ephemeral() as instance:
        assert add_slices(instance, spec, ["US", "EU"]) == ["(rest)", "EU", "US"]
        assert add_slices(instance, spec, ["APAC", "EU"]) == KNOWN
        assert retire_slices(instance, spec, published) == [], "nothing is published yet"
        instance.report_runless_asset_event(dg.AssetMaterialization(published, metadata={HELD: ["EU"]}))
        assert dg.materialize([running], instance=instance, partition_key="US").success
        assert gone == ["APAC"]
        assert retire_slices(instance, spec, published) == ["US"]
        assert known_slices(instance, spec) == ["(rest)", "EU"]


def test_only_settled_change_sets_beyond_the_newest_ones_retire():
    existing = ["e", "a", "c", "b", "d", "f"]
    assert partitions_to_retire(existing, pending=(), in_flight=(), keep=2) == ["a", "b", "c", "d"]
    assert partitions_to_retire(existing, pending={"b"}, in_flight={"c"}, keep=2) == ["a", "d"]
    assert partitions_to_retire(existing, pending=(), in_flight=(), keep=6) == []


def test_a_range_in_flight_holds_every_partition_in_it():
    tags = [{"dagster/partition": "a"}, ranged("c", "e"), ranged("2025-01", "2025-02"), {}]
    assert partitions_in_flight(tags, ["a", "b", "c", "d", "e"]) == {"a", "c", "d", "e"}


def test_a_partition_with_a_run_in_flight_is_not_deleted():
    spec = an_extract()
    name = str(change_set_partitions(spec).name)
    idents = [f"2025{at:05d}" for at in range(KEEP_CHANGE_SETS + 4)]
    gone: list[str] = []

    @dg.asset(partitions_def=change_set_partitions(spec))
    def running(context: dg.AssetExecutionContext) -> None:
        gone.extend(retire_change_sets(context.instance, spec, CHANGED_KEYS, pending={idents[2]}))

    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(name, idents)
        assert dg.materialize([running], instance=instance, partition_key=idents[0]).success
        assert gone == [idents[1], idents[3]]
        assert instance.get_dynamic_partitions(name) == [idents[0], idents[2], *idents[4:]]
        # Its run has ended, so now it may go.
        assert retire_change_sets(instance, spec, CHANGED_KEYS, pending={idents[2]}) == [idents[0]]


def test_partitions_of_detections_that_failed_go_with_a_later_publish():
    spec = an_extract()
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(str(change_set_partitions(spec).name), ["1", "2", "3", "4", "5"])
        for staged in ("2", "4"):
            instance.report_runless_asset_event(dg.AssetMaterialization(CHANGED_KEYS, partition=staged))
        gone = retire_change_sets(instance, spec, CHANGED_KEYS, pending={"3"}, settled="4")
        assert gone == ["1"], "2 and 4 are staged, 3 is pending, 5 is of a detection that has only begun"


def test_slices_whose_run_failed_are_known_until_they_are_materialized():
    spec = an_extract()
    key = dg.AssetKey(["orders", "purged_extract"])

    @dg.asset(key=key, partitions_def=extract_partitions(spec))
    def purged_extract(context: dg.AssetExecutionContext) -> None:
        if "fail" in context.run.tags:
            raise ValueError("as asked")

    def run(name: str, **tags: str) -> None:
        dg.materialize([purged_extract], instance=instance, partition_key=name, tags=tags, raise_on_error=False)

    with dg.DagsterInstance.ephemeral() as instance:
        for name in ("2025-01", "2025-02"):
            run(name, fail="yes")
        run("2025-02")
        assert failed_slices(instance, spec, key) == ["2025-01"]
        instance.report_runless_asset_event(dg.AssetMaterialization(key, partition="2025-01"))
        assert failed_slices(instance, spec, key) == []
