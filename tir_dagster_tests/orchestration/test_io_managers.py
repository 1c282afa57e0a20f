"""Handles between steps: real stores on disk, real Dagster runs, no rows."""

from pathlib import Path

import dagster as dg
import pytest

from tir_dagster.changes.change_set import ChangeSet
from tir_dagster.changes.plan import SourceState
from tir_dagster.errors import ExtractError, TirError
from tir_dagster.orchestration.io_managers import (
    CHANGE_SET_IO,
    HYPER_IO,
    OPTIONAL,
    ChangeSetIOManager,
    HyperIOManager,
    StagedChangeSet,
    StateFolder,
)
from tir_dagster.orchestration.partitions import RANGE_END, RANGE_START
from tir_dagster.refresh.state.versions import Version

MONTHS = dg.MonthlyPartitionsDefinition(start_date="2025-01", fmt="%Y-%m", end_offset=1)
SETS = dg.DynamicPartitionsDefinition(name="orders_change_sets")
PURGED, CHANGED = dg.AssetKey(["orders", "purged_extract"]), dg.AssetKey(["orders", "changed_keys"])


@pytest.fixture
def state(tmp_path) -> StateFolder:
    return StateFolder(path=str(tmp_path))


@pytest.fixture
def resources(state):
    return {CHANGE_SET_IO: ChangeSetIOManager(state=state), HYPER_IO: HyperIOManager(state=state)}


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


def a_version(state: StateFolder) -> Version:
    store = state.versions("orders")
    workspace = store.begin()
    workspace.extract.write_bytes(b"a hyper file")
    return store.commit(workspace, {"base": None})


def a_change_set(state: StateFolder, ident: str) -> ChangeSet:
    store = state.change_sets("orders")
    change_set = ChangeSet(
        id=ident,
        extract="orders",
        base=None,
        source_version="2025-01-01T00:00:00.000000+00:00",
        known=SourceState("d", "s", "i", "t"),
        mode="changes",
        decision="incremental",
        reason=None,
        keys=1,
        rows=1,
        purged={},
        appended={"2025-01": 1},
        watermark=None,
    )
    with store.staging(ident) as folder:
        (folder / "rows").write_bytes(b"0123456789")
        return store.commit(change_set, folder)


def extract_asset(value, partitions=None):
    policy = dg.BackfillPolicy.single_run() if partitions else None

    @dg.asset(key=PURGED, partitions_def=partitions, io_manager_key=HYPER_IO, backfill_policy=policy)
    def purged_extract():
        return value

    return purged_extract


def reader_of(key: dg.AssetKey, seen: list, mapping=None, partitions=None):
    @dg.asset(ins={"given": dg.AssetIn(key, partition_mapping=mapping)}, partitions_def=partitions)
    def report(given) -> None:
        seen.append(given)

    return report


@pytest.mark.parametrize(
    ("partitions", "options"),
    [
        (None, {}),
        (MONTHS, {"partition_key": "2025-02"}),
        (MONTHS, {"tags": {RANGE_START: "2025-02", RANGE_END: "2025-04"}}),
    ],
)
def test_a_later_run_gets_the_newest_version_of_a_slice_a_range_or_the_whole(
    state, resources, instance, partitions, options
):
    version = a_version(state)
    upstream = extract_asset(version, partitions)
    done = dg.materialize([upstream], instance=instance, resources=resources, **options)
    (event, *_) = done.asset_materializations_for_node("orders__purged_extract")
    assert Path(event.metadata["path"].value) == version.extract
    assert event.metadata["dagster/uri"].value == version.extract.as_uri()
    assert event.metadata["tir/bytes"].value == len(b"a hyper file")
    newest = a_version(state)
    seen: list[Version] = []
    mapping = dg.AllPartitionMapping() if partitions else None
    report = reader_of(PURGED, seen, mapping)
    dg.materialize([upstream, report], selection=[report], instance=instance, resources=resources)
    assert [(version_seen.id, version_seen.extract.read_bytes()) for version_seen in seen] == [
        (newest.id, b"a hyper file")
    ]


