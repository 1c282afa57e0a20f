"""What a load decides without the warehouse: which files, in which order, how much at once, and what a file's rows are."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from tir_dagster.errors import SpecError
from tir_dagster.loading.commit import DisturbedError, check_undisturbed
from tir_dagster.loading.landing import LandedFile, Listing
from tir_dagster.loading.ledger import Changed, listable
from tir_dagster.loading.selection import Known, choose, in_turn
from tir_dagster.loading.tables import Bookkeeping, stage_type, target_of
from tir_dagster_tests.loading.conftest import PATH, parquet, spec_of, staged

MERGE = spec_of("merge", ", key: ID")
FOLDER = spec_of("truncate", ", snapshot: folder", files=", complete: marker")


def landed(name: str, stamp: str = "1") -> LandedFile:
    return LandedFile(f"{PATH}/{name}", 1, datetime.now(UTC), stamp)


def names(files) -> list[str]:
    return [file.path.removeprefix(f"{PATH}/") for file in files]


def test_where_the_order_matters_no_file_overtakes_a_new_one_that_is_not_complete():
    found = Listing([landed("a"), landed("b"), landed("c")], frozenset({f"{PATH}/b"}))
    assert names(in_turn(MERGE, found, {})) == ["a"]
    assert names(in_turn(spec_of("append"), found, {})) == ["a", "c"]
    loaded = {f"{PATH}/b": Known(1, "1", "md5 b")}
    assert names(in_turn(MERGE, found, loaded)) == ["a", "c"], "its marker may be gone when it is loaded"


def test_the_parts_of_a_folder_keep_their_order_when_one_comes_again():
    files = [landed("d/a"), landed("d/b", "new"), landed("d/c")]
    known = {file.path: Known(1, "1", "md5 old") for file in files}
    plan = choose(FOLDER, files, known, digest=lambda _: "md5 new", newest=f"{PATH}/d")
    assert [(*names([one.file]), one.status, one.times) for one in plan] == [
        ("d/a", "LOADED", 1),
        ("d/b", "LOADED", 1),
        ("d/c", "LOADED", 1),
    ]


def test_only_a_path_that_is_known_is_read_for_its_digest():
    asked: list[LandedFile] = []
    files = [landed("a", "2"), landed("b")]
    known = {f"{PATH}/a": Known(3, "1", "md5 same")}
    plan = choose(MERGE, files, known, digest=lambda file: asked.append(file) or "md5 same", newest=None)
    assert names(asked) == ["a"]
    assert [(one.status, one.times) for one in plan] == [("REPEATED", 3), ("LOADED", 0)]


# Sizes


def test_keys_are_listed_as_long_as_their_text_fits_into_a_statement():
    few = Changed("ADD_ROWS", ("ID",), tuple((number,) for number in range(10_000)))
    assert listable(few) is few
    assert listable(Changed("ADD_ROWS", ("ID",), (*(few.keys or ()), (-1,)))).keys is None
    assert listable(Changed("ADD_ROWS", ("ID",), tuple(("k" * 500 + str(at),) for at in range(1_000)))).keys is None


# What others do meanwhile


def test_a_table_that_others_changed_between_two_statements_is_noticed():
    check_undisturbed(MERGE, (1, 2, 3), (1, 2, 3))
    check_undisturbed(MERGE, (1, 2, 3), (1, 4, 3))  # two rows of one key
    with pytest.raises(DisturbedError, match=r"somebody else changed A\.B\.C during the commit\. Nothing was loaded"):
        check_undisturbed(MERGE, (1, 2, 3), (0, 2, 3))
    with pytest.raises(DisturbedError):
        check_undisturbed(MERGE, (0, 0, 3), (0, 0, 4), exactly=True)


# What is known of a table


def test_deleted_keys_belong_to_the_table_and_its_key_whatever_the_load_is_called():
    columns = ["ID", "TS"]
    graves = Bookkeeping.of(MERGE).graves(columns)
    assert Bookkeeping.of(spec_of("merge", ", key: ID", name="renamed")).graves(columns) == graves
    assert Bookkeeping.of(MERGE).graves(["NO", "TS"]) != graves
    assert (graves.schema, graves.name[:14]) == ("B", "TIR_DELETED_C_")


def test_versions_are_staged_as_exactly_as_the_table_keeps_them_and_binary_columns_are_refused():
    described = [("ID", "NUMBER(38,0)"), ("TS", "TIMESTAMP_NTZ(3)"), ("AT", "TIMESTAMP_TZ(0)")]
    target = target_of(MERGE, described)
    assert [stage_type(column) for column in target.columns] == ["NUMBER(38,0)", "TIMESTAMP_NTZ(3)", "TIMESTAMP_TZ(0)"]
    with pytest.raises(
        SpecError, match=r"a: A\.B\.C: Column PHOTO is BINARY\(8388608\), which no load supports\. Name the other"
    ):
        target_of(MERGE, [*described, ("PHOTO", "BINARY(8388608)")])


# A file's rows


CSV = b"ID,NAME\n1,x\n"


def zstd(content: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as packed:
        packed.write(content)
    return out.getvalue().to_pybytes()


PACKED = {
    "a.csv": CSV,
    "5%25 off [1].csv": CSV,
    "a.csv.gz": gzip.compress(CSV),
    "a.csv.bz2": bz2.compress(CSV),
    "a.csv.xz": lzma.compress(CSV),
    "a.csv.zst": zstd(CSV),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_file_is_known_by_its_bytes_whatever_it_is_called_or_packed_with(tmp_path, name):
    ((told,), tables) = staged(tmp_path, name, PACKED[name])
    assert told.problem == ""
    assert [(row["C0"], row["C1"]) for row in tables["rows"]] == [(1, "x")]
    assert told.digest == f"md5 {hashlib.md5(PACKED[name]).hexdigest()}"


def test_texts_that_a_writer_called_binary_are_texts_and_other_bytes_are_rejected(tmp_path):
    content = parquet({"ID": [1, 2], "NAME": pa.array(["é".encode(), b"\xff"], pa.binary())})
    ((told,), tables) = staged(tmp_path, "a.parquet", content, form="parquet")
    assert [(row["C0"], row["C1"]) for row in tables["rows"]] == [(1, "é")]
    assert (told.rejected, [row["REASON"] for row in tables["rejected"]]) == (
        1,
        ["NAME: \"b'\\\\xff'\" is no text in UTF-8"],
    )
    assert told.digest == f"md5 {hashlib.md5(content).hexdigest()}"


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_moments_finer_than_microseconds_are_rejected_not_cut(tmp_path, form):
    moments = ["2025-01-01T00:00:00.123456000", "2025-01-01T00:00:00.123456001", "9999-12-31T00:00:00"]
    content = "TS\n" + "\n".join(moments) + "\n"
    if form == "parquet":
        moments = moments[:2]
        content = parquet({"TS": pa.array(moments).cast(pa.timestamp("ns"))})
    content = content.encode() if isinstance(content, str) else content
    ((told,), tables) = staged(tmp_path, f"a.{form}", content, form=form, columns="TS TIMESTAMP_NTZ(9)")
    assert told.rejected == 1
    assert tables["rejected"][0]["REASON"].endswith("has more than 6 digits of a second")
    assert tables["rows"][0]["C0"] == datetime(2025, 1, 1, 0, 0, 0, 123456)  # noqa: DTZ001
