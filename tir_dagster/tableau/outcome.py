"""Outcomes of a publish on the server: it landed, it did not, somebody else published, or it is unknown."""

from __future__ import annotations

from enum import Enum

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.datasources import (
    FoundDatasource,
    server_version,
)


class ForeignPublishError(DatasourceError):
    """Somebody else changed the datasource; the message says whether our publish landed as well."""


class PublishUnknownError(DatasourceError):
    """A publish broke off, and the server does not show whose content it holds: compare the content."""


def check_undisturbed(before: FoundDatasource, now: FoundDatasource, *, where: str, meanwhile: str) -> None:
    """Raise if there is a newer revision: another user published meanwhile."""
    if now.revision != before.revision:
        raise ForeignPublishError(
            f"Somebody else published {before.shown} on {where} while {meanwhile} (revision {before.revision}, now"
            f" {now.revision}). Nothing is confirmed. Run again: the next refresh compares what is there."
        )


class PublishOutcome(Enum):
    """What became of a publish."""

    CLEAN = "nothing was about to be published"
    LANDED = "the publish landed: confirm it late"
    NOT_LANDED = "the server still holds what it held before: publish again"
    HOLE = "a refresh on the server did not end: the kept package is published back first"
    PARTIAL = "a part of the change arrived on the server: it is sent again"
    FORGOTTEN = "the server holds a version of ours that is not on record: confirm it again"
    FOREIGN = "the server holds something that is not ours"
    UNKNOWN = "it changed, and the server does not say by whom"


def outcome_by_revisions(
    before: FoundDatasource | None, now: FoundDatasource | None, *, user_id: str, sends: int
) -> PublishOutcome:
    """Compare the datasource before a publish (None: there was none) with what is there now.

    `sends` is how many of our requests may have landed: if there are more new revisions, somebody else published,
    perhaps with our user.
    """
    if before is None or now is None:
        if before is now:
            return PublishOutcome.NOT_LANDED
        return PublishOutcome.FOREIGN if now is None else _by_publishers(now, after=0, user_id=user_id, sends=sends)
    if server_version(now) == server_version(before):
        return PublishOutcome.NOT_LANDED
    if now.id != before.id:
        return PublishOutcome.FOREIGN
    return _by_publishers(now, after=before.revision or 0, user_id=user_id, sends=sends)


def _by_publishers(now: FoundDatasource, *, after: int, user_id: str, sends: int) -> PublishOutcome:
    """Decide by the publishers of the new revisions; without new revisions the outcome is unknown."""
    publishers = [revision.publisher_id for revision in now.history or () if revision.number > after]
    if len(publishers) > sends:
        return PublishOutcome.FOREIGN
    if not publishers or None in publishers:
        return PublishOutcome.UNKNOWN
    return PublishOutcome.LANDED if set(publishers) == {user_id} else PublishOutcome.FOREIGN