def test_a_version_that_is_not_on_the_disk_is_no_output(state, resources):
    lost = Version(7, state.folder / "elsewhere", {})
    with pytest.raises(ExtractError, match="no complete version elsewhere"):
        dg.materialize([extract_asset(lost)], resources=resources)


def test_a_version_under_another_base_path_is_refused(state, resources, tmp_path):
    a_version(state)
    foreign = a_version(StateFolder(path=str(tmp_path / "other")))
    with pytest.raises(ExtractError, match="the same path"):
        dg.materialize([extract_asset(foreign)], resources=resources)


def test_without_any_version_the_reader_is_told_what_to_do(state, resources):
    upstream, report = extract_asset(None), reader_of(PURGED, [])
    with pytest.raises(ExtractError, match="Materialize purged_extract first, or run tir refresh orders"):
        dg.materialize([upstream, report], selection=[report], resources=resources)


def changed_keys_asset(state):
    @dg.asset(key=CHANGED, partitions_def=SETS, io_manager_key=CHANGE_SET_IO)
    def changed_keys(context: dg.AssetExecutionContext):
        return a_change_set(state, context.partition_key)

    return changed_keys


def test_a_pending_change_set_comes_back_with_its_folder_and_a_settled_one_says_so(state, resources, instance):
    instance.add_dynamic_partitions(str(SETS.name), ["a"])
    upstream, seen = changed_keys_asset(state), []
    report = reader_of(CHANGED, seen, partitions=SETS)
    options = {"instance": instance, "resources": resources, "partition_key": "a"}
    done = dg.materialize([upstream, report], **options)
    (event,) = done.asset_materializations_for_node("orders__changed_keys")
    folder = state.change_sets("orders").path("a")
    assert Path(event.metadata["path"].value) == folder
    assert event.metadata["tir/bytes"].value > 10
    assert seen == [StagedChangeSet(state.change_sets("orders").get("a"), folder)]
    state.change_sets("orders").settle(("a",))
    with pytest.raises(TirError, match="change set a is not pending"):
        dg.materialize([upstream, report], selection=[report], **options)


def test_an_asset_that_takes_all_change_sets_gets_the_pending_ones(state, resources, instance):
    instance.add_dynamic_partitions(str(SETS.name), ["a", "b", "c"])
    a_change_set(state, "b")
    a_change_set(state, "c")
    upstream, seen = changed_keys_asset(state), []
    report = reader_of(CHANGED, seen, dg.AllPartitionMapping())
    dg.materialize([upstream, report], selection=[report], instance=instance, resources=resources)
    assert [set(change_sets) for change_sets in seen] == [{"b", "c"}]


def test_a_change_set_that_was_never_staged_is_no_output(state, resources, instance):
    instance.add_dynamic_partitions(str(SETS.name), ["a"])
    never = a_change_set(state, "a")
    state.change_sets("orders").settle(("a",))

    @dg.asset(key=CHANGED, partitions_def=SETS, io_manager_key=CHANGE_SET_IO)
    def changed_keys():
        return never

    with pytest.raises(TirError, match="Nothing was purged; refresh again"):
        dg.materialize([changed_keys], instance=instance, resources=resources, partition_key="a")


@pytest.mark.parametrize("optional", [True, False])
def test_before_the_first_version_only_an_optional_input_gets_none(resources, instance, optional):
    @dg.asset(key=PURGED, io_manager_key=HYPER_IO)
    def purged_extract() -> Version:
        raise AssertionError("it is only loaded")

    @dg.asset(ins={"version": dg.AssetIn(PURGED, metadata={OPTIONAL: optional})})
    def reader(version: Version | None) -> bool:
        return version is None

    def materialize() -> dg.ExecuteInProcessResult:
        return dg.materialize([purged_extract, reader], instance=instance, resources=resources, selection=[reader])

    if optional:
        assert materialize().output_for_node("reader")
    else:
        with pytest.raises(ExtractError, match="there is no verified extract"):
            materialize()
