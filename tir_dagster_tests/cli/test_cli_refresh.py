"""`tir plan` and `tir refresh` before they reach a server: what is wrong with the command or the file is told at once."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import click
import dagster as dg
import pytest
import sqlalchemy
from click.testing import CliRunner, Result
from dagster._core.storage.tags import TagType, get_tag_type

from tir_dagster.cli.jobs import command_tags
from tir_dagster.cli.main import ProjectGroup, tir
from tir_dagster.errors import MachineError, TirError
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.orchestration.names import TOLD_BY_COMMAND
from tir_dagster_tests.spec.sample import GOOD

WRONG_USAGE = 2


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good spec file, for a test to spoil."""
    file = tmp_path / "extracts.yaml"
    file.write_text(GOOD, encoding="utf-8")
    monkeypatch.setenv("TIR_SPECS", str(file))
    monkeypatch.setenv("TIR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    return file


def refused(*arguments: str) -> str:
    """The error of a command that is wrong as it stands."""
    result = CliRunner().invoke(tir, list(arguments))
    assert (result.exit_code, result.stdout) == (WRONG_USAGE, ""), result.output
    assert isinstance(result.exception, SystemExit)
    return result.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("command", ["plan", "refresh"])
@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        (("row_key:", "rowkey:"), ":4: extracts[0].rowkey: unknown field; did you mean `row_key`?"),
        (("row_key: ORDER_ID", "row_key: {a: b}"), ":4: extracts[0].row_key: give a name or a list of names."),
        (("row_key: ORDER_ID", "row_key: [ORDER_ID"), ": not YAML: "),
    ],
)
def test_a_broken_spec_is_one_line_with_file_and_line(specs, command, spoilt, told):
    specs.write_text(GOOD.replace(*spoilt), encoding="utf-8")
    error = refused(command, "orders", "--json")
    assert error.startswith(f"Error: {specs}")
    assert told in error


def test_a_missing_spec_file_is_named(specs):
    error = refused("--specs", f"{specs}.old", "refresh", "orders")
    assert error == f"Error: {specs}.old: No such file or directory. Name the spec file with --specs or TIR_SPECS."


@pytest.mark.parametrize(
    "span", ["", "..", "2025-03..", "..2025-03", "2025-03...2025-05", "2025-03,2025-04", "2025 03"]
)
def test_a_malformed_range_of_slices_is_told_with_its_form(specs, span):
    error = refused("refresh", "orders", "--slices", span)
    assert f"{span!r} is not a range. Write FROM..TO, such as 2025-03..2025-05, or one slice." in error


@pytest.mark.parametrize(
    ("span", "told"),
    [
        ("2025-05..2025-03", "orders: the range 2025-05..2025-03 is reversed. Write the earlier slice first"),
        ("2024-11..2025-03", "orders has no slice '2024-11': its slices are 2024-12 to "),
        ("2999-01", "orders has no slice '2999-01'"),
        ("March", "orders has no slice 'March'"),
    ],
)
def test_a_range_that_the_extract_does_not_have_is_told_with_its_slices(specs, span, told):
    assert told in refused("refresh", "orders", "--slices", span)


def test_slices_of_an_extract_without_slices_are_refused(specs):
    specs.write_text("\n".join(line for line in GOOD.splitlines() if "slices:" not in line), encoding="utf-8")
    assert "orders has no slices. Leave --slices out" in refused("refresh", "orders", "--slices", "2025-03")


def test_slices_and_full_exclude_each_other(specs):
    assert "--slices and --full exclude each other" in refused("refresh", "orders", "--slices", "2025-03", "--full")


def test_a_start_of_the_slices_in_the_future_is_refused_before_anything_counts_them(specs):
    specs.write_text(GOOD.replace("2024-12", "2999-12"), encoding="utf-8")
    assert "2999-12 lies in the future" in refused("refresh", "orders", "--slices", "2999-12")


def fails_with(error: OSError) -> Result:
    @click.group(cls=ProjectGroup)
    def group() -> None: ...

    @group.command()
    def write() -> None:
        raise error

    return CliRunner().invoke(group, ["write"])


def test_a_disk_that_fills_up_half_way_is_told_with_the_folder_and_its_room(specs):
    result = fails_with(OSError(errno.ENOSPC, "No space left on device", str(specs)))
    assert result.exit_code == 1
    assert f"Error: {specs}: No space left on device. {specs.parent} has " in result.stderr
    assert "MB free: make room there, or set TIR_HOME" in result.stderr


def test_of_two_files_the_one_that_has_no_room_is_told(specs):
    result = fails_with(OSError(errno.ENOSPC, "No space left on device", "/from/there", None, str(specs)))
    assert result.stderr.startswith(f"Error: {specs}: No space left on device. ")


def fill_up() -> NoReturn:
    """What SQLite really says, through what Dagster really uses, where there is no room for one more page."""
    with sqlalchemy.create_engine("sqlite://").connect() as connection:
        connection.exec_driver_sql("CREATE TABLE t (x)")
        connection.exec_driver_sql("PRAGMA max_page_count = 2")
        connection.exec_driver_sql("INSERT INTO t VALUES (zeroblob(100000))")
    pytest.fail("there was room")


