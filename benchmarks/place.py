"""Where a run takes place: a folder and an environment of its own, left behind by nobody. No heavy import in here."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tir_dagster.files import need_space
from tir_dagster.orchestration.interrupts import stopping, watch_signals
from tir_dagster.sandbox import processes
from tir_dagster.sandbox.home import SandboxHome

Say = Callable[[str], None]
# Somebody's own servers, their secrets and the specs on them have no part in this.
_FOREIGN = ("SNOWFLAKE_", "TABLEAU_", "TIR_", "DAGSTER_HOME")


@contextmanager
def own_place(needed: int, *, keep: bool, progress: Say) -> Iterator[Path]:
    """A new folder that is TIR_HOME and DAGSTER_HOME inside the block, removed afterwards unless it is kept.

    It is refused where fewer than `needed` bytes are free.
    Enter it before the pipeline is imported: Dagster's definitions read the spec file that the environment names.
    """
    with _ended_politely(), _folder(keep=keep, progress=progress) as folder, _own_environment(folder):
        need_space(folder, needed)
        yield folder


@contextmanager
def _ended_politely() -> Iterator[None]:
    """A SIGTERM ends the run like Ctrl-C, also while Dagster runs: the servers in the background must not stay behind."""
    before = signal.getsignal(signal.SIGTERM)
    watch_signals()
    try:
        with stopping("The run", lambda: ""):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _folder(*, keep: bool, progress: Say) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tir-bench-"))
    try:
        yield folder
    finally:
        if keep:
            progress(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _own_environment(folder: Path) -> Iterator[None]:
    before = dict(os.environ)
    for name in [name for name in before if name.startswith(_FOREIGN)]:
        del os.environ[name]
    # The servers' temporary files too: not all of them are removed when a server ends.
    own = {"TIR_HOME": folder / "home", "DAGSTER_HOME": folder / "dagster", "TMPDIR": folder / "temporary"}
    own["TMPDIR"].mkdir()
    os.environ.update({name: str(path) for name, path in own.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def own_sandbox(progress: Say) -> Iterator[dict[str, str]]:
    """The servers of this place, and the variables that lead to them, which are also set; stopped at the end."""
    home = SandboxHome.from_environment()
    progress("starting a sandbox of its own")
    try:
        processes.start(home)
        env = processes.environment(home)
        os.environ.update(env)
        yield env
    finally:
        processes.stop(home)
