"""`tir revisions`: what the server and this machine keep of an extract, and how to get it."""

from __future__ import annotations

import json
import os
import uuid
import zipfile
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from click.testing import CliRunner
from tableauhyperapi import Connection, CreateMode, HyperProcess, Telemetry

from tir_dagster.changes.plan import SourceState
from tir_dagster.cli.main import tir
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.orchestration.metadata import CONFIRMATION
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.state.versions import VersionStore
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import find_datasource, find_project, server_version
from tir_dagster_tests.conftest import Sandbox

FAILED, WRONG_USAGE = 1, 2
SPEC = "extracts: [{name: orders, source: A.B.C, row_key: ID, datasource: {project: PROJECT, name: NAME}}]"


@pytest.fixture(scope="module")
def extracts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three bare extracts of one row each."""
    folder = tmp_path_factory.mktemp("extracts")
    files = [folder / f"{number}.hyper" for number in (1, 2, 3)]
    with HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process:
        for number, file in enumerate(files):
            with Connection(process.endpoint, file, CreateMode.CREATE) as connection:
                connection.execute_command(f'CREATE TABLE "public"."t" AS (SELECT {number} AS "n")')
    return files


@pytest.fixture(scope="module")
def project(sandbox: Sandbox, extracts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A datasource of three revisions, two versions here, of which the second is confirmed as revision 2."""
    folder, name = tmp_path_factory.mktemp("revisions"), f"project-{uuid.uuid4().hex}"
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in {
            **sandbox.env,
            "TIR_HOME": str(folder),
            "DAGSTER_HOME": str(folder / "dagster"),
        }.items():
            patch.setenv(variable, value)
        patch.setenv("TIR_SPECS", str(folder / "extracts.yaml"))
        publish(sandbox, name, extracts[:2])
        store = VersionStore(folder / "extracts" / "orders" / "versions")
        for rows, file in zip((10, 20), extracts, strict=False):
            workspace = store.begin()
            workspace.extract.write_bytes(file.read_bytes())
            store.commit(workspace, {"rows": rows, "source_version": "t"})
        confirm(name)
        publish(sandbox, name, extracts[2:])
        yield name


def publish(sandbox: Sandbox, project: str, files: list[Path]) -> None:
    with sandbox.tableau() as server:
        found = list(server.projects.filter(name=project)) or [server.projects.create(TSC.ProjectItem(project))]
        for file in files:
            server.datasources.publish(TSC.DatasourceItem(found[0].id, "orders"), str(file), "Overwrite")


def confirm(project: str) -> None:
    with TableauClient(TableauAccess.from_environment(os.environ)) as client:
        found = find_datasource(client, project=find_project(client, project), name="orders")
    known = SourceState(*("" for _ in SourceState.__dataclass_fields__))
    shown = str(server_version(found))
    confirmation = Confirmation("orders", "v00000002", "t", known, None, found.id, shown, "", 20, ())
    event = dg.AssetMaterialization(["orders", "published_datasource"], metadata={CONFIRMATION: confirmation.to_json()})
    with dagster_instance() as instance:
        instance.report_runless_asset_event(event)


@pytest.fixture
def say(project: str, tmp_path: Path) -> Any:
    """Runs the command: its exit code, what it printed, and the last line of its errors."""
    specs = tmp_path / "extracts.yaml"

    def run(*arguments: str, name: str = "orders") -> tuple[int, str, str]:
        specs.write_text(SPEC.replace("PROJECT", project).replace("NAME", name), encoding="utf-8")
        result = CliRunner().invoke(tir, ["--specs", str(specs), "revisions", "orders", *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        return result.exit_code, result.stdout, (result.stderr.strip().splitlines() or [""])[-1]

    return run


def test_both_are_listed_with_the_newest_first_and_the_confirmed_one_named(say):
    code, printed, _ = say("--json")
    listed = json.loads(printed)
    assert code == 0
    told = [(one["number"], one["rows"], one["current"], one["confirmed"]) for one in listed["revisions"]]
    assert told == [(3, None, True, False), (2, 20, False, True), (1, None, False, False)]
    assert all(one["bytes"] and one["published_at"] for one in listed["revisions"])
    kept = [(one["id"], one["rows"], one["confirmed"]) for one in listed["versions"]]
    assert kept == [("v00000002", 20, True), ("v00000001", 10, False)]
    assert all(one["bytes"] and one["made_at"] for one in listed["versions"])


def test_people_read_the_same_in_lines(say):
    _, printed, _ = say()
    lines = printed.splitlines()
    assert [line.split()[0] for line in lines] == ["orders:", "3", "2", "1", "kept", "v00000002", "v00000001"]
    assert lines[2].endswith("20 rows  confirmed")
    assert lines[1].endswith("-  current")


@pytest.mark.parametrize(("wanted", "at"), [("1", 0), ("3", 2), ("v00000001", 0)])
def test_one_of_them_is_fetched_byte_for_byte(say, extracts, tmp_path, wanted, at):
    code, printed, _ = say("--fetch", wanted, "--to", str(tmp_path / "new" / "got.hyper"))
    assert code == 0
    assert f" is in {tmp_path}/new/got.hyper (" in printed
    assert content(tmp_path / "new" / "got.hyper") == extracts[at].read_bytes()


def content(file: Path) -> bytes:
    """The Hyper file, out of the package that a server makes around it."""
    if not zipfile.is_zipfile(file):
        return file.read_bytes()
    with zipfile.ZipFile(file) as package:
        return package.read(next(name for name in package.namelist() if name.endswith(".hyper")))


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--fetch", "9", "--to", "got"), FAILED, "has no revision 9. Choose one of these: 3, 2, 1."),
        (("--fetch", "v00000009", "--to", "got"), FAILED, "Choose one of these: v00000001, v00000002."),
        (("--fetch", "1"), WRONG_USAGE, "--fetch N and --to FILE must be used together."),
        (("--to", "got"), WRONG_USAGE, "--fetch N and --to FILE must be used together."),
        (("--fetch", "newest", "--to", "got"), WRONG_USAGE, "'newest' is neither a revision such as 3 nor a version"),
    ],
)
def test_what_is_not_there_is_told_and_nothing_is_written(say, tmp_path, monkeypatch, arguments, code, told):
    monkeypatch.chdir(tmp_path)
    got, printed, error = say(*arguments)
    assert (got, printed) == (code, "")
    assert told in error
    assert not (tmp_path / "got").exists()


def test_a_file_that_exists_is_replaced_only_when_forced(say, extracts, tmp_path):
    target = tmp_path / "got.hyper"
    target.write_bytes(b"old")
    code, _, error = say("--fetch", "2", "--to", str(target))
    assert (code, target.read_bytes()) == (WRONG_USAGE, b"old")
    assert error == f"Error: {target} exists. Name another file, or add --force to replace it."
    assert say("--fetch", "2", "--to", str(target), "--force", "--json")[0] == 0
    assert content(target) == extracts[1].read_bytes()


def test_without_a_datasource_the_kept_versions_are_still_listed_and_nothing_can_be_fetched_from_the_server(
    say, tmp_path
):
    code, printed, _ = say(name="ordres")
    assert (code, "it does not exist yet" in printed, "v00000001" in printed) == (0, True, True)
    code, _, error = say("--fetch", "1", "--to", str(tmp_path / "got"), name="ordres")
    assert code == FAILED
    assert "There is no datasource 'ordres' in project" in error
    assert "Similar names: 'orders'" in error
