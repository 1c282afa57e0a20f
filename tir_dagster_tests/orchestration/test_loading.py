"""The whole chain by sensors: a file lands in the bucket, is loaded, and the datasource follows; what is reported late."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime

import boto3
import dagster as dg
import pytest
from click.testing import CliRunner

from tir_dagster.cli.demo.files import SensorRunner
from tir_dagster.cli.main import tir
from tir_dagster.definitions import build_defs
from tir_dagster.loading.landing import LandedFile
from tir_dagster.loading.load import Loader
from tir_dagster.loading.staging import by_spark, right_here
from tir_dagster.orchestration.home import dagster_instance, tir_home
from tir_dagster.orchestration.loads import Arrivals, complete_files, unreported
from tir_dagster.orchestration.sensing.sensors import Watch
from tir_dagster.refresh.state.lease import lease
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.reading import parse_declared

LOADS = """\
loads:
  - name: order_files
    table: MYDB.MYSCHEMA.MYTABLE
    files: {path: "s3://landing/orders", format: csv}
    mode: merge
    key: ORDER_ID
    order_by: UPDATED_AT
    delete_flag: OP
    columns: {ORDER_ID: "NUMBER(38,0)", ORDER_DATE: DATE, CUSTOMER: VARCHAR, QUANTITY: NUMBER, UPDATED_AT: TIMESTAMP_NTZ}
    schedule: "*/15 * * * *"
"""
HEADER = "ORDER_ID,ORDER_DATE,CUSTOMER,QUANTITY,UPDATED_AT,OP\n"
SOURCE = dg.AssetKey(["order_files", "source_table"])


@pytest.fixture(scope="module")
def s3(place):
    """A client of the stand-in; the place has set the variables that any client reads."""
    return boto3.Session().client("s3")


@pytest.fixture(scope="module")
def specs(place):
    file = place.folder / "loads.yaml"
    # What a load reports is all that this extract learns of changes.
    hinted = place.spec_text.replace("{watermark: UPDATED_AT, look_back: 1 second}", "{detector: hint}")
    file.write_text(hinted + LOADS, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def declared(specs):
    return parse_declared(specs.read_text(encoding="utf-8"), str(specs))


def land(s3, name: str, *rows: str) -> None:
    s3.put_object(Bucket="landing", Key=f"orders/{name}", Body=(HEADER + "".join(f"{row}\n" for row in rows)).encode())


def newest(place) -> str:
    return str(place.sql("SELECT DATEADD('second', 1, MAX(UPDATED_AT)) FROM MYTABLE")[0][0])


def test_a_file_in_the_bucket_becomes_a_refreshed_datasource_by_sensors_alone(place, s3, declared):
    place = type(place)(place.sandbox, declared.extracts[0], place.spec_text, place.folder, place.before)
    assert place.refresh().published
    ((gone,), (kept,)) = place.sql("SELECT ORDER_ID FROM MYTABLE ORDER BY ORDER_ID LIMIT 2")
    stamp = newest(place)
    land(
        s3,
        "day1.csv",
        f"99000001,2026-01-05,new,1,{stamp},",
        f"{gone},,,,{stamp},D",
        f"{kept},2026-01-06,moved,7,{stamp},",
    )
    with dagster_instance() as instance:
        daemon = SensorRunner(declared.extracts, declared.loads, instance)
        assert daemon.tick("order_files_arrival") == ""
        metadata = instance.get_latest_materialization_event(SOURCE).asset_materialization.metadata
        assert metadata["tir/hint"].value["type"] == "MIXED_CHANGES"
        keys = {key["ORDER_ID"] for key in metadata["tir/hint"].value["scope"]["keys"]}
        assert keys == {99000001, int(gone), int(kept)}
        assert daemon.tick("order_files_arrival") == "there are no new files"
        this_file = "WHERE PATH LIKE '%/day1.csv'"
        # Whoever changes the ledger by hand wants it loaded again: that a run of these files is done settles nothing.
        place.sql(f"UPDATE TIR_LOADED_FILES SET STAMP = STAMP || '-' {this_file}")
        assert "the next attempt is in" in daemon.tick("order_files_arrival")
        place.sql(f"UPDATE TIR_LOADED_FILES SET STAMP = LEFT(STAMP, LENGTH(STAMP) - 1) {this_file}")
        daemon.until_it_asks("orders_source")
        assert daemon.tick("orders_refresh") == ""
    assert place.published_rows() == place.source_rows()
    assert place.sql("SELECT CUSTOMER FROM MYTABLE WHERE ORDER_ID = 99000001") == [("new",)]


def test_spark_may_read_the_files_itself(place, spark, tmp_path):
    place.sql("CREATE OR REPLACE TABLE BY_SPARK (ID NUMBER, NAME VARCHAR)")
    (tmp_path / "a b%20[1].csv").write_text("ID,NAME\n1,x\n", encoding="utf-8")
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(b"ID,NAME\n2,y\n"))
    text = f"""
loads:
  - name: by_spark
    table: MYDB.MYSCHEMA.BY_SPARK
    files: {{path: "file://{tmp_path}", format: csv, settle: 0 seconds, through: spark}}
    mode: append
