"""The settings that publishing over a datasource resets: saved before it, put back after it, also by a later run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path

from tir_dagster.refresh.state.notes import (
    SettingsNote,
    forget_settings,
    read_settings,
    settings_file,
    write_settings,
)
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import Connection, FoundDatasource, server_version
from tir_dagster.tableau.settings import (
    Attachments,
    ConnectionCredential,
    Restored,
    Seen,
    gone,
    keep,
    list_attachments,
    lost_settings,
    nothing,
    restore,
)


def remember(datasource: FoundDatasource, home: Path, beside: Attachments | None = None) -> Seen:
    """Save the settings before a publish, so that the next run can put them back if this one ends too early.

    Call the returned function right before the publish: people may have changed settings during a long upload.
    """
    earlier = read_settings(home)
    if earlier is not None and (earlier.version.datasource_id != datasource.id or _is_idle(earlier, datasource)):
        earlier = None
    if earlier is not None and earlier.left is None:
        # An earlier publish removed the saved settings: those of now are already without them.
        return nothing
    note: SettingsNote | None = None

    def seen(now: FoundDatasource) -> None:
        nonlocal note
        kept = keep(now)
        if earlier is not None:
            # With those that an earlier publish removed and that are not back yet.
            kept = kept.with_earlier(earlier.kept, earlier.left or ())
        if note is None or kept != note.kept:
            note = SettingsNote(server_version(now), kept, beside or Attachments())
            write_settings(home, note)

    seen(datasource)
    return seen


def is_remembered(home: Path) -> bool:
    """Whether saved settings have not been put back yet."""
    return settings_file(home).is_file()


def remembered_connections(home: Path) -> tuple[Connection, ...]:
    """Return the saved connections from before a publish whose settings have not been put back yet."""
    note = read_settings(home)
    return note.kept.connections if note is not None else ()


def put_back_remembered(
    client: TableauClient,
    datasource: FoundDatasource,
    home: Path,
    credentials: Sequence[ConnectionCredential] = (),
    *,
    foreign: bool = False,
    landed: bool = True,
) -> Restored:
    """Put back the settings that were saved before the last publish; nothing if that publish never landed.

    What failed for a passing reason stays saved for the next refresh. While our publish has not landed, everything stays
    saved until another publish, because ours may land late. For servers that do not show who published: `foreign` means
    that the rows are somebody else's, `landed` that our publish may have landed.
    """
    restored = Restored(datasource)
    note = read_settings(home)
    if note is None:
        forget_settings(home)
        return restored
    since = _since(note, datasource, client.user_id)
    # A rest of an earlier try shows that the publish was ours.
    is_ours = not foreign and (landed or note.left is not None)
    if since is _Since.WE or (since is _Since.SOMEBODY and is_ours):
        restored = restore(client, datasource, note.kept, credentials, only=note.left)
        missing = gone(note.beside, list_attachments(client, datasource), datasource)
        restored = replace(restored, warnings=restored.warnings + missing)
    elif since is _Since.WE_AND_OTHERS:
        restored = Restored(datasource, lost_settings(datasource, note.kept, credentials, only=note.left))
    if restored.again:
        # The others are done: later changes to them are people's own.
        write_settings(home, replace(note, left=restored.again, beside=Attachments()))
    elif not _is_idle(note, datasource):
        forget_settings(home)
    return restored


def _is_idle(note: SettingsNote, datasource: FoundDatasource) -> bool:
    """Whether nobody has published since: our publish did not land, or will land late."""
    same = note.version.datasource_id == datasource.id
    return same and note.left is None and _since(note, datasource, "") is _Since.NOBODY


class _Since(Enum):
    """Who published a datasource since its settings were saved."""

    NOBODY = "what differs now is what people changed"
    WE = "and nobody after us: what is missing was taken by our publish, whatever a refresh made of the rows since"
    WE_AND_OTHERS = "what is there now is theirs"
    OTHERS = "our publish never landed"
    SOMEBODY = "the server does not say who"


def _since(note: SettingsNote, datasource: FoundDatasource, user_id: str) -> _Since:
    before, now = note.version, server_version(datasource)
    # As texts: they have whole seconds.
    if before.datasource_id != datasource.id or str(before) == str(now):
        return _Since.NOBODY
    if before.revision is None or now.revision is None:
        return _Since.SOMEBODY
    later = sorted(
        (revision for revision in datasource.history or () if revision.number > before.revision),
        key=lambda revision: revision.number,
    )
    publishers = [revision.publisher_id for revision in later]
    if not publishers:
        # An edited description changes the version, too.
        return _Since.NOBODY
    if None in publishers:
        return _Since.SOMEBODY
    if publishers[-1] == user_id:
        return _Since.WE
    return _Since.WE_AND_OTHERS if user_id in publishers else _Since.OTHERS
