"""The Hyper process: started when first needed, shared by the whole Python process, restarted when it died; names and literals in its SQL."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tir_dagster.errors import ExtractError, MachineError
from tir_dagster.measuring import waiting_for

# What Hyper writes by default; every Tableau since 2019 reads it.
DEFAULT_FILE_VERSION = 2
# What Hyper says when the machine is short of something; the file is not to blame.
_SHORT = re.compile(r"out of memory|memory limit|no space left|disk full", re.IGNORECASE)


class HyperEngine:
    """hyperd behind connections to extract files.

    The version of a new file can only be said when hyperd starts, so there is one hyperd per file version in use;
    an existing file is opened by any of them and keeps its version.
    """

    def __init__(self, log_folder: Path | None = None) -> None:
        self._log_folder = log_folder
        self._lock = threading.Lock()
        self._processes: dict[int, Any] = {}
        self._owner = os.getpid()
        self._starts = 0

    @contextlib.contextmanager
    def connect(self, path: Path, *, create: bool = False, file_version: int | None = None) -> Iterator[Any]:
        """An open connection to this file; with `create` to a new one of that version. Hyper's errors name the file."""
        from tableauhyperapi import HyperException

        version = DEFAULT_FILE_VERSION if file_version is None else file_version
        # Also while our own code reads its answers: they come one by one.
        with errors_with_path(path), waiting_for("Hyper"):
            try:
                with self._open(path, create=create, version=version) as connection:
                    yield connection
            except HyperException as error:
                if _answers(self._process(version)):
                    raise
                raise MachineError(_ended(path)) from error

    def _open(self, path: Path, *, create: bool, version: int) -> Any:
        from tableauhyperapi import Connection, CreateMode, HyperException

        mode = CreateMode.CREATE_AND_REPLACE if create else CreateMode.NONE
        process = self._process(version)
        try:
            return Connection(process.endpoint, str(path), mode)
        except HyperException:
            if _answers(process):
                raise
            # Somebody ended hyperd. The file was not touched yet, so a second try is safe.
            self._forget(version, process)
            return Connection(self._process(version).endpoint, str(path), mode)

    def _process(self, version: int) -> Any:
        with self._lock:
            if self._owner != os.getpid():
                # A fork shares the parent's hyperd only by accident: it would end with the parent.
                self._processes, self._owner = {}, os.getpid()
            if version not in self._processes:
                self._processes[version] = _start(version, self._log_folder)
                self._starts += 1
            return self._processes[version]

    def _forget(self, version: int, process: Any) -> None:
        with self._lock:
            if self._processes.get(version) is process:
                _end(self._processes.pop(version))

    @contextlib.contextmanager
    def unbroken(self, path: Path, *, file_version: int = DEFAULT_FILE_VERSION) -> Iterator[None]:
        """Raise MachineError if hyperd died during the block; the block must end by opening the file again.

        A commit is durable when its connection closes, and closing does not raise when hyperd is dead: without this, a
        file that still holds the old rows could pass for the new one if as many rows were removed as added.
        """
        for version in {DEFAULT_FILE_VERSION, file_version}:
            self._process(version)
        starts = self._starts
        yield
        if self._starts != starts:
            raise MachineError(_ended(path))

    def close(self) -> None:
        """End hyperd; a later `connect` starts it again."""
        with self._lock:
            processes = list(self._processes.values()) if self._owner == os.getpid() else []
            self._processes = {}
        for process in processes:
            _end(process)


def _start(version: int, log_folder: Path | None) -> Any:
    from tableauhyperapi import HyperException, HyperProcess, Telemetry

    parameters = {"default_database_version": str(version)}
    if log_folder is None:
        # Without this hyperd leaves hyperd.log in whatever folder the run started in.
        parameters["log_config"] = ""
    else:
        log_folder.mkdir(parents=True, exist_ok=True)
        parameters["log_dir"] = str(log_folder)
    try:
        return HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters=parameters)
    except HyperException as error:
        raise MachineError(
            f"Hyper did not start (file version {version}): {first_line(error)}. "
            "Check that tableauhyperapi is installed for this platform and that memory and file handles are free."
        ) from error


def _end(process: Any) -> None:
    from tableauhyperapi import HyperException

    with contextlib.suppress(HyperException):
        process.close()


def _answers(process: Any) -> bool:
    from tableauhyperapi import Connection, HyperException

    try:
        with Connection(process.endpoint):
            return True
    except HyperException:
        return False


@contextlib.contextmanager
def errors_with_path(path: Path) -> Iterator[None]:
    """Turn errors of Hyper into errors that name the file."""
    from tableauhyperapi import HyperException

    try:
        yield
    except HyperException as error:
        kind = MachineError if _SHORT.search(str(error)) else ExtractError
        raise kind(_explained(path, first_line(error))) from error


def _ended(path: Path) -> str:
    return f"Hyper ended while it worked on {path}. Nothing was replaced; run the refresh again."


def _explained(path: Path, message: str) -> str:
    if "does not exist" in message and "database" in message:
        return f"There is no extract at {path}. Run a full refresh to make one."
    if "not a valid database" in message:
        return f"{path} is not a Hyper file, or it is damaged. Run a full refresh, or download the datasource again."
    if "locked" in message or "in use" in message or "being used" in message:
        return f"{path} is open in another process ({message}). Close it there and run again."
    return f"Hyper could not work on {path}: {message}. Nothing was replaced; fix the cause and run again."


def first_line(error: Exception) -> str:
    """The first line of Hyper's message, without the SQL and the hexadecimal context that follow."""
    return str(error).split("\n", maxsplit=1)[0].strip().rstrip(".:")


_shared = HyperEngine()


@contextlib.contextmanager
def hyper_engine(log_folder: Path | None = None) -> Iterator[HyperEngine]:
    """Use a separate engine for everything in this package until the block ends; then end its hyperd."""
    global _shared  # noqa: PLW0603 - one engine per process is the point
    outer, _shared = _shared, HyperEngine(log_folder)
    try:
        yield _shared
    finally:
        _shared.close()
        _shared = outer


def connect(
    path: Path, *, create: bool = False, file_version: int | None = None
) -> contextlib.AbstractContextManager[Any]:
    """A connection of the shared engine."""
    return _shared.connect(path, create=create, file_version=file_version)


def unbroken(path: Path, *, file_version: int = DEFAULT_FILE_VERSION) -> contextlib.AbstractContextManager[None]:
    """Raise MachineError if the shared hyperd died during the block; new files have the version `file_version`."""
    return _shared.unbroken(path, file_version=file_version)


@atexit.register
def close_shared_engine() -> None:
    """End the shared hyperd now rather than at the end of the process."""
    _shared.close()


def quoted(*names: str) -> str:
    """A name in SQL, with its schema before it where given: `"Extract"."Extract"`."""
    from tableauhyperapi import escape_name

    return ".".join(str(escape_name(name)) for name in names)


def literal(text: str) -> str:
    """Write a text as an SQL string. The API's own function writes a control character before a digit as one escape too long."""
    return "'" + text.replace("'", "''") + "'"


def parquet(files: Sequence[Path]) -> str:
    """These Parquet files as one table in SQL; at least one, because Hyper knows no empty ARRAY."""
    listed = ", ".join(literal(str(file.resolve())) for file in files)
    return f"external(ARRAY[{listed}], format => 'parquet')"


def python_value(value: Any) -> Any:
    """A value of Hyper's as one of Python's: it has dates and timestamps of its own."""
    for name in ("to_date", "to_datetime"):
        if hasattr(value, name):
            return getattr(value, name)()
    return value
