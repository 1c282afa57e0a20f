"""The real commands as subjects: `tir refresh`, `tir rollback` and `tir load`, with Dagster's log and Spark, killed like the others."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from tir_dagster.crash_points import CRASH_VARIABLE, LOAD_POINTS, ROLLBACK_POINTS
from tir_dagster.refresh.state.versions import VersionStore
from tir_dagster.sandbox import sample
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.conftest import SPEC, download
from tir_dagster_tests.packages import plain, rows_of
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.torture.subjects import POINTS, VICTIM_SECONDS, check_names, processes_of
from tir_dagster_tests.torture.victim import MARK_VARIABLE

_LOAD = """\
loads:
  - name: tortured_load
    table: MYDB.MYSCHEMA.LOADED
    mode: append
    files: {path: 'file://FOLDER', format: csv, settle: 0 seconds}
"""


class CommandVictim:
    """A command that kills itself at its point; see `subjects.Victim`."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path, point: str) -> None:
        self.point, self._log = point, log
        with log.open("wb") as lines:
            self.process = subprocess.Popen(command, env=env, stdout=lines, stderr=lines)
        self.told: tuple[Any, ...] | None = None

    def wait_for_point(self) -> bool:
        code = self.process.wait(VICTIM_SECONDS)
        self.told = (code, self.trace)
        return code == -9

    def is_at_work(self, *, seconds: float = 0.0) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        return False

    def kill(self) -> bool:
        alive = self.point != "" or self.process.poll() is None
        self.process.kill()
        self.process.wait()
        return alive

    @property
    def trace(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-2000:]


class Commands:
    """The sample, an extract of it and a load, by the command line."""

    name = "command"
    points = POINTS["command"]

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self.sandbox, self.home = sandbox, folder / "command"
        (self.home / "files").mkdir(parents=True)
        sample.seed_table(sandbox.env, rows=500, seed=1, until=sample.parse_month(None))
        sample.seed_datasource(sandbox.env, timeout=120)
        self._mark = f"{os.getpid()}-command"
        self.env = {
            **os.environ,
            **sandbox.env,
            "TIR_HOME": str(self.home / "state"),
            "DAGSTER_HOME": str(self.home / "dagster"),
            MARK_VARIABLE: self._mark,
        }
        ((first,),) = self.sql("SELECT TO_CHAR(MIN(ORDER_DATE), 'YYYY-MM') FROM MYTABLE")
        self.sql("CREATE OR REPLACE TABLE LOADED (ID NUMBER(38,0))")
        text = SPEC.replace("START", first).replace("quiet_period: 1 second", "quiet_period: 0 seconds")
        self.specs = self.home / "specs.yaml"
        self.specs.write_text(text + _LOAD.replace("FOLDER", str(self.home / "files")), encoding="utf-8")
        self._count = self._loaded = 0
        for _ in range(2):
            self.change(random.Random(0))
            self.run("refresh", "orders", "--json")

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with self.sandbox.snowflake(database="MYDB", schema="MYSCHEMA") as connection:
            return connection.cursor().execute(statement).fetchall()

    def change(self, chance: random.Random) -> None:
        """Update some orders."""
        self._count += 1
        self.sql(
            f"UPDATE MYTABLE SET NOTE = 'note {self._count}', UPDATED_AT = DATEADD('second', 1, (SELECT MAX(UPDATED_AT) FROM"
            f" MYTABLE)) WHERE ORDER_ID % 50 = {chance.randrange(50)}"
        )

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tir_dagster.cli.main", "--specs", str(self.specs), *arguments]

    def run(self, *arguments: str) -> Any:
        """The command to its end; what it printed as JSON."""
        done = subprocess.run(
            self._command(*arguments),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=VICTIM_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"tir {' '.join(arguments)} failed: {done.stdout}{done.stderr}"
        return json.loads(done.stdout)

    @property
    def folder(self) -> Path:
        return self.home / "state" / "extracts" / "orders"

    def victim(self, chance: random.Random, *, point: str = "") -> CommandVictim:
        del chance
        arguments = ["refresh", "orders"]
        if point in ROLLBACK_POINTS:
            *_, before, _ = VersionStore(self.folder / "versions").versions()
            arguments = ["rollback", "orders", "--to", before.id, "--hold", "--reason", "a test"]
        elif point in set(LOAD_POINTS) - {"staged"}:
            self._loaded += 1
            file = self.home / "files" / f"f{self._loaded:05d}.csv"
            file.write_text(f"ID\n{self._loaded}\n", encoding="utf-8")
            arguments = ["load", "tortured_load"]
        env = {**self.env, CRASH_VARIABLE: point} if point else self.env
        return CommandVictim(self._command(*arguments), env, self.home / "log", point)

    def heal(self) -> str:
        self.run("release", "orders", "--json")
        self.run("load", "tortured_load", "--json")
        first, second = (self.run("refresh", "orders", "--json") for _ in range(2))
        assert second["decision"] == "none", f"a second run found something to do: {second}"
        assert first["decision"] != "full", f"a full refresh, because {first['reason']}"
        loaded = sorted(row[0] for row in self.sql("SELECT ID FROM LOADED"))
        assert loaded == list(range(1, self._loaded + 1)), "the table does not have each row of the files once"
        package = download(self.sandbox, "mydatasource", self.home / "seen")
        names = ", ".join(sorted(row[0] for row in self.sql("DESCRIBE TABLE MYTABLE")))
        published = sorted(str([plain(value) for value in row]) for row in rows_of(package, self.home / "seen"))
        source = sorted(str([plain(value) for value in row]) for row in self.sql(f"SELECT {names} FROM MYTABLE"))
        assert published == source, "the extract does not equal the source"
        check_names(self.folder, published=first["published"])
        wait_for(lambda: not self.marked(), "hyperd and Spark to end")
        return str(first["decision"])

    def marked(self) -> list[int]:
        return processes_of(self._mark)
