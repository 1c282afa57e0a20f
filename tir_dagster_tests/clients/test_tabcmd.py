"""tabcmd signs in to the sandbox, publishes, refreshes, lists, fetches and deletes there."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster_tests.clients.conftest import client_environment, run_client
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.workbook import write_workbook

pytestmark = pytest.mark.client

REQUIREMENT = "tabcmd==2.0.21"
SOURCE = ("--datasource", "mydatasource", "--project", "myproject")


class Tabcmd:
    """tabcmd as a person with one home folder calls it: it keeps its session there."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self._sandbox = sandbox
        self._folder = folder
        self._program = client_environment("tabcmd", REQUIREMENT) / "tabcmd"

    def __call__(self, *arguments: str | Path, code: int = 0) -> str:
        env = {"HOME": str(self._folder)}
        return run_client(self._program, *arguments, "--no-prompt", env=env, folder=self._folder, code=code).stdout

    @property
    def place(self) -> tuple[str, ...]:
        return ("--server", self._sandbox.tableau_url, "--site", self._sandbox.identity.site)

    def log_in(self) -> None:
        name, secret = self._sandbox.new_token()
        self("login", *self.place, "--token-name", name, "--token-value", secret)


@pytest.fixture
def tabcmd(seeded: Sandbox, tmp_path: Path) -> Tabcmd:
    return Tabcmd(seeded, tmp_path)


def refreshes(sandbox: Sandbox) -> Counter[tuple[str, str]]:
    """How many jobs there are of each kind of refresh and status."""
    with sandbox.tableau() as server:
        return Counter((job.type, job.status) for job in TSC.Pager(server.jobs) if job.type.endswith("_extracts"))


def test_refreshextracts_refreshes_a_datasource_and_waits(tabcmd: Tabcmd, seeded: Sandbox) -> None:
    tabcmd.log_in()
    before = refreshes(seeded)
    assert "finish_code(0)" in tabcmd("refreshextracts", *SOURCE, "--synchronous")
    assert "finish_code(0)" in tabcmd("refreshextracts", *SOURCE, "--synchronous", "--incremental")
    assert refreshes(seeded) - before == Counter(
        {("refresh_extracts", "Success"): 1, ("increment_extracts", "Success"): 1}
    )
    tabcmd("logout")


def test_a_password_signs_in_for_one_command(tabcmd: Tabcmd, seeded: Sandbox) -> None:
    identity = seeded.identity
    person = (*tabcmd.place, "--username", identity.tableau_user)
    shown = tabcmd("list", "datasources", "--name", *person, "--password", identity.tableau_password)
    assert "mydatasource" in shown
    sites = tabcmd("listsites", *person, "--password", identity.tableau_password)
    assert f"NAME: {identity.site}" in sites
    assert "401001" in tabcmd("list", "datasources", *person, "--password", "wrong", code=1)


def test_a_datasource_is_fetched_published_overwritten_and_deleted(
    tabcmd: Tabcmd, seeded: Sandbox, tmp_path: Path
) -> None:
    tabcmd.log_in()
    package, name = tmp_path / "fetched.tdsx", f"copy-{uuid.uuid4().hex}"
    tabcmd("get", "/datasources/mydatasource.tdsx", "--filename", package)
    identity = seeded.identity
    account = ("--db-username", identity.snowflake_user, "--db-password", identity.snowflake_password)
    publish = ("publish", package, "--name", name, *account, "--save-db-password")
    # Without a project: to the default one.
    tabcmd(*publish)
    assert "403007" in tabcmd(*publish, code=1)
    tabcmd(*publish, "--overwrite")
    with seeded.tableau() as server:
        (copy,) = server.datasources.filter(name=name)
        server.datasources.populate_revisions(copy)
        assert (copy.project_name, len(copy.revisions)) == ("default", 2)
    # The overwrite brought the credentials along.
    assert "finish_code(0)" in tabcmd("refreshextracts", "--datasource", name, "--synchronous")
    tabcmd("delete", name, "--datasource")
    assert name not in tabcmd("list", "datasources", "--name")
    assert "404" in tabcmd("refreshextracts", "--datasource", name, code=1)


def test_projects_and_workbooks_come_and_go(tabcmd: Tabcmd, tmp_path: Path) -> None:
    tabcmd.log_in()
    top, book = f"top-{uuid.uuid4().hex}", write_workbook(tmp_path / "book.twb", "mydatasource")
    below = ("--project", "below", "--parent-project-path", top)
    tabcmd("createproject", "--name", top)
    tabcmd("createproject", "--name", "below", "--parent-project-path", top)
    tabcmd("publish", book, "--name", "book", *below)
    assert "VIEWS:By month, Own tables, Overview" in tabcmd("list", "workbooks", "--name", "--details")
    tabcmd("delete", "book", "--workbook", *below)
    tabcmd("deleteproject", top)
    shown = tabcmd("list", "projects", "--name")
    assert "below" not in shown
    assert top not in shown


def test_what_the_sandbox_does_not_serve_is_told(tabcmd: Tabcmd) -> None:
    tabcmd.log_in()
    for command in (("list", "flows"), ("createextracts", *SOURCE), ("deleteextracts", *SOURCE)):
        assert "404950" in tabcmd(*command, code=1)
