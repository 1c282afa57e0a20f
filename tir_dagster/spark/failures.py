"""What goes wrong in Spark, told in the project's own errors: by tasks, by a Java process or a server that ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from tir_dagster.errors import SourceError
from tir_dagster.spark.remote import Remote

_TASK_ERROR = re.compile(r"tir_dagster\.\S*(?:SourceError|SnowflakeError): (.+?)(?:\n|$)")
_GONE = re.compile(
    r"UNAVAILABLE|SESSION_NOT_FOUND|SESSION_CLOSED|SESSION_CHANGED|OPERATION_NOT_FOUND|Connection refused"
)
_REFUSED = re.compile(r"UNAUTHENTICATED|Invalid authentication token|No authentication token")


@contextmanager
def spark_failures(action: str, remote: Remote | None = None) -> Iterator[None]:
    """What a task said in its SourceError is raised here; any other failure of Spark names the action."""
    try:
        yield
    except SourceError:
        raise
    # A task's failure comes as Py4J's error, as Spark's or as Connect's; each carries the traceback as text.
    except Exception as error:
        if told := _TASK_ERROR.search(str(error)):
            raise SourceError(told[1]) from None
        if isinstance(error, PySparkException) and (gone := _unreachable(error, action, remote)):
            raise gone from error
        if isinstance(error, Py4JNetworkError | ConnectionError):
            raise SourceError(
                f"Spark's Java process ended while {action}, most likely for want of memory. Give it more, by the variable"
                " SPARK_DRIVER_MEMORY=4g or the setting spark.driver.memory, and run again. Nothing was published."
            ) from error
        if not isinstance(error, PySparkException):
            raise
        first = str(error).strip().split("\n", 1)[0][:300]
        raise SourceError(f"Spark failed while {action}: {first}. The log of the run has the details.") from error


def _unreachable(error: PySparkException, action: str, remote: Remote | None) -> SourceError | None:
    """The error for a Spark Connect server that is gone or does not let us in; None for any other failure."""
    said = str(error)
    server, advice = f"The Spark server{f' at {remote.name}' if remote else ''}", (remote or Remote("")).advice
    if _REFUSED.search(said):
        return SourceError(f"{server} does not accept the token, or needs one. {advice}. Nothing was published.")
    if not _GONE.search(said):
        return None
    return SourceError(
        f"{server} ended or cannot be reached while {action}. {advice}. Where it ended for want of memory, give it more by the "
        "variable SPARK_DRIVER_MEMORY=4g. Run again; nothing was published."
    )
