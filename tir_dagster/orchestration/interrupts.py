"""Ctrl-C and SIGTERM: what a command says when somebody ends it, whoever handles signals at that moment."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from tir_dagster.errors import TirError

if TYPE_CHECKING:
    import dagster as dg

_WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class StoppedError(TirError):
    """Somebody ended the command; says what became of its work, and what to do next."""

    def __init__(self, what: str, so_far: str, number: signal.Signals) -> None:
        progress = f" {so_far}" if so_far else ""
        super().__init__(f"{what}: stopped by {_WORDS[number]}.{progress} Run it again.")
        self.number = number

    @property
    def exit_code(self) -> int:
        """As shells count: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number


class _Signals:
    """The signals that came to this process, in their order."""

    def __init__(self) -> None:
        self._pipe: int | None = None
        self._first: signal.Signals | None = None

    def watch(self) -> None:
        if self._pipe is None:
            self._pipe, writer = os.pipe()
            os.set_blocking(self._pipe, False)
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _interrupt)

    def first(self) -> signal.Signals | None:
        if self._first is None and self._pipe is not None:
            try:
                numbers = os.read(self._pipe, 1000)
            except BlockingIOError:
                return None
            self._first = next((number for number in map(signal.Signals, numbers) if number in _WORDS), None)
        return self._first


_signals = _Signals()


def watch_signals() -> None:
    """Note from now on which signal ends this process, and let SIGTERM end it as Ctrl-C does.

    No handler could tell: Dagster, Spark and Snowflake's connector set their own, and Dagster's is one for both.
    """
    _signals.watch()


def check_signals() -> None:
    """Stop here if a signal came that somebody's handler has swallowed, as Dagster's does at the end of a run."""
    if _signals.first() is not None:
        raise KeyboardInterrupt


def is_interrupt(error: BaseException) -> bool:
    """Whether it is Python's, or Dagster's own, which is no Exception either."""
    return not isinstance(error, (Exception, SystemExit, GeneratorExit))


def stopped(what: str, so_far: str = "") -> StoppedError:
    return StoppedError(what, so_far, _signals.first() or signal.SIGINT)


@contextmanager
def stopping(what: str, so_far: Callable[[], str]) -> Iterator[None]:
    """Turn the end by a signal into a StoppedError; also an error that followed from it, as of a child that it ended."""
    try:
        yield
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if not (is_interrupt(error) or isinstance(error, StoppedError) or _signals.first() is not None):
            raise
        raise stopped(what, so_far()) from error


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@contextmanager
def _spared_children() -> Iterator[None]:
    """Start processes that Ctrl-C does not end: a terminal sends it to all of them.

    Blocked, not ignored: one that comes meanwhile reaches this process after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def spare_log_tails(instance: dg.DagsterInstance) -> None:
    """Let Ctrl-C pass by the processes that Dagster captures output with: each would print a traceback of its own."""
    manager = instance.compute_log_manager
    capture = manager.capture_logs

    @contextmanager
    def capture_logs(*arguments: Any, **options: Any) -> Iterator[Any]:
        with ExitStack() as stack:
            with _spared_children():
                captured = stack.enter_context(capture(*arguments, **options))
            yield captured

    manager.capture_logs = capture_logs  # type: ignore[method-assign]