def break_off() -> NoReturn:
    """What SQLite says where there is no room for the memory that its processes share."""
    said = sqlite3.OperationalError("disk I/O error")
    raise sqlalchemy.exc.OperationalError("PRAGMA", None, said) from said


def no_file() -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device", os.environ["DAGSTER_HOME"])


@pytest.mark.parametrize("fail", [fill_up, break_off, no_file])
@pytest.mark.parametrize("when", ["opened", "written"])
def test_a_disk_without_room_for_dagsters_history_is_called_full(specs, monkeypatch, fail, when):
    if fail is break_off:
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4096))
    if when == "opened":
        monkeypatch.setattr(dg.DagsterInstance, "get", fail)
    with pytest.raises(MachineError) as failure, dagster_instance():
        fail()
    assert f"The disk is full: Dagster's history in {specs.parent / 'dagster'} cannot be written" in str(failure.value)
    assert "MB free. Make room there, or set DAGSTER_HOME to a folder on a larger disk" in str(failure.value)


def test_another_failure_of_dagsters_history_is_not_blamed_on_the_disk(specs, monkeypatch):
    monkeypatch.setattr(dg.DagsterInstance, "get", break_off)
    with (
        pytest.raises(TirError, match=r"cannot be opened \(OperationalError\). Check dagster.yaml"),
        dagster_instance(),
    ):
        pass


def test_another_failure_of_the_disk_is_told_with_the_file(specs):
    result = fails_with(PermissionError(errno.EACCES, "Permission denied", str(specs)))
    assert result.stderr == f"Error: {specs}: Permission denied. Check TIR_HOME and the disk.\n"


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("SELECT FROM WHERE", "this cannot be read as Snowflake's SQL"),
        ("DELETE FROM MYDB.MYSCHEMA.MYTABLE", "it is not a SELECT"),
        ("SELECT * FROM MYTABLE", "DATABASE.SCHEMA.TABLE"),
    ],
)
def test_a_query_that_cannot_be_read_is_told_with_file_and_line(specs, query, told):
    specs.write_text(GOOD.replace("source: MYDB.MYSCHEMA.MYTABLE", f"query: {query}"), encoding="utf-8")
    error = refused("plan", "orders")
    assert error.startswith(f"Error: {specs}:3: extracts[0].query: ")
    assert told in error


def test_a_table_and_a_query_exclude_each_other(specs):
    both = "source: MYDB.MYSCHEMA.MYTABLE\n    query: SELECT ID FROM MYDB.MYSCHEMA.OTHER"
    specs.write_text(GOOD.replace("source: MYDB.MYSCHEMA.MYTABLE", both), encoding="utf-8")
    assert "give a table as `source`, or a SELECT as `query`, not both" in refused("plan", "orders")


def test_detectors_that_contradict_each_other_are_refused(specs):
    specs.write_text(GOOD.replace("watermark: UPDATED_AT", "watermark: UPDATED_AT, detector: feed"), encoding="utf-8")
    assert "feed uses no watermark; leave one of the two out" in refused("plan", "orders")


def test_a_hint_file_that_is_not_there_is_named(specs):
    assert "nothing.json cannot be read" in refused("refresh", "orders", "--hint", "@nothing.json")


@pytest.mark.parametrize("arguments", [["orders"], ["--slices", "2025-03"], ["--hint", "{}"]])
def test_all_is_not_about_one_extract(specs, arguments):
    assert "leave the name, --slices and --hint out" in refused("refresh", "--all", *arguments)


def test_without_a_name_the_declared_extracts_are_named(specs):
    assert "Name the extract to refresh, or --all. The spec file declares orders." in refused("refresh")


def test_of_several_names_the_nearest_one_is_meant(specs):
    specs.write_text(
        GOOD + GOOD.partition("extracts:\n")[2].replace("orders", "sales").replace("Orders", "Sales"), encoding="utf-8"
    )
    assert "There is no extract 'oders'. Did you mean orders? The spec file declares orders, sales." in refused(
        "plan", "oders"
    )


def test_in_a_dg_project_the_folder_of_its_components_is_named(tmp_path, monkeypatch):
    (tmp_path / "src" / "sales" / "defs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIR_SPECS", raising=False)
    assert (
        "Name a spec file with --specs or TIR_SPECS. This is a dg project: export TIR_SPECS=src/sales/defs"
        in refused("refresh", "orders")
    )


def test_runs_of_a_command_are_launched_by_it_and_show_no_other_tag():
    with click.Context(click.Command("refresh"), info_name="refresh"):
        tags = command_tags("a-run")
    shown = {tag: text for tag, text in tags.items() if get_tag_type(tag) is not TagType.HIDDEN}
    assert shown == {"user": "tir refresh"}
    assert tags[TOLD_BY_COMMAND] == "a-run"


@pytest.mark.parametrize("command", ["status", "plan"])
def test_without_a_spec_file_the_answer_does_not_wait_for_dagster(tmp_path, command):
    (tmp_path / "extracts.yaml").write_text(GOOD, encoding="utf-8")
    code = f"import sys; from tir_dagster.cli.main import tir; tir(['{command}'], standalone_mode=False); print('dagster' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if name != "TIR_SPECS"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    answer, has_dagster = done.stdout.splitlines()
    assert answer.endswith(
        "name a spec file with --specs or TIR_SPECS. There is one here: export TIR_SPECS=extracts.yaml"
    )
    assert has_dagster == "False"
