"""The project's errors: what happened, to which extract, slice or file, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tir_dagster.addresses import hide_credentials

# The checks of a new version, by the names under which Dagster shows them.
ROWS_ADD_UP, EQUALS_SOURCE = "rows_add_up", "equals_source"
# The check that compares what the server holds with what was confirmed.
SERVER_HOLDS_IT = "server_holds_it"


class TirError(Exception):
    """A problem that a user can cause or repair. Its text is one or two sentences that end with what to do next.

    Never put a secret into it: these messages reach logs, events, Slack and incidents. Credentials inside addresses, which
    libraries often quote, are hidden here.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__(*(hide_credentials(part) if isinstance(part, str) else part for part in parts))


class SpecError(TirError):
    """An invalid extract spec, found before anything ran; the text names file, line, field and the fix."""


class HintError(SpecError):
    """A hint that cannot be read or does not fit its table; the text says where, what is wrong and what is supported."""


class SourceError(TirError):
    """A problem with Snowflake or the table: unreachable, missing, empty, or with the wrong columns."""


class ExtractError(TirError):
    """A problem with the Hyper file or its package: damaged, or with the wrong columns."""


class MachineError(ExtractError):
    """A problem of this machine: the disk is full, or Hyper did not start or crashed. No file is to blame."""


class VerificationError(ExtractError):
    """A new version that failed verification; `check` names the failed check. Nothing was published."""

    def __init__(self, message: str, *, check: str, slices: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(message)
        self.check = check
        # Differences by slice.
        self.slices = dict(slices or {})


class DatasourceError(TirError):
    """A problem with Tableau Server or the datasource: unreachable, missing, ambiguous, refused."""


class GuardError(TirError):
    """A refresh that stopped before it changed anything, because the source looked wrong."""


class LoadError(TirError):
    """Files that cannot be loaded: unreadable, with other columns, or with too many bad rows. The table is unchanged."""
