"""`tir load --dry-run`: what the load would say of every new file and row, without touching anything."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tir_dagster.cli.main import tir
from tir_dagster.errors import LoadError
from tir_dagster_tests.loading.conftest import parquet

COLUMNS = "ID NUMBER(6,0), NAME VARCHAR"


@pytest.fixture
def dry_run(sandbox, monkeypatch, tmp_path):
    """Runs the command on a load; exit code, standard output, standard error."""
    for name, value in sandbox.env.items():
        monkeypatch.setenv(name, value)

    def run(place, *options: str, **fields):
        specs = tmp_path / "tir.yaml"
        specs.write_text(place.text(**fields), encoding="utf-8")
        done = CliRunner().invoke(tir, ["--specs", str(specs), "load", place.name, "--dry-run", *options])
        return done.exit_code, done.stdout, done.stderr

    return run


def test_a_dry_run_lists_every_bad_row_and_says_what_the_load_would_say(landing, dry_run):
    place = landing(COLUMNS)
    place.write("a.csv", "ID,NAME\n1,a\n" + "x,b\n" * 7)
    place.write("b.csv", "ID,NAME\n2,c\n")
    code, out, said = dry_run(place, "--json", mode="append", reject_share=0.5)
    told = json.loads(out)
    path = f"file://{place.folder}/a.csv"
    assert [(file["status"], file["rows_read"], file["rows_rejected"]) for file in told["files"]] == [
        ("LOADED", 8, 7),
        ("LOADED", 1, 0),
    ]
    reason = "ID: 'x' is no whole number"
    assert told["rejects"] == [{"path": path, "line": line, "reason": reason} for line in range(3, 10)]
    assert (told["rows_read"], told["rows_rejected"], code) == (9, 7, 1)
    with pytest.raises(LoadError, match="7 of 9 rows cannot be loaded") as error:
        place.load(place.spec(mode="append", reject_share=0.5))
    assert told["problem"] == str(error.value)
    assert f"tir load {place.name} --dry-run" in told["problem"]
    assert told["problem"] in said
    code, out, _ = dry_run(place, mode="append", reject_share=0.9)
    assert code == 0
    assert "8 rows, 7 rejected" in out
    assert f"{path}:9: {reason}" in out
    assert (place.rows(), place.ledger()) == ([], [])


@pytest.mark.parametrize(
    ("name", "content", "fields"),
    [
        ("a.csv", b"ID,NAM\n1,a\n", {}),
        ("a.csv", b"", {"mode": "truncate"}),
        ("a.csv", "ID,NAME\n1,a\n".encode("utf-16"), {}),
        ("a.parquet", b"PAR1 and no more", {"format": "parquet"}),
        ("a.parquet", parquet({"ID": ["1"], "NAME": ["a"], "MORE": [1]}), {"format": "parquet"}),
    ],
    ids=["column", "empty", "encoding", "footer", "further"],
)
def test_a_dry_run_stops_where_the_load_would(landing, dry_run, name, content, fields):
    place = landing(COLUMNS)
    place.write(name, content)
    fields = {"mode": "append", **fields}
    with pytest.raises(LoadError) as error:
        place.load(place.spec(**fields))
    code, out, said = dry_run(place, **fields)
    assert (code, name in out) == (1, True)
    assert str(error.value) in said


def test_a_dry_run_finds_keys_that_the_load_would_reject_as_duplicates(landing, dry_run):
    place = landing(COLUMNS)
    place.write("a.csv", "ID,NAME\n1,a\n2,b\n1,c\n")
    place.write("b.csv", "ID,NAME\n2,d\n")
    fields = {"mode": "merge", "key": "ID", "duplicates": "reject", "reject_share": 0.9}
    _, out, _ = dry_run(place, "--json", **fields)
    rejects = [(one["path"].rpartition("/")[2], one["line"], one["reason"]) for one in json.loads(out)["rejects"]]
    place.load(place.spec(**fields))
    assert (
        rejects == place.rejects() == [("a.csv", line, "key ID = 1 is more than once in the file") for line in (2, 4)]
    )


def test_a_dry_run_without_new_files_says_so(landing, dry_run):
    code, out, _ = dry_run(landing(COLUMNS), mode="append")
    assert (code, "no new files" in out) == (0, True)
