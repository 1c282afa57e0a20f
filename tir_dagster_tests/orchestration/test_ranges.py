"""Many slices and ranges of them: one run and one publish, from the sensors, from Dagster's command line and from ours."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest

from tir_dagster.cli.refresh import Command, chosen_slices
from tir_dagster.definitions import build_defs
from tir_dagster.errors import SpecError
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.orchestration.partitions import known_slices, slice_partitions
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import parse_specs
from tir_dagster_tests.orchestration.conftest import Place
from tir_dagster_tests.orchestration.jobs import QUIET, detect, events, refresh_tick
from tir_dagster_tests.sandbox.tableau.helpers import Admin

SPEC = """\
extracts:
  - name: orders
    source: MYDB.MYSCHEMA.LONG
    row_key: ID
    slices: {column: DAY, by: month, start: START}
    datasource: {project: myproject, name: long}
    thresholds: {quiet_period: 1 second}
"""


def months_back(count: int) -> str:
    now = datetime.now(UTC)
    month = now.year * 12 + now.month - count
    return f"{month // 12:04d}-{month % 12 + 1:02d}"


@pytest.fixture(scope="module")
def text() -> str:
    return SPEC.replace("START", months_back(60))


@pytest.fixture(scope="module")
def spec(text) -> ExtractSpec:
    (declared,) = parse_specs(text, "test.yaml")
    return declared


@pytest.fixture(scope="module")
def slices(spec) -> list[str]:
    return list(slice_partitions(spec.slices).get_partition_keys())


@pytest.fixture(scope="module")
def long(place, spec, slices) -> Place:
    """A table with two rows in each of sixty months, published."""
    place.sql("CREATE TABLE LONG (ID INT NOT NULL, DAY DATE, NOTE VARCHAR)")
    rows = ", ".join(
        f"({2 * at + more}, '{month}-0{1 + more}', 'first')" for at, month in enumerate(slices) for more in (0, 1)
    )
    place.sql(f"INSERT INTO LONG VALUES {rows}")
    assert refresh(spec, "changes", []).published
    return place


def refresh(spec: ExtractSpec, mode: str, slices: list[str]):
    with dagster_instance() as instance:
        return Command(spec, instance, lambda _: None).refresh(mode, slices, allow_empty=False)


def publishes(instance, spec: ExtractSpec) -> int:
    return len(instance.fetch_materializations(extract_keys(spec).published_datasource, limit=100).records)


def test_of_sixty_slices_changes_in_the_first_and_last_are_one_run_and_one_publish(long, spec, slices):
    assert len(slices) == 60
    long.sql("UPDATE LONG SET NOTE = 'changed' WHERE ID = 0")
    long.sql(f"INSERT INTO LONG VALUES (1000, '{slices[-1]}-03', 'new')")
    defs = build_defs(specs=(spec,))
    with dagster_instance() as instance:
        before = publishes(instance, spec)
        detect(defs, instance)
        (request,) = refresh_tick(defs, instance).run_requests
        done = defs.resolve_job_def("orders_refresh").execute_in_process(
            instance=instance, tags=request.tags, run_config={**QUIET, **request.run_config}
        )
        assert publishes(instance, spec) == before + 1
    purged = events(done, "purged_extract")
    assert list(purged) == slices
    moved = {
        name: (metadata["tir/slice_purged"], metadata["tir/slice_appended"], metadata["dagster/partition_row_count"])
        for name, metadata in purged.items()
    }
    assert moved == {**dict.fromkeys(slices, (0, 0, 2)), slices[0]: (1, 1, 2), slices[-1]: (0, 1, 3)}
    assert len({metadata["tir/slice_fingerprint"] for metadata in purged.values()}) == 60
    picture = purged[slices[0]]["tir/changes"]
    assert f"| {slices[0]} | 1 | 1 | ████" in picture
    assert slices[1] not in picture


def by_dagster(place, text: str, first: str, last: str) -> subprocess.CompletedProcess[str]:
    """`dagster asset materialize` in a process of its own, without a daemon."""
    (place.folder / "long.yaml").write_text(text, encoding="utf-8")
    command = [
        *(str(Path(sys.executable).with_name("dagster")), "asset", "materialize", "-m", "tir_dagster.definitions"),
        *("--select", 'key:"orders/purged_extract" or key:"orders/published_datasource"'),
        *("--partition-range", f"{first}...{last}"),
    ]
    env = {**os.environ, "TIR_SPECS": str(place.folder / "long.yaml"), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def newest(spec: ExtractSpec, names: list[str]) -> dict[str, dict]:
    """What the newest event of each slice tells of it."""
    fields = ("tir/mode", "tir/decision", "tir/slice_purged", "tir/slice_appended", "dagster/partition_row_count")
    with dagster_instance() as instance:
        key = extract_keys(spec).purged_extract
        records = {
            name: instance.fetch_materializations(
                dg.AssetRecordsFilter(asset_key=key, asset_partitions=[name]), limit=1
            ).records[0]
            for name in names
        }
    return {
        name: {field: record.asset_materialization.metadata[field].value for field in fields}
        for name, record in records.items()
    }


@pytest.mark.long
def test_a_range_gives_the_same_by_dagsters_command_line_and_by_ours(long, text, spec, slices):
    names = slices[10:13]
    results = []
    for way in ("dagster", "tir"):
        # Two rows of each slice go and one comes; the second time one also leaves the first slice for the last.
        long.sql(f"DELETE FROM LONG WHERE DAY BETWEEN '{names[0]}-01' AND '{names[2]}-28'")
        kept = ", ".join(f"({5000 + at}, '{name}-0{1 + at}', '{way}')" for at, name in enumerate(names))
        long.sql(f"INSERT INTO LONG VALUES {kept}, (6000, '{names[0 if way == 'dagster' else 2]}-09', '{way}')")
        if way == "dagster":
            done = by_dagster(long, text, names[0], names[-1])
            assert done.returncode == 0, done.stderr[-3000:]
        else:
            assert refresh(spec, "slices", chosen_slices(spec, f"{names[0]}..{names[-1]}")).published
        results.append(newest(spec, names))
        with dagster_instance() as instance:
            defs = build_defs(specs=(spec,))
            verified = defs.resolve_job_def("orders_verify").execute_in_process(instance=instance, run_config=QUIET)
        assert all(evaluation.passed for evaluation in verified.get_asset_check_evaluations())
    for name, rows in zip(names, ((2, 1), (1, 1), (1, 2)), strict=True):
        for result, held in zip(results, rows, strict=True):
            assert result[name]["dagster/partition_row_count"] == result[name]["tir/slice_appended"] == held
            assert (result[name]["tir/mode"], result[name]["tir/decision"]) == ("slices", "incremental")


BY_VALUE = """\
extracts:
  - name: regions
    source: MYDB.MYSCHEMA.REGIONS
    slices: {column: REGION, by: value}
    datasource: {project: myproject, name: regions}
    delivery: patch
    checks: {server: true}
    thresholds: {quiet_period: 1 second, delete_share: 1.0, full_share: 1.0}
