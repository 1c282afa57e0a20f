"""Ctrl-C and SIGTERM: end a command with one clear message, whichever library handles signals at that moment."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from tir_dagster.errors import TirError

if TYPE_CHECKING:
    import dagster as dg

# Long enough to be out of the callback.
_AGAIN_SECONDS = 0.05
_WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class StoppedError(TirError):
    """A command was stopped by a signal; the text says what happened to its work, and what to do next."""

    def __init__(self, what: str, so_far: str, number: signal.Signals) -> None:
        progress = f" {so_far}" if so_far else ""
        super().__init__(f"{what}: stopped by {_WORDS[number]}.{progress} Run it again.")
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code that shells use: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number


class _Signals:
    """The signals that this process received, in order."""

    def __init__(self) -> None:
        self._pipe: int | None = None
        self._first: signal.Signals | None = None
        self.ending = set(_WORDS)
        # The command ends already.
        self.is_stopping = False

    def watch(self) -> None:
        if self._pipe is None:
            self._pipe, writer = os.pipe()
            os.set_blocking(self._pipe, False)
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            sys.unraisablehook = self._unraisable
            # Where a signal meets a call into the JVM, py4j logs pages of tracebacks to the root logger.
            logging.getLogger().addFilter(lambda _: self.first() is None)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # As in the background of a script. Dagster gives SIGTERM the handler of SIGINT: it would be ignored, too.
            self.ending.discard(signal.SIGINT)
            signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGTERM, _interrupt)

    def _unraisable(self, unraisable: Any) -> None:
        """Send a signal once more whose interrupt came where Python cannot raise it, such as in a callback of the collector.

        Python would print it with a traceback, and go on.
        """
        if unraisable.exc_value is None or not is_interrupt(unraisable.exc_value):
            sys.__unraisablehook__(unraisable)
            return
        timer = threading.Timer(_AGAIN_SECONDS, self._send_again)
        timer.daemon = True
        timer.start()

    def _send_again(self) -> None:
        if not self.is_stopping:
            os.kill(os.getpid(), self.first() or signal.SIGINT)

    def first(self) -> signal.Signals | None:
        if self._first is None and self._pipe is not None:
            try:
                numbers = os.read(self._pipe, 1000)
            except BlockingIOError:
                return None
            self._first = next((number for number in map(signal.Signals, numbers) if number in self.ending), None)
        return self._first


_signals = _Signals()


def watch_signals() -> None:
    """Record which signal ends this process, and let SIGTERM end it as Ctrl-C does.

    A handler is not enough: Dagster, Spark and Snowflake's connector set their own, and Dagster's is the same for both signals.
    """
    _signals.watch()


def check_signals() -> None:
    """Raise KeyboardInterrupt if a signal came that a handler ignored, as Dagster's does at the end of a run."""
    if _signals.first() is not None:
        raise KeyboardInterrupt


def is_interrupt(error: BaseException) -> bool:
    """Return whether the error is Python's KeyboardInterrupt or Dagster's own interrupt."""
    return not isinstance(error, (Exception, SystemExit, GeneratorExit))


def stopped_error(what: str, so_far: str = "") -> StoppedError:
    _signals.is_stopping = True
    return StoppedError(what, so_far, _signals.first() or signal.SIGINT)


@contextmanager
def stopping(what: str, so_far: Callable[[], str]) -> Iterator[None]:
    """Turn an interrupt into a StoppedError; also an error that follows from it, such as that of a killed child process."""
    try:
        yield
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if not (is_interrupt(error) or isinstance(error, StoppedError) or _signals.first() is not None):
            raise
        raise stopped_error(what, so_far()) from error


def _interrupt(number: int, _: Any) -> None:
    if number in _signals.ending:
        raise KeyboardInterrupt


@contextmanager
def _spared_children() -> Iterator[None]:
    """Start child processes that Ctrl-C does not end, although a terminal sends it to all processes.

    The signal is blocked, not ignored: one that comes meanwhile reaches this process after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def spare_log_tails(instance: dg.DagsterInstance) -> None:
    """Keep Ctrl-C from Dagster's output-capturing processes: each would print its own traceback."""
    manager = instance.compute_log_manager
    capture = manager.capture_logs

    @contextmanager
    def capture_logs(*arguments: Any, **options: Any) -> Iterator[Any]:
        with ExitStack() as stack:
            with _spared_children():
                captured = stack.enter_context(capture(*arguments, **options))
            yield captured

    manager.capture_logs = capture_logs  # type: ignore[method-assign]
