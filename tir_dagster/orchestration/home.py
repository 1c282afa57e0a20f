"""The folders of state and history: TIR_HOME, and Dagster's instance in it unless DAGSTER_HOME names another folder."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tir_dagster.errors import MachineError, TirError
from tir_dagster.files import replaced_file
from tir_dagster.orchestration.interrupts import spare_log_tails
from tir_dagster.refresh.state.mirror import mount

if TYPE_CHECKING:
    import dagster as dg

HOME_VARIABLE, STATE_VARIABLE = "TIR_HOME", "TIR_STATE"
# Copied into a new DAGSTER_HOME; an example for other instances.
DAGSTER_YAML = Path(__file__).with_name("dagster.yaml")
_ROOM_OF_SQLITE = 2**20


def tir_home(env: Mapping[str, str] | None = None) -> Path:
    """Return the state folder; with TIR_STATE, its state is a copy of what that object store holds."""
    env = os.environ if env is None else env
    home = Path(env.get(HOME_VARIABLE) or ".tir").expanduser().absolute()
    if address := env.get(STATE_VARIABLE):
        mount(home, address)
    return home


def dagster_home() -> Path:
    """Return DAGSTER_HOME (default: inside TIR_HOME), create it if missing, and set it for this process and its children."""
    home = Path(os.environ.get("DAGSTER_HOME") or tir_home() / "dagster").expanduser().absolute()
    os.environ["DAGSTER_HOME"] = str(home)
    # A new one is the owner's alone: errors in the history may quote rows.
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (home / "dagster.yaml").exists():
        with replaced_file(home / "dagster.yaml") as file:
            shutil.copyfile(DAGSTER_YAML, file)
    return home


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Lock the opening of the history: Dagster creates its tables then, and two processes at once would fail."""
    with (home / ".opening").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def dagster_instance() -> Iterator[dg.DagsterInstance]:
    """Open the Dagster instance that the command line, the UI and the daemon share."""
    # Imported here: TIR_HOME alone needs no Dagster, and definitions do not need the history.
    import dagster as dg
    from sqlalchemy.exc import SQLAlchemyError

    with _full_disk_as_error():
        home = dagster_home()
        try:
            with _alone(home):
                opened = dg.DagsterInstance.get()
        except (dg.DagsterError, yaml.YAMLError, SQLAlchemyError) as error:
            if _is_of_full_disk(error):
                raise
            # Without the error's text, which may quote a database password from the configuration.
            raise TirError(
                f"Dagster's history in {home} cannot be opened ({type(error).__name__}). Check dagster.yaml there "
                "(run `dagster instance info` for details), or set DAGSTER_HOME to another folder."
            ) from None
        with opened as instance, reused_connections(instance):
            spare_log_tails(instance)
            yield instance


@contextmanager
def reused_connections(instance: dg.DagsterInstance) -> Iterator[None]:
    """Keep Dagster's SQLite event files open inside the block, and let them reach the disk when SQLite merges its journal.

    A killed process loses no event by that. A power cut may lose the last ones, as if the run had crashed before them: the next
    look finds out what was published. Dagster opens and closes a file for every event, and closing writes the journal back. For a refresh of 24 slices, with 115
    events, that is most of the overhead. Other storages are not changed.
    """
    # Imported here: definitions do not need the history.
    from dagster._core.storage.event_log import SqliteEventLogStorage
    from dagster._core.storage.event_log.sqlite.sqlite_event_log import INDEX_SHARD_NAME
    from dagster._core.storage.sqlite import SQLITE_BUSY_TIMEOUT_SECONDS
    from sqlalchemy import Connection, Engine, QueuePool, create_engine, event

    storage = instance.event_log_storage
    if type(storage) is not SqliteEventLogStorage:
        yield
        return
    open_anew, engines, lock = storage.run_connection, dict[str, Engine](), threading.Lock()

    @contextmanager
    def connect(shard: str) -> Iterator[Connection]:
        with lock:
            if shard not in engines:
                # Dagster creates the tables when it first opens a file.
                with open_anew(shard):
                    pass
                settings = {"timeout": SQLITE_BUSY_TIMEOUT_SECONDS, "check_same_thread": False}
                place = storage.conn_string_for_shard(shard)
                engines[shard] = create_engine(place, poolclass=QueuePool, pool_size=1, connect_args=settings)
                event.listen(engines[shard], "connect", _write_lazily)
            with engines[shard].begin() as connection:
                yield connection

    storage.run_connection = connect  # type: ignore[method-assign, assignment]
    storage.index_connection = lambda: connect(INDEX_SHARD_NAME)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del storage.run_connection, storage.index_connection  # the class has them
        for engine in engines.values():
            engine.dispose()


def _write_lazily(connection: sqlite3.Connection, _record: object) -> None:
    """Do not wait for the disk at each of a refresh's 320 commits; only with the journal that stays consistent then."""
    if connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
        connection.execute("PRAGMA synchronous = NORMAL")


@contextmanager
def _full_disk_as_error() -> Iterator[None]:
    """Turn errors about a full disk under Dagster's history into a MachineError."""
    try:
        yield
    except TirError:
        raise
    except Exception as error:
        if not _is_of_full_disk(error):
            raise
        home = Path(os.environ["DAGSTER_HOME"])
        folder = next(path for path in (home, *home.parents) if path.exists())
        free = shutil.disk_usage(folder).free // 2**20
        raise MachineError(
            f"The disk is full: Dagster's history in {home} cannot be written, {folder} has {free:,} MB free. Make room there, "
            "or set DAGSTER_HOME to a folder on a larger disk, then run again."
        ) from error


def _is_of_full_disk(error: BaseException | None) -> bool:
    """Return whether the error or one of its causes is a full disk under Dagster's history."""
    while error is not None:
        if isinstance(error, sqlite3.Error) and ("disk is full" in str(error) or _is_full(os.environ["DAGSTER_HOME"])):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _is_within(error, Path(os.environ["DAGSTER_HOME"]))
        error = error.__cause__ or error.__context__
    return False


def _is_full(folder: str) -> bool:
    """Return whether the disk is full; SQLite then may say `disk I/O error` or `unable to open database file`."""
    return Path(folder).exists() and shutil.disk_usage(folder).free < _ROOM_OF_SQLITE


def _is_within(error: OSError, folder: Path) -> bool:
    """Return whether the error is about the folder, its content, or one of its parents."""
    paths = [Path(str(name)) for name in (error.filename, error.filename2) if name]
    return any(path.is_relative_to(folder) or folder.is_relative_to(path) for path in paths)
