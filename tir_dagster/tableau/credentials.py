"""What a published datasource signs in to its source with: sent with a publish, and put back where that lost it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.tableau.found import Connection, FoundDatasource
from tir_dagster.tableau.trouble import RefusedError


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


@dataclass(frozen=True)
class LostConnection:
    """A connection that is not what it was: as it is now, if at all, as it was, and what it signs in with."""

    now: Connection | None
    wanted: Connection
    credential: ConnectionCredential | None


def lost_connections(
    now: Sequence[Connection], before: Sequence[Connection], credentials: Sequence[ConnectionCredential]
) -> Iterator[LostConnection]:
    """Each connection whose address, user name or embedded password a publish took away."""
    left = list(now)
    # Those that are where they were first, so that another one of the same kind is not taken for them.
    for wanted in sorted(before, key=lambda one: not any(_same_place(one, other) for other in now)):
        found = next((one for one in left if _same_place(one, wanted)), None)
        found = found or next((one for one in left if one.type == wanted.type), None)
        if found is not None:
            left.remove(found)
        if found is None or not _is_whole(found, wanted):
            credential = next((item for item in credentials if item.embed and item.fits(wanted)), None)
            yield LostConnection(found, wanted, credential)


def _is_whole(now: Connection, wanted: Connection) -> bool:
    """With an embedded password the user name comes with the credentials; without one it is what people set."""
    renamed = not wanted.embed_password and wanted.username not in ("", now.username)
    return _same_place(now, wanted) and now.embed_password >= wanted.embed_password and not renamed


def _same_place(one: Connection, other: Connection) -> bool:
    def place(connection: Connection) -> tuple[str, str, str]:
        return connection.type, connection.server_address.casefold(), connection.server_port

    return place(one) == place(other)


def mend_connection(found: FoundDatasource, lost: LostConnection, server: Any) -> None:
    """Set the connection to what it was, with the credential that the spec names for it."""
    wanted, credential = lost.wanted, lost.credential
    if lost.now is None or (wanted.embed_password and credential is None):
        why = "the package has no such connection" if lost.now is None else "no credentials are named for it"
        raise RefusedError(f"Could not put back the connection to {wanted.server_address}: {why}.", code="")
    item = TSC.ConnectionItem()
    item._id = lost.now.id  # noqa: SLF001 - the client can only update what it has read, one call more
    item.server_address, item.server_port = wanted.server_address, wanted.server_port or None
    item.username = wanted.username
    if wanted.embed_password and credential is not None:
        item.username, item.password, item.embed_password = credential.username, credential.password, True
    # Of the datasource the client takes the id only.
    server.datasources.update_connection(found, item)
