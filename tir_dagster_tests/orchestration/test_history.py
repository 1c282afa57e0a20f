"""Dagster's history as commands open it."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import dagster as dg
import pytest

from tir_dagster.orchestration.home import dagster_instance

KEY = dg.AssetKey(["orders", "published_datasource"])


@pytest.fixture(autouse=True)
def _own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIR_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DAGSTER_HOME", raising=False)


@dg.asset(partitions_def=dg.StaticPartitionsDefinition(["a", "b", "c"]), backfill_policy=dg.BackfillPolicy.single_run())
def sliced() -> None: ...


def materialize(instance: dg.DagsterInstance) -> str:
    tags = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "c"}
    return dg.materialize([sliced], instance=instance, tags=tags).run_id


def events(instance: dg.DagsterInstance, run_id: str) -> list[str]:
    return [event.dagster_event.event_type_value for event in instance.all_logs(run_id) if event.dagster_event]


def test_what_a_command_writes_is_the_same_for_everybody_who_opens_the_history_anew():
    with dagster_instance() as instance:
        run_id = materialize(instance)
        instance.report_runless_asset_event(dg.AssetMaterialization(KEY))
        written = events(instance, run_id)
        # Meanwhile, as the UI sees it.
        with dg.DagsterInstance.get() as other:
            assert events(other, run_id) == written
            assert other.get_latest_materialization_event(KEY) is not None
    assert written.count("ASSET_MATERIALIZATION") == 3
    with dg.DagsterInstance.get() as other:
        assert events(other, run_id) == written
        assert other.get_materialized_partitions(sliced.key) == {"a", "b", "c"}


def test_a_file_of_the_history_is_opened_once_and_closed_with_the_command(monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    connect = sqlite3.dbapi2.connect

    def counting(file: str, *arguments, **options):
        opened.append(str(file))
        return connect(file, *arguments, **options)

    with dagster_instance() as instance:
        instance.report_runless_asset_event(dg.AssetMaterialization(KEY))
        monkeypatch.setattr(sqlite3.dbapi2, "connect", counting)
        for _ in range(5):
            instance.report_runless_asset_event(dg.AssetMaterialization(KEY))
        monkeypatch.undo()
        history = Path(instance.root_directory) / "history" / "runs"
        assert [file for file in opened if "/runs/" in file] == []
        assert (history / "index.db-wal").exists(), "it is open"
    assert not (history / "index.db-wal").exists(), "whoever closes it last writes the journal back"


def test_several_threads_write_into_one_history():
    with dagster_instance() as instance:

        def report() -> None:
            for _ in range(5):
                instance.report_runless_asset_event(dg.AssetMaterialization(KEY))

        threads = [threading.Thread(target=report) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(instance.fetch_materializations(KEY, limit=100).records) == 15


def test_a_failed_write_leaves_nothing_half_done():
    def fail(instance: dg.DagsterInstance) -> None:
        with instance.event_log_storage.index_connection() as connection:
            connection.exec_driver_sql("DELETE FROM event_logs")
            raise ValueError("stop")

    with dagster_instance() as instance:
        instance.report_runless_asset_event(dg.AssetMaterialization(KEY))
        with pytest.raises(ValueError, match="stop"):
            fail(instance)
        assert len(instance.fetch_materializations(KEY, limit=100).records) == 1
