"""What an overwrite would lose: credentials are asked for before, tags, owner and texts are put back after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.datasource.client import TableauClient
from tir_dagster.datasource.find import reread
from tir_dagster.datasource.found import Connection, FoundDatasource
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


@dataclass(frozen=True)
class Restored:
    """The datasource afterwards, and a sentence about each thing that could not be put back."""

    found: FoundDatasource
    warnings: tuple[str, ...]


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
    warnings = tuple(filter(None, (_step(client, found, *step) for step in steps)))
    now = reread(client, found) if steps else found
    if now is None:
        raise DatasourceError(f"{found.shown} on {client.where} was deleted just after it was published.")
    return Restored(now, warnings)


def _texts(kept: Kept) -> tuple[str, bool, str]:
    return kept.description, kept.certified, kept.certification_note


def _step(
    client: TableauClient, found: FoundDatasource, what: str, value: str, action: Callable[[Any], Any]
) -> str | None:
    shown = f"{what} ({value})" if value else what
    try:
        client.call(action, doing=f"put back the {shown} of {found.shown}")
    except DatasourceError as error:
        return f"{error} The {what} of {found.shown} must be set again by hand."
    return None


def _update(server: Any, found: FoundDatasource, kept: Kept, *, owner_id: str | None = None) -> None:
    """One update. The owner goes alone: only an administrator may set it, and a refusal loses the whole update."""
    item = server.datasources.get_by_id(found.id)
    item.description, item.certified = kept.description, kept.certified
    item.certification_note, item.owner_id = kept.certification_note, owner_id
    server.datasources.update(item)
