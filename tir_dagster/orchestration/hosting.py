"""A command that runs jobs in its own process lends them its refresher: what it looked up already is not asked twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tir_dagster.refresh.flow import Refresher


@dataclass(frozen=True)
class Host:
    """The refresher of the command, and who is told of its progress besides the run's log."""

    refresher: Refresher
    listener: Callable[[str], None]


_host: ContextVar[Host | None] = ContextVar("host", default=None)


@contextmanager
def hosting(host: Host) -> Iterator[None]:
    """Inside the block, runs in this process use the host's refresher."""
    token = _host.set(host)
    try:
        yield
    finally:
        _host.reset(token)


def host_of(extract: str) -> Host | None:
    host = _host.get()
    return host if host is not None and host.refresher.spec.name == extract else None
