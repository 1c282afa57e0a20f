"""Where files land and when they count: S3 and its refusals, markers, whole folders, files sent again."""

from __future__ import annotations

import boto3
import pytest

from tir_dagster.errors import LoadError
from tir_dagster.spec import parse_declared

COLUMNS = "ID NUMBER(38,0), NAME VARCHAR"


@pytest.fixture
def s3(sandbox, monkeypatch):
    for name, value in sandbox.env.items():
        monkeypatch.setenv(name, value)
    return boto3.Session().client("s3")


def in_bucket(place, path: str):
    text = f"loads:\n  - {{name: {place.name}, table: {place.table}, mode: append, files: {{path: '{path}', format: csv}}}}\n"
    return parse_declared(text, "test.yaml").loads[0]


def test_objects_are_loaded_once_and_again_when_another_content_comes_under_their_name(landing, s3):
    place = landing(COLUMNS)
    spec = in_bucket(place, f"s3://landing/{place.name}")
    for content in (b"ID,NAME\n1,x\n", b"ID,NAME\n2,y\n"):
        # Of the same size, within the same second: only the ETag tells them apart.
        s3.put_object(Bucket="landing", Key=f"{place.name}/sub folder/a.csv", Body=content)
        assert place.load(spec).inserted == 1
        assert not place.load(spec).load_id
    assert place.rows() == [(1, "x"), (2, "y")]


def test_a_bucket_that_does_not_exist_or_forbids_is_said(landing, s3, monkeypatch):
    place = landing(COLUMNS)
    with pytest.raises(LoadError, match=r"s3://nowhere/x: the bucket does not exist\. Correct `files.path`"):
        place.load(in_bucket(place, "s3://nowhere/x"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SOMEBODYELSE")
    with pytest.raises(LoadError, match=r"s3://landing/x: reading it is forbidden\. Check the AWS credentials"):
        place.load(in_bucket(place, "s3://landing/x"))


def test_a_file_counts_when_its_marker_is_there(landing):
    place = landing(COLUMNS)
    spec = place.spec(mode="append", files=", complete: marker")
    place.write("a.csv", "ID,NAME\n1,x\n")
    place.write("b.csv", "ID,NAME\n2,y\n")
    place.write("b.csv.done", "")
    assert place.load(spec).of("LOADED") == [f"file://{place.folder}/b.csv"]


def test_a_folder_is_the_whole_table_and_an_older_one_that_comes_late_is_passed_over(landing):
    place = landing(COLUMNS)
    spec = place.spec(mode="truncate", snapshot="folder", files=", complete: marker, marker: _SUCCESS")
    place.write("2025-01-02/a.csv", "ID,NAME\n1,x\n")
    place.write("2025-01-02/b.csv", "ID,NAME\n2,y\n")
    assert not place.load(spec).load_id, "without its marker it is not whole"
    place.write("2025-01-02/_SUCCESS", "")
    place.load(spec)
    assert place.rows() == [(1, "x"), (2, "y")]
    place.write("2025-01-01/a.csv", "ID,NAME\n9,late\n")
    place.write("2025-01-01/_SUCCESS", "")
    late = place.load(spec)
    assert (len(late.of("SUPERSEDED")), late.changed, len(place.rows())) == (1, None, 2)
    # One part is sent again: the content is still both parts.
    place.write("2025-01-02/b.csv", "ID,NAME\n3,z\n")
    assert not place.load(spec).load_id, "the marker is of what was there before"
    place.write("2025-01-02/_SUCCESS", "")
    place.loader(spec).run([f"file://{place.folder}/2025-01-02/b.csv"])
    assert place.rows() == [(1, "x"), (3, "z")]


def test_a_file_that_was_only_touched_is_noted_and_changes_nothing(landing):
    place = landing(COLUMNS)
    spec = place.spec(mode="append")
    place.write("a.csv", "ID,NAME\n1,x\n")
    place.load(spec)
    place.write("a.csv", "ID,NAME\n1,x\n")
    assert place.load(spec).of("REPEATED") == [f"file://{place.folder}/a.csv"]
    assert (place.rows(), place.load(spec).load_id) == ([(1, "x")], "")
    assert [entry[1] for entry in place.ledger()] == ["LOADED", "REPEATED"]
