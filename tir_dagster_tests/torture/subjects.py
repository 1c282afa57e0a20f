"""What is tortured: extracts by each delivery, and a load; and what must hold after one clean run."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.crash_points import LOAD_POINTS
from tir_dagster.hyper.casts import PURGE_KEY
from tir_dagster.hyper.engine import close_shared_engine, connect
from tir_dagster.hyper.package.package import extract_hyper, packed, read_package
from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster.refresh.state.history import HistoryStore
from tir_dagster.refresh.state.versions import VersionStore
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.reading import parse_declared
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.conftest import download
from tir_dagster_tests.orchestration.served import DATABASE, Served
from tir_dagster_tests.packages import plain, rows_of
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.torture.victim import MARK_VARIABLE, Outcome, Task, read_confirmation, run

_FORKING = get_context("forkserver")
_FORKING.set_forkserver_preload(["tir_dagster_tests.torture.victim"])
VICTIM_SECONDS = 300.0
# Of the crash points, those that each delivery comes to when a row changes.
_FIRST = ("looked", "planned", "compared", "staged", "applied", "checked", "verified")
_LAST = ("published", "confirmed", "remembered", "settled", "pruned")
POINTS: Mapping[str, Sequence[str]] = {
    "republish": (*_FIRST, "intended", "packed", "uploaded", "landed", *_LAST),
    "patch": (*_FIRST, "intended", "uploaded", "sent", *_LAST),
    "server": (*_FIRST, "purged", "intended", "uploaded", "landed", "asked", "refreshed", "reloaded", *_LAST),
    "rollback": ("looked", "held", "restored", "intended", "packed", "uploaded", "landed", *_LAST),
    "load": tuple(LOAD_POINTS),
    # Of the real commands a few: each starts Python, Dagster and perhaps Spark.
    "command": (
        "staged",
        "verified",
        "landed",
        "published",
        "confirmed",
        "settled",
        "restored",
        "changed",
        "committed",
    ),
}
# In the state folder of an extract after a refresh, as docs/survival.md names it.
_STAYS = re.compile(
    r"change_sets(/looked\.json)?|versions|versions/v\d{8}(/.+)?|versions/\.spare\.v\d{8}(/.+)?|history|history/v\d{8}(/.+)?"
    r"|\.copy\.lock|compared\.json|hints\.json|hold\.json|work"
)


class Victim:
    """A process that does a task; it may be stopped at a point, killed, or told to go on."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._channel, theirs = _FORKING.Pipe()
        self.process = _FORKING.Process(target=run, args=(task, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.told: tuple[Any, ...] | None = None

    def wait_for_point(self) -> bool:
        """Wait until it stops at its point; False if it ended without coming there."""
        if self._hear() == "at":
            return True
        self._join()
        return False

    def go_on(self) -> None:
        self._channel.send("go on")

    def kill(self) -> bool:
        """Kill it with -9; return whether it was still at work."""
        alive = self.task.point != "" or (self.is_at_work() and self.process.is_alive())
        self.process.kill()
        self._join()
        return alive

    def is_at_work(self, *, seconds: float = 0.0) -> bool:
        """Wait so long, or until it has ended by itself; return whether it is still at work."""
        return not self._channel.poll(seconds)

    def end(self) -> list[Outcome] | str:
        """Wait for its end; return its outcomes, or the error that it ended with."""
        kind = self._hear()
        self._join()
        if kind == "done":
            outcomes: list[Outcome] = self.told[1]  # type: ignore[index]
            return outcomes
        return str(self.told[1]) if self.told else f"it ended with {self.process.exitcode}"

    @property
    def trace(self) -> str:
        return str(self.told[-1]) if self.told and self.told[0].startswith("failed") else ""

    def _hear(self) -> str:
        if not self._channel.poll(VICTIM_SECONDS):
            self.process.kill()
            raise AssertionError(f"{self.task.kind} neither ended nor came to {self.task.point or 'its end'}")
        try:
            self.told = self._channel.recv()
        except EOFError:
            self.told = None
        return self.told[0] if self.told else ""

    def _join(self) -> None:
        self.process.join(VICTIM_SECONDS)
        self._channel.close()


class Subject(Protocol):
    """Something to torture."""

    name: str
    points: Sequence[str]

    def change(self, chance: random.Random) -> None:
        """Give the next run something to do."""

    def victim(self, chance: random.Random, **task: Any) -> Victim:
        """Start a run that may be killed."""

    def heal(self) -> str:
        """Run once, cleanly; return what that run did. Raise AssertionError if not all is well afterwards."""

    def marked(self) -> list[int]:
        """Return the processes that victims started, and that are not victims themselves."""


class Extract:
    """An extract on a small table, by one delivery; people have tagged its datasource."""

    def __init__(self, sandbox: Sandbox, folder: Path, delivery: str, *, name: str = "", table: str = "") -> None:
        self.name, self.points = name or delivery, POINTS[name or delivery]
        self.home = folder / self.name
        self.home.mkdir(parents=True)
        self._mark = f"{os.getpid()}-{self.name}"
        self.sandbox = sandbox
        self.served = Served(
            sandbox,
            None,  # type: ignore[arg-type] - so few rows need no Spark
            folder / f"{self.name}-seen",
            settings={"delivery": delivery, "keep": {"versions": 3}},
            built=delivery != "patch",
            name=table or f"t_{self.name}",
        )
        self.tags: set[str] = set()
        self._next_key = 1000
        self.expect_full = True
        self.change(random.Random(0))
        self.heal()
        self.tag("dear")

    @property
    def folder(self) -> Path:
        return self.home / "extracts" / self.served.name

    # What happens

    def change(self, chance: random.Random) -> None:
        """Change a few rows: one is new, one is updated, and sometimes one is gone or moves to another slice.

        The rows of the smallest increment value stay: without them a server would have to load everything.
        """
        served, keys = self.served, [row[0] for row in self.served.sql("SELECT K FROM {t} WHERE K > 1 ORDER BY K")]
        self._next_key += 1
        served.act(("insert", self._next_key, served.value(chance.randrange(1, 12)), "'new'"))
        served.act(("update", chance.choice(keys), f"'changed {self._next_key}'"))
        if len(keys) > 30 or chance.random() < 0.3:
            served.act(("delete", chance.choice(keys)))
        if chance.random() < 0.3:
            served.act(("move", chance.choice(keys), served.value(chance.randrange(1, 12))))

    def connect(self) -> None:
        """Open the connection to the warehouse again, which was restarted."""
        self.served.connection = self.sandbox.snowflake(database=DATABASE, schema="PUBLIC")

    def task(self, **more: Any) -> Task:
        return Task("refresh", self.served.spec(), self.served.env, self.home, self._mark, **more)

    def victim(self, chance: random.Random, **task: Any) -> Victim:
        del chance
        (self.home / "tmp").mkdir(exist_ok=True)
        self._outdate_guard()
        return Victim(self.task(**task))

    def _outdate_guard(self) -> None:
        """Let half a minute pass for a guard of the lease whose holder was killed."""
        for guard in self.folder.glob("*.guard"):
            long_ago = time.time() - 60
            os.utime(guard, (long_ago, long_ago))

    def tag(self, label: str) -> None:
        """A person tags the datasource."""
        with self.sandbox.tableau() as server:
            server.datasources.add_tags(self._datasource(server), label)
        self.tags.add(label)

    def publish_foreign(self) -> None:
        """Somebody publishes what the server holds without some of its rows."""
        folder = self.served.folder / "foreign"
        package = download(self.sandbox, self.served.name, folder)
        hyper = extract_hyper(read_package(package), folder / f"{self.served.name}.hyper")
        with connect(hyper) as connection:
            connection.execute_command('DELETE FROM "Extract"."Extract" WHERE "K" % 3 = 0')
        close_shared_engine()
        target = hyper
        if self.served.built:
            target = packed(read_package(package), "foreign.tdsx", hyper=hyper, refresh=None).write(
                folder / "foreign.tdsx"
            )
        env = self.served.env
        credentials = TSC.ConnectionCredentials(env["SNOWFLAKE_USER"], env["SNOWFLAKE_PASSWORD"], embed=True)
        with self.sandbox.tableau() as server:
            datasource = self._datasource(server)
            item = TSC.DatasourceItem(datasource.project_id, datasource.name)
            more = {"connection_credentials": credentials} if self.served.built else {}
            server.datasources.publish(item, str(target), "Overwrite", **more)
        # A publish takes the tags with it, and these people put none back.
        self.tags.clear()

    def _datasource(self, server: Any) -> Any:
        (found,) = [item for item in TSC.Pager(server.datasources) if item.name == self.served.name]
        return found

    # What must hold

    def heal(self) -> str:
        victim = self.victim(random.Random(0), times=2)
        outcomes = victim.end()
        assert isinstance(outcomes, list), f"the clean run failed: {outcomes}\n{victim.trace}"
        first, second = outcomes
        assert second.decision == "none", f"a second run found something to do: {second}"
        assert first.decision != "full" or self.expect_full, f"a full refresh, because {first.reason}"
        self.expect_full = False
        self.check(published=first.published)
        return f"full ({first.reason})" if first.decision == "full" else first.decision

    def check(self, *, published: bool) -> None:
        """Raise AssertionError unless people see the source's rows and their tags, and nothing is left behind."""
        assert self.published_rows() == self.served.source_rows(), "the extract does not equal the source"
        with self.sandbox.tableau() as server:
            tags = set(self._datasource(server).tags)
        assert tags >= self.tags, f"tags are gone: {self.tags - tags}"
        self.check_state(published=published)
        wait_for(lambda: not self.marked(), "hyperd to end")

    def published_rows(self) -> Counter:
        package = download(self.sandbox, self.served.name, self.served.folder / "seen")
        rows = rows_of(package, self.served.folder / "seen", without=PURGE_KEY)
        return Counter(tuple(map(plain, row)) for row in rows)

    def check_state(self, *, published: bool) -> None:
        """Raise AssertionError if there is more in the state folder than docs/survival.md names."""
        check_names(self.folder, published=published)
        assert not ChangeSetStore(self.folder / "change_sets").pending()
        versions = VersionStore(self.folder / "versions").versions()
        # A server's refresh makes two, and a crash may come before the pruning, which the next refresh does.
        assert len(versions) <= 3 + 2, f"too many versions: {[version.id for version in versions]}"
        confirmed = read_confirmation(self.home)
        assert confirmed is not None
        kept = [entry.version for entry in HistoryStore(self.folder / "history").entries()]
        assert confirmed.version in kept, f"{confirmed.version} is not in the history {kept[:3]}"
        temporary = [path.name for path in (self.home / "tmp").iterdir()]
        assert temporary == [], f"left behind among the temporary files: {temporary}"

    def marked(self) -> list[int]:
        return processes_of(self._mark)


def check_names(folder: Path, *, published: bool) -> None:
    """Raise AssertionError if there are other names in an extract's state folder than docs/survival.md has."""
    found = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*"))]
    left = [name for name in found if not _STAYS.fullmatch(name)]
    if not published:
        # Settings noted for a publish that never came stay until one comes.
        left = [name for name in left if name != "kept.json"]
    assert left == [], f"left behind in the state folder: {left}"


class RolledBack(Extract):
    """An extract whose rollbacks are killed."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        super().__init__(sandbox, folder, "republish", name="rollback")
        self.change(random.Random(1))
        self.heal()

    def change(self, chance: random.Random) -> None:
        """Make another version to go back from."""
        super().change(chance)

    def victim(self, chance: random.Random, **task: Any) -> Victim:
        if "times" in task:
            # The clean run is a refresh, which needs the hold to be released.
            (self.folder / "hold.json").unlink(missing_ok=True)
            return super().victim(chance, **task)
        confirmed = read_confirmation(self.home)
        assert confirmed is not None
        (self.folder / "hold.json").unlink(missing_ok=True)
        versions = VersionStore(self.folder / "versions").versions()
        to = next(
            version.id for version in reversed(versions) if version.manifest["fingerprint"] != confirmed.fingerprint
        )
        return super().victim(chance, kind="rollback", to=to, hold=True, **task)

    def task(self, *, kind: str = "refresh", **more: Any) -> Task:
        return Task(kind, self.served.spec(), self.served.env, self.home, self._mark, **more)


class Load:
    """Files into a table."""

    name = "load"
    points = POINTS["load"]

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self.home = folder / "load"
        (self.home / "files").mkdir(parents=True)
        (self.home / "tmp").mkdir()
        self.sandbox = sandbox
        self._mark = f"{os.getpid()}-load"
        self._access = SnowflakeAccess.from_environment(sandbox.env)
        for statement in (
            "CREATE DATABASE IF NOT EXISTS TORTURED",
            "CREATE TABLE TORTURED.PUBLIC.LOADED (ID NUMBER(38,0), NAME VARCHAR)",
        ):
            self._access.query(statement)
        text = (
            "loads:\n  - name: tortured\n    table: TORTURED.PUBLIC.LOADED\n    mode: append\n"
            f"    files: {{path: 'file://{self.home / 'files'}', format: csv, settle: 0 seconds}}\n"
        )
        self._spec = parse_declared(text, "torture").loads[0]
        self._rows = 0

    def change(self, chance: random.Random) -> None:
        """Land two files."""
        for _ in range(2):
            count = chance.randrange(1, 4)
            ids = range(self._rows, self._rows + count)
            self._rows += count
            text = "".join(f"{number},name {number}\n" for number in ids)
            (self.home / "files" / f"f{self._rows:06d}.csv").write_text(f"ID,NAME\n{text}", encoding="utf-8")

    def victim(self, chance: random.Random, **task: Any) -> Victim:
        del chance
        return Victim(Task("load", self._spec, self.sandbox.env, self.home, self._mark, **task))

    def heal(self) -> str:
        victim = self.victim(random.Random(0), times=2)
        outcomes = victim.end()
        assert isinstance(outcomes, list), f"the clean run failed: {outcomes}\n{victim.trace}"
        first, second = outcomes
        assert second.decision == "none", f"a second run found something to do: {second}"
        loaded = sorted(row[0] for row in self._access.query("SELECT ID FROM TORTURED.PUBLIC.LOADED"))
        assert loaded == list(range(self._rows)), "the table does not have each row of the files once"
        paths = [row[0] for row in self._access.query("SELECT PATH FROM TORTURED.PUBLIC.TIR_LOADED_FILES")]
        assert len(paths) == len(set(paths)) == len(list((self.home / "files").iterdir())), "a file is not listed once"
        # What was just being staged, and what Snowflake's client made for its PUT.
        left = [path.name for path in (self.home / "tmp").iterdir() if not path.name.startswith(("tir-stage-", "tmp"))]
        assert left == [], f"left behind among the temporary files: {left}"
        return first.decision

    def marked(self) -> list[int]:
        return processes_of(self._mark)


def processes_of(mark: str) -> list[int]:
    """Return the processes with this mark in their environment that are no Python: hyperd, and Spark's JVM."""
    found = []
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # A fork shows the environment of the server that it was forked from, so victims have no mark.
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def named(pids: Sequence[int], name: str) -> list[int]:
    """Return the processes whose program has this name."""
    found = []
    for pid in pids:
        try:
            if name in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode().rpartition("/")[2]:
                found.append(pid)
        except OSError:
            continue
    return found


def kill(pids: Sequence[int], how: signal.Signals = signal.SIGKILL) -> int:
    """Send the signal; return how many got it."""
    count = 0
    for pid in pids:
        try:
            os.kill(pid, how)
        except ProcessLookupError:
            continue
        count += 1
    return count
