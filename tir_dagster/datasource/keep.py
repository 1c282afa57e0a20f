"""What an overwrite would lose: credentials are asked for before, tags, owner and texts are put back after."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.datasource.client import TableauClient
from tir_dagster.datasource.find import reread
from tir_dagster.datasource.found import Connection, FoundDatasource, ServerVersion, server_version
from tir_dagster.datasource.trouble import RefusedError
from tir_dagster.durable import replaced_file
from tir_dagster.errors import DatasourceError


@dataclass(frozen=True)
class ConnectionCredential:
    """What a published datasource signs in to its source with; matched to a connection by server address."""

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


def check_credentials(found: FoundDatasource, named: Sequence[ConnectionCredential]) -> None:
    """Refuse to overwrite embedded credentials for which there is no replacement: they can never be read back."""
    lost = [
        connection
        for connection in found.connections
        if connection.embed_password and not any(item.embed and item.fits(connection) for item in named)
    ]
    if lost:
        shown = "; ".join(f"{item.type} {item.server_address} as {item.username!r}" for item in lost)
        given = ", ".join(sorted({item.server_address for item in named})) or "none"
        raise DatasourceError(
            f"Publishing over {found.shown} would lose the password embedded in its connection ({shown}), and Tableau"
            f" never gives it back. Name credentials for that address in the extract's spec (now named: {given})."
        )


@dataclass(frozen=True)
class Kept:
    """What people set on a datasource by hand; written down before a publish, put back after it."""

    tags: frozenset[str]
    description: str
    certified: bool
    certification_note: str
    owner_id: str

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tags": sorted(self.tags)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Kept:
        return Kept(**{**value, "tags": frozenset(value["tags"])})


def keep(found: FoundDatasource) -> Kept:
    """What to put back after this datasource was overwritten."""
    return Kept(found.tags, found.description, found.certified, found.certification_note, found.owner_id)


def _note(folder: Path) -> Path:
    """Beside the folder in which packages are made to be published: that one is emptied every time."""
    return folder.with_name("kept.json")


def remember(found: FoundDatasource, folder: Path) -> None:
    """Write it down before a publish: a run that ends before it has put everything back leaves that to the next one."""
    earlier, _ = _remembered(folder)
    if earlier is not None and earlier.datasource_id == found.id:
        # Of a publish that took it away: what is there now is already without it.
        return
    note = {"version": str(server_version(found)), "kept": keep(found).as_json()}
    with replaced_file(_note(folder)) as beside:
        beside.write_text(json.dumps(note), encoding="utf-8")


def is_remembered(folder: Path) -> bool:
    """Whether something written down has not been put back yet."""
    return _note(folder).is_file()


def forget(folder: Path) -> None:
    _note(folder).unlink(missing_ok=True)


def put_back_remembered(client: TableauClient, found: FoundDatasource, folder: Path) -> Restored:
    """Put back what was written down before the last publish; nothing if that publish never landed.

    What the server was only in trouble with stays written down for the next refresh.
    """
    version, kept = _remembered(folder)
    lost = version is not None and version.datasource_id == found.id and str(version) != str(server_version(found))
    restored = restore(client, found, kept) if lost and kept is not None else Restored(found)
    if not restored.again:
        forget(folder)
    return restored


def _remembered(folder: Path) -> tuple[ServerVersion | None, Kept | None]:
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        note = json.loads(_note(folder).read_text(encoding="utf-8"))
        return ServerVersion.parse(note["version"]), Kept.from_json(note["kept"])
    return None, None


@dataclass(frozen=True)
class Restored:
    """The datasource afterwards, a sentence about each thing that could not be put back, and whether to try again."""

    found: FoundDatasource
    warnings: tuple[str, ...] = ()
    again: bool = False


def restore(client: TableauClient, found: FoundDatasource, kept: Kept) -> Restored:
    """Put back what differs. Nothing here stops a refresh: the rows are published, and the rest is warned about.

    It moves the server's version: take that from the datasource returned here.
    """
    steps: list[tuple[str, str, Callable[[Any], Any]]] = []
    if missing := kept.tags - found.tags:
        steps.append(
            ("tags", ", ".join(sorted(missing)), lambda server: server.datasources.add_tags(found.id, missing))
        )
    if _texts(kept) != _texts(keep(found)):
        steps.append(("description and certification", "", lambda server: _update(server, found, kept)))
    if kept.owner_id and kept.owner_id != found.owner_id:
        steps.append(("owner", kept.owner_id, lambda server: _update(server, found, kept, owner_id=kept.owner_id)))
    tried = [(what, _step(client, found, what, value, action)) for what, value, action in steps]
    errors = [(what, error) for what, error in tried if error is not None]
    now = reread(client, found) if steps else found
    if now is None:
        raise DatasourceError(
            f"{found.shown} on {client.where} was deleted just after it was published. Run again to publish it anew."
        )
    again = any(not isinstance(error, RefusedError) for _, error in errors)
    return Restored(now, tuple(_warning(found, what, error) for what, error in errors), again)


def _texts(kept: Kept) -> tuple[str, bool, str]:
    return kept.description, kept.certified, kept.certification_note


def _step(
    client: TableauClient, found: FoundDatasource, what: str, value: str, action: Callable[[Any], Any]
) -> DatasourceError | None:
    shown = f"{what} ({value})" if value else what
    try:
        client.call(action, doing=f"put back the {shown} of {found.shown}")
    except DatasourceError as error:
        return error
    return None


def _warning(found: FoundDatasource, what: str, error: DatasourceError) -> str:
    if isinstance(error, RefusedError):
        return f"{error} The {what} of {found.shown} must be set again by hand."
    return f"{error} The next refresh puts back the {what} of {found.shown}."


def _update(server: Any, found: FoundDatasource, kept: Kept, *, owner_id: str | None = None) -> None:
    """One update. The owner goes alone: only an administrator may set it, and a refusal loses the whole update."""
    item = server.datasources.get_by_id(found.id)
    item.description, item.certified = kept.description, kept.certified
    item.certification_note, item.owner_id = kept.certification_note, owner_id
    server.datasources.update(item)
