"""Where state and history live: TIR_HOME, and Dagster's instance below it unless DAGSTER_HOME says otherwise."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import yaml

from tir_dagster.durable import replaced_file
from tir_dagster.errors import TirError
from tir_dagster.interrupts import spare_log_tails

HOME_VARIABLE = "TIR_HOME"
# What a new DAGSTER_HOME begins with, and an example for others.
DAGSTER_YAML = Path(__file__).with_name("dagster.yaml")


def tir_home(env: Mapping[str, str] | None = None) -> Path:
    return Path((os.environ if env is None else env).get(HOME_VARIABLE) or ".tir").expanduser().absolute()


def dagster_home() -> Path:
    """DAGSTER_HOME, by default below TIR_HOME; made if it is not there, and set for this process and its children."""
    home = Path(os.environ.get("DAGSTER_HOME") or tir_home() / "dagster").expanduser().absolute()
    os.environ["DAGSTER_HOME"] = str(home)
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "dagster.yaml").exists():
        with replaced_file(home / "dagster.yaml") as written:
            shutil.copyfile(DAGSTER_YAML, written)
    return home


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Dagster makes its tables when it first opens them: of two commands that do so at once, one would fail."""
    with (home / ".opening").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def dagster_instance() -> Iterator[dg.DagsterInstance]:
    """The instance that the command line, the UI and the daemon share."""
    # Here: Dagster loads it with its history, which definitions do without.
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415

    home = dagster_home()
    try:
        with _alone(home):
            opened = dg.DagsterInstance.get()
    except (dg.DagsterError, yaml.YAMLError, SQLAlchemyError) as error:
        # Without its text, which may quote the configuration and with it a database's password.
        raise TirError(
            f"Dagster's history in {home} cannot be opened ({type(error).__name__}). Check dagster.yaml there "
            "(`dagster instance info` says more), or set DAGSTER_HOME to another folder."
        ) from error
    with opened as instance:
        spare_log_tails(instance)
        yield instance
