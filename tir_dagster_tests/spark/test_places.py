"""Staging places: parts are fetched whole or not at all, nothing stays behind, and whoever may not use a place learns why."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from tir_dagster.errors import SourceError
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.slices import SliceBy
from tir_dagster.spark.places import StagedPart, StagingPlace
from tir_dagster.spark.staging import StagingTask, write_part

ROWS = 1_000
COLUMNS = (Column("ID", Kind.INTEGER, 38),)


class Batch:
    """A part of a result, already here."""

    rowcount = ROWS

    def to_arrow(self, **_: Any) -> pa.Table:
        return pa.table({"ID": pa.array(range(ROWS), pa.int64())})


class CuttingFile(MemoryFile):
    """A file of which a client gets half of what it asks for, and then the connection is lost; `cuts` times."""

    cuts = 0

    def read(self, length: int = -1) -> bytes:
        if CuttingFile.cuts and length > 1:
            if CuttingFile.cuts % 2:
                CuttingFile.cuts -= 1
                raise ConnectionResetError("the connection was reset")
            CuttingFile.cuts -= 1
            return super().read(length // 2)
        return super().read(length)


class CuttingStore(MemoryFileSystem):
    protocol = "cutting"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        opened = super()._open(path, mode, **options)
        if mode == "rb":
            opened.__class__ = CuttingFile
        return opened


fsspec.register_implementation("cutting", CuttingStore, clobber=True)


@pytest.fixture
def s3(sandbox, monkeypatch) -> Any:
    for name, value in sandbox.env.items():
        monkeypatch.setenv(name, value)
    return boto3.Session().client("s3")


def written(place: StagingPlace, folder: str) -> StagedPart:
    """A part as a task writes it, in a process that has nothing but the pickled place."""
    task = StagingTask(COLUMNS, SliceBy(), folder, pickle.loads(pickle.dumps(place)))
    report = write_part(task, [Batch()])
    return StagedPart(report["file"], report["rows"], report["bytes"])


def contents(place: StagingPlace) -> list[str]:
    filesystem, path = place._opened
    infos = filesystem.get_file_info(pa.fs.FileSelector(path, recursive=True, allow_not_found=True))
    return [info.path for info in infos if info.is_file]


def s3_place(s3) -> StagingPlace:
    return StagingPlace.of("s3://landing/staged", os.environ)


@pytest.mark.parametrize("kind", ["s3", "folder", "memory"])
def test_parts_come_whole_and_nothing_is_left_wherever_they_were(kind, s3, tmp_path):
    addresses = {"s3": "s3a://landing/staged/", "folder": str(tmp_path / "shared"), "memory": "memory://staged"}
    place = StagingPlace.of(addresses[kind], os.environ)
    (tmp_path / "here").mkdir()

    with place.folder() as folder:
        parts = [written(place, folder) for _ in range(3)]
        # Of a task that ran twice, one result counts.
        written(place, folder)
        files = place.fetch(folder, parts, tmp_path / "here")
        assert len(contents(place)) == 4

    assert [pq.read_table(file).column("ID").to_pylist() for file in files] == [list(range(ROWS))] * 3
    assert sorted(tmp_path.glob("here/*")) == sorted(files)
    assert contents(place) == []


def test_what_travels_with_a_task_holds_no_credential(s3):
    place = s3_place(s3)
    with place.folder():
        travelling = pickle.dumps(place)

    assert os.environ["AWS_SECRET_ACCESS_KEY"].encode() not in travelling
    assert os.environ["AWS_ACCESS_KEY_ID"].encode() not in travelling


def test_a_part_that_is_cut_while_it_is_fetched_is_continued(tmp_path):
    place = StagingPlace.of("cutting://staged", {})

    with place.folder() as folder:
        part = written(place, folder)
        CuttingFile.cuts = 4
        (file,) = place.fetch(folder, [part], tmp_path)

    assert CuttingFile.cuts == 0, "all of them struck"
    assert pq.read_table(file).num_rows == ROWS


def test_a_part_that_is_not_the_one_that_was_written_is_refused(s3, tmp_path):
    place = s3_place(s3)

    with place.folder() as folder:
        part = written(place, folder)
        with pytest.raises(SourceError, match=r"holds 1,000 rows instead of 999\."):
            place.fetch(folder, [StagedPart(part.name, ROWS - 1, part.size)], tmp_path)

    assert contents(place) == []
    assert list(tmp_path.glob("part*")) == []


def test_parts_are_removed_also_after_a_failure_and_what_a_crash_left_after_its_lifetime(s3):
    place = s3_place(s3)
    long_ago = f"tir-{datetime.now(UTC) - timedelta(days=2):%Y%m%dT%H%M%S}Z-0123456789ab"
    recently = f"tir-{datetime.now(UTC) - timedelta(hours=2):%Y%m%dT%H%M%S}Z-0123456789ab"
    for name in (long_ago, recently, "somebody-elses"):
        written(place, name)

    with pytest.raises(SourceError, match="gives column OTHER 0 times"), place.folder() as folder:
        write_part(StagingTask((Column("OTHER", Kind.TEXT),), SliceBy(), folder, place), [Batch()])

    assert {Path(path).parent.name for path in contents(place)} == {recently, "somebody-elses"}
    with StagingPlace.of(place.address, os.environ, lifetime=3600).folder():
        pass
    assert {Path(path).parent.name for path in contents(place)} == {"somebody-elses"}
    s3.delete_object(Bucket="landing", Key=contents(place)[0].partition("/")[2])


# A run whose staging is cut off by the kernel: no line of it cleans up.
KILLED = """
import os, signal, sys
from tir_dagster.spark.places import StagingPlace
from tir_dagster_tests.spark.test_places import written
place = StagingPlace.of(sys.argv[1], os.environ)
with place.folder() as folder:
    written(place, folder)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["s3", "folder"])
