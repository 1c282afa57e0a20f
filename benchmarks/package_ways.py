"""Two ways to take the newest rows out of a published extract, each run in a process of its own, whose memory is counted.

`ours` is what the delivery `server` does up to its publish. `plain` is what a script does with the same client and the
same Hyper: unzip everything, delete, deflate everything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib import import_module
from pathlib import Path

from benchmarks import script_2021
from benchmarks.memory import peak_memory, peak_of_children
from benchmarks.package_report import PACK, PUBLISH, PURGE, UNPACK, Way
from tir_dagster.errors import TirError
from tir_dagster.hyper.engine import close_shared_engine
from tir_dagster.hyper.increment import Increment, find_increment, purge_from, set_increment_value
from tir_dagster.hyper.package.package import read_package
from tir_dagster.refresh.datasource import fetch_shell
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import find_project, look_for_datasource, server_version
from tir_dagster.tableau.publishing import publish

KEY = "ORDER_DATE"
_LIMIT_SECONDS = 3600


@dataclass(frozen=True)
class Task:
    """What both ways are asked for: this datasource without its rows from a day on; a folder for the work."""

    project: str
    datasource: str
    since: str
    folder: str


@dataclass
class _Account:
    """What is written down while a way runs."""

    seconds: dict[str, float] = field(default_factory=dict)
    before: int | None = None
    hyper_peak: int | None = None

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[step] = time.perf_counter() - begun

    def begin(self) -> None:
        self.before = peak_memory(os.getpid())

    def as_way(self, *, rows: int, package_bytes: int) -> Way:
        peak = peak_memory(os.getpid())
        return Way(self.seconds, rows, package_bytes, peak, self.before, self.hyper_peak)


def run_way(name: str, task: Task, env: Mapping[str, str]) -> Way:
    """One way in a process of its own; what it found."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, name, json.dumps(asdict(task))],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        message = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise TirError(f"The way {name!r} ended with code {done.returncode} on {task.datasource}: {message}")
    return Way.from_json(json.loads(done.stdout))


def ours(task: Task, account: _Account) -> Way:
    """The steps of the delivery, by its own functions."""
    folder, since = Path(task.folder), date.fromisoformat(task.since)
    # A refresh has all of this in memory too: Dagster, Spark's client, the connectors.
    import_module("tir_dagster.cli.refresh")
    with TableauClient(TableauAccess.from_environment(os.environ)) as client:
        project = find_project(client, task.project)
        datasource = look_for_datasource(client, project=project, name=task.datasource)
        assert datasource is not None, "the bench has published it"
        account.begin()
        with account.timed(UNPACK):
            shell, hyper = fetch_shell(client, datasource, folder)
        with account.timed(PURGE):
            package = read_package(shell)
            increment = find_increment(package, hyper)
            assert isinstance(increment, Increment), "the bench has made it incremental"
            purged = purge_from(hyper, folder / "purged.hyper", column=increment.column, smallest=since)
        assert purged.largest is not None, "rows remain"
        with account.timed(PACK):
            target = set_increment_value(package, "package.tdsx", hyper=folder / "purged.hyper", value=purged.largest)
        with account.timed(PUBLISH):
            publish(
                client,
                target,
                project=project,
                name=task.datasource,
                overwrite=True,
                expected=server_version(datasource),
            )
    account.hyper_peak = peak_of_children()
    close_shared_engine()
    return account.as_way(rows=purged.after, package_bytes=target.size)


def plain(task: Task, account: _Account) -> Way:
    """The steps of a script: those of 2021 up to the publish."""
    folder, target = Path(task.folder), Path(task.folder) / "package.tdsx"
    with script_2021.signed_in(os.environ) as server:
        datasource = script_2021.named(server, task.datasource)
        account.begin()
        with account.timed(UNPACK):
            unzipped = script_2021.download_and_unzip(server, datasource, folder)
        with account.timed(PURGE):
            (hyper,) = unzipped.rglob("*.hyper")
            with script_2021.hyper(hyper) as connection:
                rows, largest = script_2021.delete_from(connection, KEY, task.since)
                account.hyper_peak = peak_of_children()
            script_2021.set_increment_value(unzipped, largest)
        with account.timed(PACK):
            script_2021.deflate_all(unzipped, target)
        with account.timed(PUBLISH):
            script_2021.publish(server, datasource.project_id, task.datasource, target)
    return account.as_way(rows=rows, package_bytes=target.stat().st_size)


WAYS: dict[str, Callable[[Task, _Account], Way]] = {"ours": ours, "plain": plain}


if __name__ == "__main__":
    way, asked = sys.argv[1:]
    print(json.dumps(asdict(WAYS[way](Task(**json.loads(asked)), _Account()))))
