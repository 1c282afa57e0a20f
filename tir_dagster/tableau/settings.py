"""Settings that an overwrite would lose: credentials are checked before it; tags, owner and texts are put back after it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.files import replaced_file
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import Connection, FoundDatasource, ServerVersion, reread, server_version
from tir_dagster.tableau.failures import RefusedError
from tir_dagster.tableau.tasks import Attachments, gone, list_attachments

# The settings that can be put back, besides the connections.
_TAGS, _TEXTS, _OWNER = "tags", "description and certification", "owner"
# Receives the datasource right before it is overwritten, with all that people set on it until then.
Seen = Callable[[FoundDatasource], None]


def nothing(_: FoundDatasource) -> None:
    """Ignore the datasource."""


def check_credentials(datasource: FoundDatasource, named: Sequence[ConnectionCredential]) -> None:
    """Refuse to overwrite embedded credentials for which there is no replacement: they can never be read back."""
    lost = [
        connection
        for connection in datasource.connections
        if connection.embed_password and not any(item.embed and item.fits(connection) for item in named)
    ]
    if lost:
        connections = "; ".join(f"{item.type} {item.server_address} as {item.username!r}" for item in lost)
        addresses = ", ".join(sorted({item.server_address for item in named})) or "none"
        raise DatasourceError(
            f"Publishing over {datasource.shown} would lose the password embedded in its connection ({connections}), and Tableau"
            f" never gives it back. Name credentials for that address in the extract's spec (now named: {addresses})."
        )


@dataclass(frozen=True)
class KeptSettings:
    """Settings that people made on a datasource by hand; saved before a publish, put back after it."""

    tags: frozenset[str]
    description: str
    certified: bool
    certification_note: str
    owner_id: str
    # Without their ids: every publish creates new ones.
    connections: tuple[Connection, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tags": sorted(self.tags)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> KeptSettings:
        connections = tuple(Connection(**connection) for connection in value.get("connections", ()))
        return KeptSettings(**{**value, "tags": frozenset(value["tags"]), "connections": connections})


def keep(datasource: FoundDatasource) -> KeptSettings:
    """Return the settings to put back after this datasource is overwritten."""
    connections = tuple(replace(connection, id="") for connection in datasource.connections)
    texts = (datasource.description, datasource.certified, datasource.certification_note)
    return KeptSettings(datasource.tags, *texts, datasource.owner_id, connections)


def _file(home: Path) -> Path:
    return home / "kept.json"


def remember(datasource: FoundDatasource, home: Path, beside: Attachments | None = None) -> Seen:
    """Save the settings before a publish, so that the next run can put them back if this one ends too early.

    Call the returned function right before the publish: people may have changed settings during a long upload.
    """
    earlier = _remembered(home)
    if earlier is not None and (earlier.version.datasource_id != datasource.id or earlier.is_idle(datasource)):
        earlier = None
    if earlier is not None and earlier.left is None:
        # An earlier publish removed the saved settings: those of now are already without them.
        return nothing
    note: _Note | None = None

    def seen(now: FoundDatasource) -> None:
        nonlocal note
        kept = keep(now) if earlier is None else earlier.owed(keep(now))
        if note is None or kept != note.kept:
            note = _Note(server_version(now), kept, beside or Attachments())
            note.write(home)

    seen(datasource)
    return seen


def is_remembered(home: Path) -> bool:
    """Whether saved settings have not been put back yet."""
    return _file(home).is_file()


def forget(home: Path) -> None:
    _file(home).unlink(missing_ok=True)


def remembered_connections(home: Path) -> tuple[Connection, ...]:
    """Return the saved connections from before a publish whose settings have not been put back yet."""
    note = _remembered(home)
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
    note, restored = _remembered(home), Restored(datasource)
    since = _since(note, datasource, client.user_id) if note is not None else _Since.NOBODY
    # A rest of an earlier try shows that the publish was ours.
    is_ours = not foreign and (landed or (note is not None and note.left is not None))
    if note is not None and (since is _Since.WE or (since is _Since.SOMEBODY and is_ours)):
        restored = restore(client, datasource, note.kept, credentials, only=note.left)
        missing = gone(note.beside, list_attachments(client, datasource), datasource)
        restored = replace(restored, warnings=restored.warnings + missing)
    elif note is not None and since is _Since.WE_AND_OTHERS:
        steps = _steps(datasource, note.kept, credentials, note.left)
        restored = Restored(datasource, tuple(_left(datasource, step) for step in steps))
    if note is not None and restored.again:
        # The others are done: later changes to them are people's own.
        replace(note, left=restored.again, beside=Attachments()).write(home)
    elif note is None or not note.is_idle(datasource):
        forget(home)
    return restored


class _Since(Enum):
    """Who published a datasource since its settings were saved."""

    NOBODY = "what differs now is what people changed"
    WE = "and nobody after us: what is missing was taken by our publish, whatever a refresh made of the rows since"
    WE_AND_OTHERS = "what is there now is theirs"
    OTHERS = "our publish never landed"
    SOMEBODY = "the server does not say who"


def _since(note: _Note, datasource: FoundDatasource, user_id: str) -> _Since:
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


@dataclass(frozen=True)
class _Note:
    """Saved settings, and the version of the datasource that had them."""

    version: ServerVersion
    kept: KeptSettings
    beside: Attachments
    # Which of them are still to be put back; None: all.
    left: tuple[str, ...] | None = None

    def is_idle(self, datasource: FoundDatasource) -> bool:
        """Whether nobody has published since: our publish did not land, or will land late."""
        same = self.version.datasource_id == datasource.id
        return same and self.left is None and _since(self, datasource, "") is _Since.NOBODY

    def owed(self, now: KeptSettings) -> KeptSettings:
        """Return the settings of now, with those that an earlier publish removed and that are not back yet."""
        left, was = self.left or (), self.kept
        if _TAGS in left:
            now = replace(now, tags=now.tags | was.tags)
        if _TEXTS in left:
            texts = (was.description, was.certified, was.certification_note)
            now = replace(now, description=texts[0], certified=texts[1], certification_note=texts[2])
        if _OWNER in left:
            now = replace(now, owner_id=was.owner_id)
        if any(what not in (_TAGS, _TEXTS, _OWNER) for what in left):
            now = replace(now, connections=was.connections)
        return now

    def write(self, home: Path) -> None:
        value = {
            "version": str(self.version),
            "kept": self.kept.as_json(),
            "beside": self.beside.as_json(),
            "left": self.left,
        }
        with replaced_file(_file(home)) as written:
            written.write_text(json.dumps(value), encoding="utf-8")


def _remembered(home: Path) -> _Note | None:
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        note = json.loads(_file(home).read_text(encoding="utf-8"))
        beside, left = Attachments.from_json(note.get("beside", {})), note.get("left")
        version, kept = ServerVersion.parse(note["version"]), KeptSettings.from_json(note["kept"])
        return _Note(version, kept, beside, None if left is None else tuple(left))
    return None


@dataclass(frozen=True)
class Restored:
    """The datasource afterwards, a warning for each setting that could not be put back, and which to try again."""

    datasource: FoundDatasource
    warnings: tuple[str, ...] = ()
    again: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Step:
    """One setting that differs from the saved one, and how to put it back."""

    what: str
    value: str
    action: Callable[[Any], Any]

    @property
    def shown(self) -> str:
        """The setting with its old value, which is saved nowhere else."""
        return f"{self.what} ({self.value})" if self.value else self.what


def restore(
    client: TableauClient,
    datasource: FoundDatasource,
    kept: KeptSettings,
    credentials: Sequence[ConnectionCredential] = (),
    *,
    only: tuple[str, ...] | None = None,
) -> Restored:
    """Put back the settings that differ, and check the result. Failures become warnings: they must not stop a refresh.

    This changes the server's version: use the returned datasource.
    """
    steps = _steps(datasource, kept, credentials, only)
    tried = [(step.what, _try(client, datasource, step)) for step in steps]
    errors = {what: error for what, error in tried if error is not None}
    now = reread(client, datasource) if steps else datasource
    if now is None:
        raise DatasourceError(
            f"{datasource.shown} on {client.where} was deleted just after it was published. Run again to publish it anew."
        )
    again = tuple(what for what, error in errors.items() if not isinstance(error, RefusedError))
    warnings = [_warning(datasource, what, error) for what, error in errors.items()]
    left = _steps(now, kept, credentials, only) if steps else []
    warnings += [_unmoved(datasource, step) for step in left if step.what not in errors]
    return Restored(now, tuple(warnings), again)


def _steps(
    datasource: FoundDatasource,
    kept: KeptSettings,
    credentials: Sequence[ConnectionCredential],
    only: tuple[str, ...] | None,
) -> list[_Step]:
    """Return the steps in their order; with `only`, just these."""
    return [step for step in _all_steps(datasource, kept, credentials) if only is None or step.what in only]


def _all_steps(
    datasource: FoundDatasource, kept: KeptSettings, credentials: Sequence[ConnectionCredential]
) -> list[_Step]:
    steps: list[_Step] = []
    if missing := kept.tags - datasource.tags:
        value = ", ".join(sorted(missing))
        steps.append(_Step(_TAGS, value, lambda server: server.datasources.add_tags(datasource.id, missing)))
    if _texts(kept) != _texts(keep(datasource)):
        value = _in_words(kept)
        steps.append(_Step(_TEXTS, value, lambda server: _update(server, datasource, kept)))
    lost = lost_connections(datasource.connections, kept.connections, credentials)
    steps += [
        _Step(
            f"connection to {connection.previous.server_address}",
            "",
            partial(repair_connection, datasource, connection),
        )
        for connection in lost
    ]
    # Last: after giving up ownership we may no longer be allowed to change the rest.
    if kept.owner_id and kept.owner_id != datasource.owner_id:
        owner = kept.owner_id
        steps.append(_Step(_OWNER, owner, lambda server: _give(server, datasource, owner)))
    return steps


def _texts(kept: KeptSettings) -> tuple[str, bool, str]:
    return kept.description, kept.certified, kept.certification_note


def _in_words(kept: KeptSettings) -> str:
    certified = f"certified with the note {kept.certification_note!r}" if kept.certification_note else "certified"
    return f"{kept.description!r}, {certified if kept.certified else 'not certified'}"


def _try(client: TableauClient, datasource: FoundDatasource, step: _Step) -> DatasourceError | None:
    try:
        client.call(step.action, doing=f"put back the {step.shown} of {datasource.shown}")
    except DatasourceError as error:
        return error
    return None


def _warning(datasource: FoundDatasource, what: str, error: DatasourceError) -> str:
    if isinstance(error, RefusedError):
        return f"{error} The {what} of {datasource.shown} must be set again by hand."
    return f"{error} The next refresh puts back the {what} of {datasource.shown}."


def _unmoved(datasource: FoundDatasource, step: _Step) -> str:
    return (
        f"The {step.shown} of {datasource.shown} must be set again by hand: publishing removed it, and the server does not show"
        " it although it accepted the old value."
    )


def _left(datasource: FoundDatasource, step: _Step) -> str:
    return (
        f"The {step.shown} of {datasource.shown} is gone since we published it, and somebody else has published it"
        " after us, so nothing was put back. Set it again by hand if it is needed."
    )


def _update(server: Any, datasource: FoundDatasource, kept: KeptSettings) -> None:
    item = server.datasources.get_by_id(datasource.id)
    item.description, item.certified = kept.description, kept.certified
    item.certification_note, item.owner_id = kept.certification_note, None
    server.datasources.update(item)


def _give(server: Any, datasource: FoundDatasource, owner_id: str) -> None:
    """Set the owner in an update of its own: only an administrator may do that. The client sends the current texts, too."""
    item = server.datasources.get_by_id(datasource.id)
    item.owner_id = owner_id
    server.datasources.update(item)


@dataclass(frozen=True)
class ConnectionCredential:
    """The credentials with which a published datasource signs in to its source; matched to connections by server address."""

    server_address: str
    username: str
    password: str = field(repr=False)
    server_port: str = ""
    embed: bool = True
    oauth: bool = False

    def fits(self, connection: Connection) -> bool:
        ports = {self.server_port, connection.server_port} - {""}
        return len(ports) <= 1 and self.server_address.casefold() == connection.server_address.casefold()

    def as_item(self) -> Any:
        """The connection as a publish sends it."""
        item = TSC.ConnectionItem()
        item.server_address = self.server_address
        item.server_port = self.server_port or None
        item.connection_credentials = TSC.ConnectionCredentials(
            self.username, self.password, embed=self.embed, oauth=self.oauth
        )
        return item


@dataclass(frozen=True)
class LostConnection:
    """A connection that a publish changed: as it is now, if it exists, as it was, and its credentials."""

    now: Connection | None
    previous: Connection
    credential: ConnectionCredential | None


def lost_connections(
    now: Sequence[Connection], before: Sequence[Connection], credentials: Sequence[ConnectionCredential]
) -> Iterator[LostConnection]:
    """Return each connection whose address, user name or embedded password a publish removed."""
    left = list(now)
    # Unmoved connections first, so that they are not matched with another one of the same type.
    for previous in sorted(before, key=lambda connection: not any(_same_place(connection, other) for other in now)):
        match = next((connection for connection in left if _same_place(connection, previous)), None)
        match = match or next((connection for connection in left if connection.type == previous.type), None)
        if match is not None:
            left.remove(match)
        if match is None or not _is_whole(match, previous):
            credential = next((item for item in credentials if item.embed and item.fits(previous)), None)
            yield LostConnection(match, previous, credential)


def _is_whole(now: Connection, previous: Connection) -> bool:
    """Whether nothing is missing; the user name counts only without an embedded password, which brings its own."""
    renamed = not previous.embed_password and previous.username not in ("", now.username)
    return _same_place(now, previous) and now.embed_password >= previous.embed_password and not renamed


def _same_place(left: Connection, right: Connection) -> bool:
    def address(connection: Connection) -> tuple[str, str, str]:
        return connection.type, connection.server_address.casefold(), connection.server_port

    return address(left) == address(right)


def repair_connection(datasource: FoundDatasource, lost: LostConnection, server: Any) -> None:
    """Set the connection to what it was, with the credentials that the spec names for it."""
    previous, credential = lost.previous, lost.credential
    if lost.now is None or (previous.embed_password and credential is None):
        why = "the package has no such connection" if lost.now is None else "no credentials are named for it"
        raise RefusedError(f"Could not put back the connection to {previous.server_address}: {why}.", code="")
    item = TSC.ConnectionItem()
    item._id = lost.now.id  # noqa: SLF001 - the client can only update what it has read, one call more
    item.server_address, item.server_port = previous.server_address, previous.server_port or None
    item.username = previous.username
    if previous.embed_password and credential is not None:
        item.username, item.password, item.embed_password = credential.username, credential.password, True
    # Of the datasource the client takes the id only.
    server.datasources.update_connection(datasource, item)
