"""A user's shell on the place, and datasources as people would have built them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from click.testing import CliRunner

from tir_dagster.cli.main import tir
from tir_dagster.sandbox.sample.rows import COLUMNS
from tir_dagster.sandbox.tableau.packages import Column, SnowflakeConnection, build_tdsx
from tir_dagster_tests.orchestration.conftest import Place
from tir_dagster_tests.sandbox.tableau.helpers import rewritten

SECRETS = ("SNOWFLAKE_PASSWORD", "TABLEAU_TOKEN_SECRET")
WRONG = "wr0ng-but-still-a-s3cret"
FAILED = 1


@dataclass(frozen=True)
class CommandResult:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The last thing a user reads."""
        return self.stderr.strip().splitlines()[-1]


@dataclass
class Shell:
    """A user's shell on the place; every command is checked for secrets and tracebacks."""

    place: Place
    env: dict[str, str | None] = field(default_factory=dict)

    def tir(self, *arguments: str, edit: tuple[tuple[str, str], ...] = ()) -> CommandResult:
        runner = CliRunner()
        result = runner.invoke(tir, list(arguments), env={"TIR_SPECS": str(self.specs(edit)), **self.env})
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        return self.harmless(CommandResult(result.exit_code, result.stdout, result.stderr))

    def specs(self, edit: tuple[tuple[str, str], ...] = ()) -> Path:
        text = self.place.spec_text
        for old, new in edit:
            assert old in text, f"nothing to change: {old}"
            text = text.replace(old, new)
        file = self.place.folder / "bad.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    def harmless(self, result: CommandResult) -> CommandResult:
        output = result.stdout + result.stderr
        known = [os.environ[name] for name in SECRETS] + [str(value) for value in self.env.values() if value == WRONG]
        assert not [secret for secret in known if secret in output], "a secret was printed"
        assert "Traceback" not in output
        assert "dagster" not in output.lower().replace("tir_dagster", ""), "Dagster's own words"
        return result

    def refused(self, *arguments: str, edit: tuple[tuple[str, str], ...] = (), code: int = FAILED) -> str:
        """The one error of a command that fails before Spark starts and leaves every datasource as it was."""
        before = published(self.place)
        result = self.tir(*arguments or ("refresh", "orders"), edit=edit)
        assert (result.code, result.stdout) == (code, ""), result
        assert "starting Spark" not in result.stderr
        assert result.error.startswith("Error: ")
        assert published(self.place) == before
        return result.error


def published(place: Place) -> dict[str, Any]:
    """Everything on the server: when each datasource was last changed, and a digest of its content."""
    with place.sandbox.tableau() as server:
        digests = {}
        for item in TSC.Pager(server.datasources):
            content = server.datasources.get_request(f"{server.datasources.baseurl}/{item.id}/content").content
            digests[item.id] = (item.name, item.updated_at, hashlib.sha256(content).hexdigest())
        return digests


@dataclass(frozen=True)
class Built:
    """Datasources as people would have built them."""

    place: Place
    folder: Path
    ids: dict[str, str]

    @property
    def base(self) -> Path:
        return self.folder / "base.tdsx"

    def build(self, file: str, columns: list[Column], **relation: Any) -> Path:
        env = self.place.sandbox.env
        names = ("MYDB", "MYSCHEMA", "MYWH", "SYSADMIN", env["SNOWFLAKE_USER"])
        there = SnowflakeConnection(f"{env['SNOWFLAKE_ACCOUNT']}.snowflakecomputing.com", *names)
        return build_tdsx(self.folder / file, caption="x", columns=columns, snowflake=there, **relation)

    def edited(self, old: str, new: str) -> Path:
        def edit(text: str) -> str:
            assert old in text
            return text.replace(old, new)

        return rewritten(self.base, self.folder / "edited.tdsx", edit=edit)

    def project(self, parent: str, name: str) -> None:
        with self.place.sandbox.tableau() as server:
            self.ids[parent] = server.projects.create(TSC.ProjectItem(parent)).id
            self.ids[f"{parent}/{name}"] = server.projects.create(TSC.ProjectItem(name, parent_id=self.ids[parent])).id

    def publish(self, name: str, file: Path, project: str = "myproject", parent: str = "") -> None:
        with self.place.sandbox.tableau() as server:
            at = self.ids.get(f"{parent}/{project}") or server.projects.filter(name=project)[0].id
            server.datasources.publish(TSC.DatasourceItem(at, name=name), str(file), "Overwrite")


def sample_columns() -> list[Column]:
    return [Column(name, declared.removesuffix(" NOT NULL")) for name, declared, _ in COLUMNS]
