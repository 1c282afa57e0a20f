"""One hyperd for everything, that comes back when it dies and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tir_dagster.errors import ExtractError, MachineError
from tir_dagster.hyper.engine import HyperEngine, connect, hyper_engine, parquet, quoted
from tir_dagster.hyper.hyperfile import describe
from tir_dagster_tests.hyper.helpers import run


def kill_hyperd(engine: HyperEngine) -> None:
    """As the kernel's out-of-memory killer would; only the processes this engine started, found by their sockets."""
    for process in engine._processes.values():
        socket_folder = process.endpoint.connection_descriptor.split("/domain/")[0].removeprefix("tab.domain://")
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                is_own = socket_folder in (entry / "cmdline").read_text(errors="replace")
            except OSError:
                continue
            if is_own:
                os.kill(int(entry.name), signal.SIGKILL)


def test_importing_the_room_starts_and_loads_no_hyper():
    code = (
        "import sys, tir_dagster.hyper.purge, tir_dagster.hyper.package.package, tir_dagster.hyper.fingerprints;"
        "sys.exit('tableauhyperapi' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_script_that_used_hyper_ends_cleanly_and_leaves_no_log(tmp_path: Path):
    code = (
        "from pathlib import Path; from tir_dagster.hyper.engine import connect\n"
        "with connect(Path('x.hyper'), create=True) as c: c.execute_command('CREATE TABLE t (a INT)')\n"
    )
    completed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["x.hyper"]


def test_the_log_goes_where_it_is_wanted(tmp_path: Path):
    with hyper_engine(tmp_path / "logs"):
        run(tmp_path / "x.hyper", "CREATE TABLE t (a INT)", create=True)
    assert list((tmp_path / "logs").glob("hyperd*.log"))


def test_hyper_is_started_again_when_it_ended(tmp_path: Path):
    with hyper_engine() as engine:
        run(tmp_path / "x.hyper", "CREATE TABLE t (a INT)", "INSERT INTO t VALUES (1)", create=True)
        kill_hyperd(engine)
        with connect(tmp_path / "x.hyper") as connection:
            assert connection.execute_scalar_query("SELECT a FROM t") == 1


def test_work_during_which_hyper_ended_is_refused(tmp_path: Path):
    """Closing a connection does not raise when hyperd is dead, so a lost commit would pass unseen."""
    path = tmp_path / "x.hyper"
    with hyper_engine() as engine:
        run(path, "CREATE TABLE t (a INT)", create=True)
        with engine.unbroken(path):
            run(path, "INSERT INTO t VALUES (1)")
            describe(path)

        def crashing() -> None:
            with engine.unbroken(path):
                run(path, "INSERT INTO t VALUES (2)")
                kill_hyperd(engine)
                describe(path)

        with pytest.raises(ExtractError, match="Hyper ended while it worked"):
            crashing()


def test_a_file_is_not_blamed_when_hyper_ends_in_the_middle_of_a_query(tmp_path: Path):
    path = tmp_path / "x.hyper"
    with hyper_engine() as engine:
        run(path, "CREATE TABLE t (a INT)", create=True)

        def killed() -> None:
            with connect(path) as connection:
                kill_hyperd(engine)
                connection.execute_scalar_query("SELECT COUNT(*) FROM t")

        with pytest.raises(MachineError, match="Hyper ended while it worked"):
            killed()
        run(path, "INSERT INTO t VALUES (1)")


def test_names_and_paths_are_quoted(tmp_path: Path):
    assert quoted("Extract", 'we"ird') == '"Extract"."we""ird"'
    assert "o''clock.parquet'" in parquet([tmp_path / "o'clock.parquet"])
