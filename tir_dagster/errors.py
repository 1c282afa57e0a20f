"""The project's errors: what happened, to which extract, slice or file, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tir_dagster.addresses import hide_credentials

# The checks of a new version, by the names under which Dagster shows them.
ROWS_ADD_UP, EQUALS_SOURCE = "rows_add_up", "equals_source"
# And the one of what is published that goes by what the server holds.
SERVER_HOLDS_IT = "server_holds_it"


class TirError(Exception):
    """Something a user can cause or repair. Its text is one or two sentences that end with what to do next.

    Never put a secret into it: these messages reach logs, events, Slack and incidents. Credentials inside addresses, which
    the libraries like to quote, are hidden here.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__(*(hide_credentials(part) if isinstance(part, str) else part for part in parts))


class SpecError(TirError):
    """An extract spec that cannot work, found before anything ran; names file, line, field and the fix."""


class HintError(SpecError):
    """A hint that cannot be understood or does not fit its table; says where, what is wrong and what is supported."""


class SourceError(TirError):
    """Snowflake or its table: unreachable, missing, empty, of the wrong shape."""


class ExtractError(TirError):
    """The Hyper file or its package: broken, of the wrong shape, no room on the disk."""


class MachineError(ExtractError):
    """This machine could not: no room on the disk, Hyper did not start or ended. It says nothing about any file's content."""


class VerificationError(ExtractError):
    """A new version that is not what it must be; `check` names the check that found it. Nothing was published."""

    def __init__(self, message: str, *, check: str, slices: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(message)
        self.check = check
        # What differs, by slice.
        self.slices = dict(slices or {})


class DatasourceError(TirError):
    """Tableau Server or the datasource: unreachable, missing, ambiguous, refused."""


class GuardError(TirError):
    """A refresh stopped before it touched anything, because what it saw looked wrong."""


class LoadError(TirError):
    """Files that cannot become rows: unreadable, of another shape, too many bad rows; the table is as it was."""