"""
    (spec,) = parse_declared(text, "test.yaml").loads
    access = SnowflakeAccess.from_environment(place.sandbox.env)
    assert Loader(spec, access=access, stager=by_spark(lambda: spark)).run().inserted == 2
    assert place.sql("SELECT ID, NAME FROM BY_SPARK ORDER BY ID") == [(1, "x"), (2, "y")]


def test_a_load_whose_process_died_after_its_commit_is_reported_by_the_sensors_next_tick(place, s3, declared):
    land(s3, "late.csv", f"98000001,2026-01-05,late,1,{newest(place)},")
    access = SnowflakeAccess.from_environment(place.sandbox.env)
    assert Loader(declared.loads[0], access=access, stager=right_here).run().inserted == 1
    with dagster_instance() as instance:
        daemon = SensorRunner((), declared.loads, instance)
        with lease(tir_home() / "loads" / "order_files" / "lease", purpose="a load at work, which will report itself"):
            daemon.tick("order_files_arrival")
            assert "98000001" not in str(last_told(instance))
        assert daemon.tick("order_files_arrival") == "there are no new files"
        metadata = last_told(instance)
        assert (metadata["tir/late"].value, "98000001" in str(metadata["tir/hint"].value)) == (True, True)
        events = instance.fetch_materializations(SOURCE, limit=100).records
        daemon.cursors.clear()
        daemon.tick("order_files_arrival")
        job = daemon.defs.resolve_job_def("order_files_load")
        assert job.execute_in_process(instance=instance).success
        assert len(instance.fetch_materializations(SOURCE, limit=100).records) == len(events), "told once"


def test_the_command_prints_what_the_load_recorded(place, s3, specs):
    land(
        s3, "command.csv", f"97000001,2026-01-05,new,1,{newest(place)},", f"97000002,2026-01-05,new,1,{newest(place)},"
    )

    def load() -> dict:
        done = CliRunner().invoke(tir, ["--specs", str(specs), "load", "order_files", "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    outcome = load()
    assert (outcome["rows_read"], outcome["rows_inserted"], outcome["keys_changed"]) == (2, 2, 2)
    assert outcome["files"] == {"loaded": ["s3://landing/orders/command.csv"], "repeated": [], "superseded": []}
    assert {"look", "stage", "commit"} <= outcome["stages"].keys()
    again = load()
    assert (again["load_id"], again["keys_changed"]) == (None, 0)
    assert again["files"] == {"loaded": [], "repeated": [], "superseded": []}


def last_told(instance) -> dict:
    event = instance.get_latest_materialization_event(SOURCE)
    return event.asset_materialization.metadata if event else {}


def test_the_loads_table_is_above_the_extract_that_reads_it(declared):
    defs = build_defs(specs=declared.extracts, loads=declared.loads)
    graph = defs.resolve_asset_graph()
    assert graph.get(dg.AssetKey(["orders", "source_table"])).parent_keys == {SOURCE}
    assert graph.get(SOURCE).parent_keys == {dg.AssetKey(["order_files", "landed_files"])}
    assert defs.resolve_schedule_def("order_files_schedule").cron_schedule == "*/15 * * * *"


# The arrival sensor's decision


def landed(name: str, stamp: str = "1") -> LandedFile:
    return LandedFile(f"file:///in/{name}", 1, datetime.now(UTC), stamp)


def test_a_file_is_loaded_once_it_has_looked_the_same_for_long_enough():
    seen, ready = complete_files(Arrivals(), [landed("a")], now=100.0, settle=5)
    assert ready == []
    seen, ready = complete_files(Arrivals(seen), [landed("a", "2")], now=104.0, settle=5)
    assert ready == [], "it grew meanwhile"
    seen, ready = complete_files(Arrivals(seen), [landed("a", "2")], now=109.0, settle=5)
    assert [file.path for file in ready] == ["file:///in/a"]


def test_no_file_overtakes_an_earlier_one_that_is_still_being_written():
    seen, _ = complete_files(Arrivals(), [landed("a"), landed("b")], now=100.0, settle=5)
    files = [landed("a", "2"), landed("b")]
    _, ready = complete_files(Arrivals(seen), files, now=110.0, settle=5)
    assert ready == []
    _, ready = complete_files(Arrivals(seen), files, now=110.0, settle=5, in_order=False)
    assert ready == files[1:], "rows of files that are only appended do not meet"
    _, ready = complete_files(Arrivals(), files, now=110.0, settle=0, unfinished=frozenset({files[1].path}))
    assert ready == files[:1], "without its marker"


def test_loads_are_reported_by_their_ids_whichever_ended_first():
    """The id tells when a load began: one that began first may end last."""
    with dg.DagsterInstance.ephemeral() as instance:
        for ids in ({"tir/load_id": "2"}, {"tir/load_id": "4", "tir/load_ids": ["3", "4"]}, {}):
            instance.report_runless_asset_event(dg.AssetMaterialization(SOURCE, metadata=ids))
        assert unreported(instance, SOURCE, ["2", "1", "3", "4"]) == ["1"]


def test_what_the_sensor_remembers_survives_its_cursor_and_a_broken_one_is_forgotten():
    known = Arrivals({"a": ("1", 2.0)}, Watch(token="t", requested="t", attempt=2), ("load",))
    assert Arrivals.parse(known.to_cursor()) == known
    assert Arrivals.parse("{") == Arrivals.parse('{"seen": 5}') == Arrivals()
