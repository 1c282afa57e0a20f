"""Sessions on a Spark Connect server: no JVM in this process, no Java, no sparkContext."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tir_dagster.errors import SourceError
from tir_dagster.spark.package import send_code
from tir_dagster.spark.remote import Remote, is_elsewhere, sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Waits between them grow fourfold from 50 ms: about four seconds for a server on this machine, which is there or not; a
# minute over a network. Spark's own 15 take ten minutes.
_RETRIES_HERE, _RETRIES_ELSEWHERE = 4, 7


def connect_session(remote: Remote, settings: Mapping[str, str] | None = None) -> SparkSession:
    """This process's session on that server, made if there is none or the server has forgotten it, with these settings of a session."""
    from tir_dagster.spark.failures import spark_failures
    from tir_dagster.spark.session import configure

    if session := sessions.pop(remote, None):
        try:
            sessions[remote] = configure(session, settings)
        except Exception:
            # The server was restarted, or ended the session; any other problem shows again in the lines below.
            sessions.pop(remote, None)
        else:
            return session
    with spark_failures(f"connecting to {remote.name}", remote):
        sessions[remote] = configure(_new_session(remote), settings)
        if is_elsewhere(sessions[remote]):
            send_code(sessions[remote])
    return sessions[remote]


def _new_session(remote: Remote) -> SparkSession:
    try:
        from pyspark.sql.connect.client.retries import DefaultPolicy
        from pyspark.sql.connect.session import SparkSession as ConnectSession
    except ImportError as error:
        raise SourceError(
            f"Spark at {remote.name} needs packages that are missing here ({error}). Install them: pip install 'pyspark[connect]'"
        ) from error

    # The error already reports the failed tries.
    warnings.filterwarnings("ignore", message=r"\[RETRIES_EXCEEDED\]")
    session = ConnectSession(channel_of(remote))
    retries = _RETRIES_HERE if remote.log else _RETRIES_ELSEWHERE
    session.client.set_retry_policies([DefaultPolicy(max_retries=retries)])
    session.release_session_on_close = remote.session is None
    atexit.register(_leave, session)
    return session  # type: ignore[return-value]


def channel_of(remote: Remote) -> Any:
    """Return what opens connections to the server: parameters that Spark does not know become headers, as Databricks wants them."""
    from pyspark.sql.connect.client import DefaultChannelBuilder

    channel = DefaultChannelBuilder(remote.address)
    if remote.token:
        channel.set("token", remote.token)
    if remote.session:
        channel.set("session_id", remote.session)
        # Not the user's name, which not every process knows: sessions belong to one.
        channel.set("user_id", "tir")
    return channel


def _leave(session: Any) -> None:
    """Close the session when the process ends; a server that is gone is not waited for."""
    session.client.set_retry_policies([])
    session.stop()