"""


def held(spec: ExtractSpec) -> dict[str, int]:
    """The partitions of the slices, in the order in which they came, with the rows that their newest events tell."""
    with dagster_instance() as instance:
        names = known_slices(instance, spec)
    return {name: metadata["dagster/partition_row_count"] for name, metadata in newest(spec, names).items()}


def test_slices_by_value_come_and_go_with_the_values_and_are_replaced_whole_without_a_row_key(long):
    (spec,) = parse_specs(BY_VALUE, "test.yaml")
    long.sql("CREATE TABLE REGIONS (REGION VARCHAR, NOTE VARCHAR)")
    long.sql("INSERT INTO REGIONS VALUES ('EU', 'a'), ('EU', 'a'), ('US', 'b'), (NULL, 'c'), ('', 'd')")
    long.sql("INSERT INTO REGIONS SELECT 'O''H', NOTE FROM LONG LIMIT 4")
    first = refresh(spec, "changes", [])
    assert first.published
    assert held(spec) == {"(rest)": 2, "EU": 2, "O'H": 4, "US": 1}
    long.sql("DELETE FROM REGIONS WHERE REGION = 'US'")
    long.sql("INSERT INTO REGIONS VALUES ('APAC', 'f'), (NULL, 'g'), ('EU', 'h')")
    admin = Admin(long.sandbox.tableau_url)
    admin.forget_calls()
    second = refresh(spec, "changes", [])
    assert [call["route"] for call in admin.calls() if call["route"] in ("publish", "update_data")] == ["update_data"]
    assert (second.decision, second.rows_purged, second.rows_appended) == ("incremental", 5, 7)
    assert held(spec) == {"(rest)": 3, "EU": 3, "O'H": 4, "APAC": 1}, "nothing is left of US"
    resynced = refresh(spec, "slices", chosen_slices(spec, "APAC, O'H"))
    assert resynced.slices == ["(no date)", "APAC", "O'H"], "the rest belongs to every run"
    with pytest.raises(SpecError, match="no slice 'US'"):
        chosen_slices(spec, "US")
    with dagster_instance() as instance:
        verify = build_defs(specs=(spec,)).resolve_job_def("regions_verify")
        verified = verify.execute_in_process(instance=instance, run_config=QUIET)
    checked = {evaluation.check_name: evaluation.passed for evaluation in verified.get_asset_check_evaluations()}
    assert checked == {"equals_source": True, "server_holds_it": True}


def test_unknown_and_reversed_ranges_are_refused_on_the_command_line(spec, slices):
    with pytest.raises(SpecError, match="has no slice '1999-01'"):
        chosen_slices(spec, f"1999-01..{slices[3]}")
    with pytest.raises(SpecError, match="is reversed"):
        chosen_slices(spec, f"{slices[3]}..{slices[2]}")