def test_rows_of_a_killed_run_stay_for_their_lifetime_and_go_when_anybody_cleans_after_it(kind, s3, tmp_path):
    address = {"s3": "s3://landing/killed", "folder": str(tmp_path / "shared")}[kind]
    killed = subprocess.run([sys.executable, "-c", KILLED, address], check=False, timeout=300)
    place = StagingPlace.of(address, os.environ)

    assert killed.returncode == -signal.SIGKILL
    place.remove_leftovers()
    assert len(contents(place)) == 1, "a run at work would lose its rows"
    replace(place, lifetime=0).remove_leftovers()
    assert contents(place) == []


def refused(place: StagingPlace) -> str:
    """Return why this machine cannot use the place."""
    with pytest.raises(SourceError) as caught, place.folder():
        pytest.fail("it was used")
    return str(caught.value)


def test_a_place_that_does_not_exist_or_forbids_is_said_before_anything_is_written(s3, monkeypatch, tmp_path):
    nowhere = refused(StagingPlace.of("s3://nowhere/x", os.environ))
    (tmp_path / "file").touch()
    no_folder = refused(StagingPlace.of(f"{tmp_path}/file", {}))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SOMEBODYELSE")
    forbidden = refused(s3_place(s3))
    with pytest.raises(SourceError) as caught:
        written(s3_place(s3), "folder")

    assert "This machine cannot use the staging place s3://nowhere/x: the bucket does not exist." in nowhere
    assert f"cannot use the staging place {tmp_path}/file: " in no_folder
    assert (
        "cannot use the staging place s3://landing/staged: access is denied. Give this identity the right" in forbidden
    )
    assert "cannot write to the staging place s3://landing/staged: access is denied." in str(caught.value)
    assert "SOMEBODYELSE" not in forbidden + str(caught.value)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("https://example.com/x", "is no staging place"),
        ("relative/folder", "is no staging place"),
        ("s3://", "is no staging place"),
        ("s3://key:hunter2@bucket", "carries a user or a password"),
    ],
)
def test_what_cannot_be_a_place_is_refused_unshown(address, problem):
    with pytest.raises(SourceError, match=problem) as caught:
        StagingPlace.of(address, {})

    assert "hunter2" not in str(caught.value)


def test_the_lifecycle_rule_of_the_documentation_is_one_and_is_about_our_folders(s3):
    text = (Path(__file__).parents[2] / "docs" / "spark.md").read_text(encoding="utf-8")
    rule = json.loads(text.partition("--lifecycle-configuration '")[2].partition("'")[0])
    s3.create_bucket(Bucket="mybucket")

    s3.put_bucket_lifecycle_configuration(Bucket="mybucket", LifecycleConfiguration=rule)

    place = StagingPlace.of("s3://mybucket/staging", os.environ)
    with place.folder() as folder:
        written(place, folder)
        prefix = f"mybucket/{rule['Rules'][0]['Filter']['Prefix']}"
        assert [path for path in contents(place) if not path.startswith(prefix)] == []


def test_a_kind_of_place_that_nothing_here_opens_is_an_error_that_says_so():
    assert "unheard://x cannot be opened: " in refused(StagingPlace.of("unheard://x", {}))


def test_a_task_on_another_machine_without_a_staging_place_says_what_to_set(tmp_path):
    with pytest.raises(SourceError, match=r"Spark's worker on .* cannot write to .*set TIR_STAGING"):
        write_part(StagingTask(COLUMNS, SliceBy(), str(tmp_path / "not here")), [Batch()])
