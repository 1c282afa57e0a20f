"""Where files land and when they count: S3 and its refusals, markers, whole folders, files sent again."""

from __future__ import annotations

from dataclasses import replace

import boto3
import pytest

from tir_dagster.errors import LoadError
from tir_dagster.loading.staging import right_here
from tir_dagster.spec.reading import parse_declared

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


def test_the_same_content_sent_again_in_another_way_changes_nothing(landing, s3):
    """The ETag of an upload in parts is another one, and no digest of the content."""
    place = landing(COLUMNS)
    spec = in_bucket(place, f"s3://landing/{place.name}")
    named = {"Bucket": "landing", "Key": f"{place.name}/a%2B b.csv"}
    content = b"ID,NAME\n1,x\n"
    first = s3.put_object(**named, Body=content)["ETag"]
    place.load(spec)
    upload = {**named, "UploadId": s3.create_multipart_upload(**named)["UploadId"]}
    part = {"PartNumber": 1, "ETag": s3.upload_part(**upload, PartNumber=1, Body=content)["ETag"]}
    assert s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": [part]})["ETag"] != first
    assert place.load(spec).of("REPEATED") == [f"s3://landing/{named['Key']}"]
    assert place.rows() == [(1, "x")]


def test_a_bucket_that_does_not_exist_or_forbids_is_said(landing, s3, monkeypatch):
    place = landing(COLUMNS)
    with pytest.raises(LoadError, match=r"s3://nowhere/x: the bucket does not exist\. Correct `files.path`"):
        place.load(in_bucket(place, "s3://nowhere/x"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SOMEBODYELSE")
    with pytest.raises(LoadError, match=r"s3://landing/x: access is denied\. Check the AWS credentials"):
        place.load(in_bucket(place, "s3://landing/x"))


def test_a_file_counts_when_its_marker_is_there_and_is_not_overtaken_where_the_order_matters(landing):
    place = landing(COLUMNS)
    place.write("a.csv", "ID,NAME\n1,late\n")
    place.write("b.csv", "ID,NAME\n1,x\n")
    place.write("b.csv.done", "")
    merging = place.spec(mode="merge", key="ID", files=", complete: marker")
    assert not place.load(merging).load_id
    assert "2 new files wait" in place.told[-1]
    assert place.load(place.spec(mode="append", files=", complete: marker")).of("LOADED") == [path_of(place, "b.csv")]


def path_of(place, name: str) -> str:
    return f"file://{place.folder}/{name}"


def test_a_file_that_changed_since_it_was_named_is_left_for_the_next_look(landing):
    place = landing(COLUMNS)
    spec = place.spec(mode="merge", key="ID")
    stamps = {path_of(place, name): "" for name in ("a.csv", "b.csv", "c.csv")}
    for name in stamps:
        place.write(name.rpartition("/")[2], "ID,NAME\n1,x\n")
    stamps = {file.path: file.stamp for file in place.loader(spec).listing().files}
    place.write("b.csv", "ID,NAME\n1,half")
    loaded = place.loader(spec).run(stamps)
    assert loaded.of("LOADED") == [path_of(place, "a.csv")], "nor does c.csv overtake it"


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
    place.loader(spec).run({f"file://{place.folder}/2025-01-02/b.csv": ""})
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


def test_a_file_comes_into_a_table_once_whichever_load_brings_it_and_into_another_table_again(landing):
    place, other = landing(COLUMNS), landing(COLUMNS)
    place.write("a.csv", "ID,NAME\n1,x\n")
    spec = place.spec(mode="append")
    renamed = replace(spec, name="renamed")
    with pytest.raises(LoadError, match=r"another load took 1 of 1 files at the same time\. Nothing was loaded twice"):
        place.load(spec, stager=lambda plan, units: [right_here(plan, units), place.load(renamed)][0])
    assert not place.load(spec).load_id
    assert place.load(replace(spec, table=other.table)).inserted == 1
    assert (place.rows(), other.rows()) == ([(1, "x")], [(1, "x")])


def test_a_row_that_one_load_deleted_is_not_brought_back_by_an_older_version_from_another(landing):
    place = landing("ID NUMBER(38,0), TS NUMBER(38,0)")
    spec = place.spec(mode="merge", key="ID", order_by="TS", delete_flag="OP")
    place.write("a.csv", "ID,TS,OP\n1,5,\n2,5,\n")
    place.load(spec)
    place.write("b.csv", "ID,TS,OP\n1,7,D\n")
    place.load(spec)
    place.write("c.csv", "ID,TS\n1,6\n2,6\n")
    place.load(replace(spec, name="other", delete_flag=None))
    assert place.rows() == [(2, 6)]


def test_of_two_whole_contents_at_once_the_older_one_does_not_come_last(landing):
    place = landing(COLUMNS)
    spec = place.spec(mode="truncate")
    place.write("day1.csv", "ID,NAME\n1,old\n")

    def overtaken(plan, units):
        place.write("day2.csv", "ID,NAME\n2,new\n")
        place.loader(replace(spec, name="other")).run({path_of(place, "day2.csv"): ""})
        return right_here(plan, units)

    with pytest.raises(LoadError, match=r"another load replaced the content of .* meanwhile. Nothing was loaded"):
        place.load(spec, stager=overtaken)
    assert place.load(spec).of("SUPERSEDED") == [path_of(place, "day1.csv")]
    assert place.rows() == [(2, "new")]


def test_a_key_in_two_parts_of_a_whole_folder_is_twice_in_the_content(landing):
    place = landing(COLUMNS)
    marked = ", complete: marker, marker: _SUCCESS"
    spec = place.spec(mode="truncate", key="ID", snapshot="folder", duplicates="reject", reject_share=0.9, files=marked)
    place.write("d/a.csv", "ID,NAME\n1,x\n2,x\n")
    place.write("d/b.csv", "ID,NAME\n2,y\n")
    place.write("d/_SUCCESS", "")
    place.load(spec)
    assert place.rows() == [(1, "x")]
    assert place.rejects() == [
        ("a.csv", 3, "key ID = 2 is more than once in the folder"),
        ("b.csv", 2, "key ID = 2 is more than once in the folder"),
    ]


def test_a_whole_content_replaces_a_table_that_holds_one_of_its_rows_twice(landing):
    place = landing(COLUMNS)
    place.own.query(f"INSERT INTO {place.table} VALUES (1, 'x'), (2, 'y'), (1, 'x')")
    place.write("a.csv", "ID,NAME\n1,x\n2,y\n")
    loaded = place.load(place.spec(mode="truncate", key="ID"))
    assert place.rows() == [(1, "x"), (2, "y")]
    assert (loaded.inserted, loaded.deleted) == (2, 3)
    assert (loaded.changed.kind, loaded.changed.keys) == ("UPDATE_ROWS", ((1,),))


def test_versions_that_a_table_holds_twice_are_closed_like_others(landing):
    place = landing("ID NUMBER(38,0), NAME VARCHAR, VALID_FROM DATE, VALID_TO DATE, IS_CURRENT BOOLEAN")
    place.own.query(
        f"INSERT INTO {place.table} VALUES (1, 'x', '2025-01-01', NULL, TRUE), (1, 'x', '2025-01-01', NULL, TRUE)"
    )
    place.write("a.csv", "ID,NAME,DAY\n1,y,2025-02-01\n")
    place.load(place.spec(mode="scd2", key="ID", order_by="DAY"))
    assert place.rows("NAME, IS_CURRENT") == [("x", False), ("x", False), ("y", True)]


def test_more_files_than_one_statement_lists_are_all_in_the_ledger(landing, monkeypatch):
    monkeypatch.setattr("tir_dagster.loading.commit.FILES_PER_STATEMENT", 2)
    place = landing(COLUMNS)
    for number in range(3):
        place.write(f"{number}.csv", f"ID,NAME\n{number},x\n")
    assert place.load(place.spec(mode="append")).inserted == 3
    assert [(name, rows) for name, _, rows, _ in place.ledger()] == [("0.csv", 1), ("1.csv", 1), ("2.csv", 1)]


def test_a_table_of_keys_alone_is_merged(landing):
    place = landing("ID NUMBER(38,0)")
    spec = place.spec(mode="merge", key="ID", delete_flag="OP")
    place.write("1.csv", "ID,OP\n1,\n2,\n")
    assert place.load(spec).inserted == 2
    place.write("2.csv", "ID,OP\n1,D\n2,\n3,\n")
    result = place.load(spec)
    assert (result.inserted, result.updated, result.deleted) == (1, 0, 1)
    assert place.rows() == [(2,), (3,)]


def test_a_load_is_the_same_in_an_account_with_defaults_of_its_own(landing, request):
    place = landing("ID NUMBER(38,0), NAME VARCHAR, VALID_FROM DATE, VALID_TO DATE, IS_CURRENT BOOLEAN")
    spec = place.spec(mode="scd2", key="ID", order_by="DAY")
    place.write("a.csv", "ID,NAME,DAY\n1,x,2025-01-31\n2,y,2025-01-31\n")
    place.load(spec)
    request.getfixturevalue("hostile_account")
    place.write("b.csv", "ID,NAME,DAY\n1,z,2025-02-01\n3,w,2025-02-01\n")
    loaded = place.load(spec)
    assert (loaded.inserted, loaded.changed.keys) == (2, ((1,), (3,)))
    assert place.rows("ID, NAME, VALID_FROM::VARCHAR, IS_CURRENT") == [
        (1, "x", "2025-01-31", False),
        (1, "z", "2025-02-01", True),
        (2, "y", "2025-01-31", True),
        (3, "w", "2025-02-01", True),
    ]
