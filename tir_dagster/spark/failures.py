"""Spark's failures as the project's own errors: of tasks, of the Java process, of a server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from tir_dagster.errors import SourceError
from tir_dagster.spark.remote import Remote

_TASK_ERROR = re.compile(r"tir_dagster\.\S*(?:SourceError|SnowflakeError): (.+?)(?:\n|$)")
_GONE = re.compile(
    r"UNAVAILABLE|SESSION_NOT_FOUND|SESSION_CLOSED|SESSION_CHANGED|OPERATION_NOT_FOUND|Connection refused"
)
# Without a package, with another Python, or with a path that has none.
_UNFIT_WORKER = re.compile(
    r"No module named '[\w.]+'|\[PYTHON_VERSION_MISMATCH\][^\n]{0,200}|Cannot run program \"[^\"]+\"|PACKAGE_NOT_INSTALLED[^\n]{0,200}"
)
_REFUSED = re.compile(r"UNAUTHENTICATED|Invalid authentication token|No authentication token")


@contextmanager
def spark_failures(action: str, remote: Remote | None = None) -> Iterator[None]:
    """Raise a task's SourceError again here; turn any other failure of Spark into an error that names the action."""
    try:
        yield
    except SourceError:
        raise
    # A task's failure comes as Py4J's error, as Spark's or as Connect's; each carries the traceback as text.
    except Exception as error:
        if task_error := _TASK_ERROR.search(str(error)):
            raise SourceError(task_error[1]) from None
        if unfit := _UNFIT_WORKER.search(str(error)):
            raise SourceError(
                f"Spark's Python workers cannot run the tasks while {action}: {unfit[0].strip()}. Give the executors the same minor version "
                "of Python as here and the packages that `tir spark requirements` lists; spark.pyspark.python names their Python "
                "(docs/spark.md). Nothing was published."
            ) from error
        if isinstance(error, PySparkException) and (unreachable := _unreachable(error, action, remote)):
            raise unreachable from error
        if isinstance(error, Py4JNetworkError | ConnectionError):
            raise SourceError(
                f"Spark's Java process ended while {action}, most likely because memory was short. Give it more, by the variable"
                " SPARK_DRIVER_MEMORY=4g or the setting spark.driver.memory, and run again. Nothing was published."
            ) from error
        if not isinstance(error, PySparkException | Py4JError):
            raise
        raise SourceError(
            f"Spark failed while {action}: {(remote or Remote('')).scrub(_cause(error))}. The log of the run has the details."
        ) from error


def _cause(error: Exception) -> str:
    """Return the line that says what happened: Py4J's first one only names its own call, a traceback of Java follows."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    java = next((line.removeprefix(": ") for line in lines if line.startswith(": ")), lines[0])
    return re.sub(r"^(?:[\w$]+\.)+[\w$]+: ", "", java)[:300].rstrip(".")


def _unreachable(error: PySparkException, action: str, remote: Remote | None) -> SourceError | None:
    """The error for a Spark Connect server that ended or refuses the token; None for any other failure."""
    message = str(error)
    server, advice = f"The Spark server{f' at {remote.name}' if remote else ''}", (remote or Remote("")).advice
    if _REFUSED.search(message):
        return SourceError(f"{server} does not accept the token, or needs one. {advice}. Nothing was published.")
    if not _GONE.search(message):
        return None
    return SourceError(
        f"{server} ended or cannot be reached while {action}. {advice}. If it ended because memory was short, give it more by the "
        "variable SPARK_DRIVER_MEMORY=4g. Run again; nothing was published."
    )
