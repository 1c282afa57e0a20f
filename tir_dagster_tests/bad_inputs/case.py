"""One bad input: how to provoke it, what is read then, and how to see that nothing was changed."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from click.testing import CliRunner

from tir_dagster.alerts.retries import ChannelError
from tir_dagster.cli.main import tir
from tir_dagster.errors import TirError
from tir_dagster.sandbox.home import SandboxError
from tir_dagster_tests.orchestration.conftest import Place
from tir_dagster_tests.orchestration.shell import Built, published
from tir_dagster_tests.sandbox.tableau.helpers import Admin

Edits = tuple[tuple[str, str], ...]


@dataclass
class Scene:
    """Where it is played: a loaded extract on the sandbox, a folder of its own, and a shell."""

    place: Place
    folder: Path
    built: Built
    admin: Admin = field(init=False)

    def __post_init__(self) -> None:
        self.admin = Admin(self.place.sandbox.tableau_url)

    def file(self, name: str, content: str | bytes = "") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def tir(self, *arguments: str, edit: Edits = (), spec: str | None = None, **env: str | None) -> str:
        """The error of a command, without the word `Error:`; the command failed without a traceback."""
        text = self.place.spec_text if spec is None else spec
        for old, new in edit:
            assert old in text, f"nothing to change: {old}"
            text = text.replace(old, new)
        specs = self.file("tir.yaml", text)
        result = CliRunner().invoke(tir, list(arguments), env={"TIR_SPECS": str(specs), **env})
        assert result.exit_code in (1, 2), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        assert "Traceback" not in result.output
        return result.stderr.partition("Error: ")[2]


# What may be unchanged: how it is looked at, before and after.


def _digests(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "tir.yaml")
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _calls(scene: Scene) -> Any:
    env = scene.place.sandbox.env
    warehouse = f"http://{env['SNOWFLAKE_HOST']}:{env['SNOWFLAKE_PORT']}/sandbox/queries"
    queries = requests.get(warehouse, timeout=30).json()["queries"]
    return len(scene.admin.calls()), len(queries), queries[-1:] and queries[-1]["sql"]


def _versions(scene: Scene) -> Any:
    home = Path(os.environ["TIR_HOME"]) / "extracts" / "orders"
    return {name: _digests(home / name) for name in ("versions", "change_sets", "history")}


KEPT: dict[str, Callable[[Scene], Any]] = {
    "no server was asked": _calls,
    "the datasource": lambda scene: published(scene.place),
    "versions and change sets": _versions,
    "the table": lambda scene: scene.place.sql("SELECT COUNT(*), SUM(ID) FROM REFUSED"),
    "the file": lambda scene: _digests(scene.folder),
    "people's messages": lambda scene: requests.get(
        f"{scene.place.sandbox.people_url}/sandbox/messages", timeout=30
    ).json(),
}


@dataclass(frozen=True)
class Case:
    """A bad input; `provoke` raises one of our errors, or returns what a command said."""

    area: str
    done: str
    provoke: Callable[[Scene], Any]
    unchanged: tuple[str, ...] = ("no server was asked",)
    # Prepares what is not part of the mistake, before anything is looked at.
    prepare: Callable[[Scene], Any] = lambda _: None

    def play(self, scene: Scene) -> str:
        """Return the row of the table."""
        self.prepare(scene)
        before = {name: KEPT[name](scene) for name in self.unchanged}
        try:
            message = self.provoke(scene)
        except (TirError, SandboxError, ChannelError) as error:
            message = str(error)
        assert isinstance(message, str), f"{self.done}: nothing was said"
        assert message, f"{self.done}: nothing was said"
        after = {name: KEPT[name](scene) for name in self.unchanged}
        assert after == before, f"{self.done}: something changed"
        return f"| {cell(self.done)} | {cell(plain(message, scene))} | {', '.join(self.unchanged)} |"


def plain(message: str, scene: Scene) -> str:
    """The message without what differs from machine to machine."""
    places = {str(scene.folder): "FOLDER", f" on {socket.gethostname()} ": " on HOST "}
    for text, name in places.items():
        message = message.replace(text, name)
    for pattern, name in (
        (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
        (r"process \d+", "process PID"),
        (r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)? UTC", "TIME"),
        (r"has [\d,]+ MB", "has N MB"),
        (r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "ID"),
        (r"to 20\d\d-\d\d, by", "to MONTH, by"),
        (r"are 20\d\d-\d\d to", "are MONTH to"),
        (r"token 'test-\d+'", "token 'NAME'"),
        (r"after \d+ attempt", "after N attempt"),
    ):
        message = re.sub(pattern, name, message)
    return message.strip()


def cell(text: str) -> str:
    """The text in a cell of a table; code between backticks stays as it is."""
    parts = text.replace("|", "\\|").replace("\t", "\\t").replace("\0", "NUL").split("`")
    for at in range(0, len(parts), 2):
        for old, new in (("&", "&amp;"), ("<", "&lt;"), ("*", "\\*")):
            parts[at] = parts[at].replace(old, new)
    text = "`".join(parts)
    return "<br>".join(line.strip() for line in text.splitlines() if line.strip())
