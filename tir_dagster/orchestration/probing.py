"""Probes that sensors of several extracts share: a table that two of them read is asked about once.

Ticks of one code location run in one process. A sensor never sees a probe twice, so it never waits longer for a change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tir_dagster.snowflake.connection import SnowflakeAccess
    from tir_dagster.snowflake.names import TableName
    from tir_dagster.snowflake.versions import Probe

# Half of what sensors wait between ticks: older than that, somebody else's answer is no news.
FRESH_SECONDS = 15.0
# Dagster ends a tick after 60 seconds, without a word to anybody; a tick reads twice.
READ_SECONDS = 25.0

T = TypeVar("T")


def in_time(action: Callable[[], T], seconds: float = READ_SECONDS) -> T:
    """What the action returns or raises; SnowflakeDownError if it takes longer, so that the tick can still tell people."""
    from tir_dagster.snowflake.connection import SnowflakeDownError  # noqa: PLC0415 - the connector takes seconds

    ended: list[tuple[bool, Any]] = []

    def act() -> None:
        try:
            ended.append((True, action()))
        except Exception as error:
            ended.append((False, error))

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    if not ended:
        raise SnowflakeDownError(
            f"Snowflake did not answer within {seconds:g} seconds. Check its status and the network."
        )
    well, what = ended[0]
    if not well:
        raise what
    result: T = what
    return result


@dataclass
class _Answer:
    """What one query told, and who has heard it."""

    probes: dict[TableName, Probe]
    at: float
    heard: set[str] = field(default_factory=set)


class SharedProbes:
    """The last answer for each way of reaching Snowflake."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._answers: dict[Hashable, _Answer] = {}

    def probe(self, access: SnowflakeAccess, tables: Sequence[TableName], *, asker: str) -> dict[TableName, Probe]:
        """The tables' probes: those that another asker just got, if they tell all and this asker has not heard them."""
        from tir_dagster.snowflake.versions import probe  # noqa: PLC0415 - the connector takes seconds

        # Another role may see other tables.
        way = (access.account, access.host, access.port, access.user, access.role)
        with self._lock:
            known = self._answers.get(way)
            if known is None or not self._is_news(known, tables, asker):
                known = _Answer(probe(access, tables), self._clock())
                self._answers[way] = known
            known.heard.add(asker)
            return {table: known.probes[table] for table in tables}

    def _is_news(self, answer: _Answer, tables: Sequence[TableName], asker: str) -> bool:
        fresh = self._clock() - answer.at < FRESH_SECONDS
        return fresh and asker not in answer.heard and set(tables) <= answer.probes.keys()


SHARED = SharedProbes()
