"""What an overwrite would lose: credentials are checked before it; tags, owner and texts are put back; the rest is warned about."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import Connection, FoundDatasource, SignInMethod, reread
from tir_dagster.tableau.failures import RefusedError
from tir_dagster.tableau.tasks import RefreshTask, refresh_tasks

# The settings that can be put back, besides the connections.
_TAGS, _TEXTS, _OWNER = "tags", "description and certification", "owner"
# The first REST version that sets how a connection signs in.
_METHOD_SINCE = (3, 27)
_AUTHENTICATIONS: Mapping[SignInMethod, str] = {
    "password": "auth-user-pass",
    "key_pair": "auth-keypair",
    "oauth": "oauth",
}
_SECRETS: Mapping[SignInMethod, str] = {"password": "password", "key_pair": "key pair", "oauth": "OAuth token"}
_WAYS_OUT: Mapping[SignInMethod, str] = {
    "password": "Name credentials for that address in the extract's spec",
    "key_pair": (
        "Save the key pair in Tableau, in the account settings of the user who publishes, and name it in the extract's spec:"
        " `credentials: {method: key_pair, username: …}`"
    ),
    "oauth": (
        "The token belongs to a person, and nobody else can put it back. Let the connection sign in by a key pair: edit it in"
        " Tableau, and name that in the extract's spec, `credentials: {method: key_pair, username: …}`. Or save an OAuth credential"
        " in the account settings of the user who publishes, and name it: `credentials: {method: oauth, username: …}`"
    ),
}
# Subscriptions belong to the whole site: those of a large site are not read at every refresh.
_MOST_SUBSCRIPTIONS = 1000
# Receives the datasource right before it is overwritten, with all that people set on it until then.
Seen = Callable[[FoundDatasource], None]


def nothing(_: FoundDatasource) -> None:
    """Ignore the datasource."""


def check_credentials(datasource: FoundDatasource, named: Sequence[ConnectionCredential]) -> None:
    """Refuse to overwrite embedded credentials for which there is no replacement: they can never be read back."""
    embedded = [connection for connection in datasource.connections if connection.embed_password]
    if lost := [connection for connection in embedded if not any(item.fits(connection) for item in named)]:
        addresses = ", ".join(sorted({item.server_address for item in named})) or "none"
        raise DatasourceError(
            f"Publishing over {datasource.shown} would lose the {_SECRETS[lost[0].method]} embedded in its connection"
            f" ({_listed(lost)}), and Tableau never gives it back. {_WAYS_OUT[lost[0].method]} (now named: {addresses})."
        )
    for connection in embedded:
        # A password may become a key pair: that is how people leave passwords behind.
        allowed = {connection.method, "key_pair"} if connection.method == "password" else {connection.method}
        named_methods = {item.method for item in named if item.fits(connection)}
        if connection.authentication and not named_methods & allowed:
            spec_method = _with_article(min(named_methods))
            raise DatasourceError(
                f"The connection of {datasource.shown} ({_listed([connection])}) signs in by {_SECRETS[connection.method]}, and the"
                f" extract's spec names {spec_method} for it: after a publish it could not sign in any more. Nothing was touched."
                f" {_WAYS_OUT[connection.method]}."
            )


def check_settable(
    datasource: FoundDatasource, later: Sequence[ConnectionCredential], rest_version: tuple[int, int]
) -> None:
    """Refuse a publish after which the server cannot give a connection its way of signing in back."""
    saved = [credential for credential in later if credential.method != "password"]
    if saved and rest_version < _METHOD_SINCE:
        needed, spoken = (".".join(map(str, version)) for version in (_METHOD_SINCE, rest_version))
        raise DatasourceError(
            f"Publishing over {datasource.shown} resets how its connection to {saved[0].server_address} signs in, and"
            f" {_with_article(saved[0].method)} can be set again from REST {needed} on: the server speaks {spoken}. Nothing was"
            " touched. Update the server, sign in by password, or choose the delivery `trigger`, which publishes nothing."
        )


def _with_article(method: SignInMethod) -> str:
    return f"{'an' if method == 'oauth' else 'a'} {_SECRETS[method]}"


def _listed(connections: Sequence[Connection]) -> str:
    return "; ".join(f"{item.type} {item.server_address} as {item.username!r}" for item in connections)


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

    def with_earlier(self, earlier: KeptSettings, names: Sequence[str]) -> KeptSettings:
        """Return these settings, and the earlier ones of these names: as warnings and `Restored.again` name them."""
        settings = self
        if _TAGS in names:
            settings = replace(settings, tags=settings.tags | earlier.tags)
        if _TEXTS in names:
            description, certified, note = _texts(earlier)
            settings = replace(settings, description=description, certified=certified, certification_note=note)
        if _OWNER in names:
            settings = replace(settings, owner_id=earlier.owner_id)
        if any(name not in (_TAGS, _TEXTS, _OWNER) for name in names):
            settings = replace(settings, connections=earlier.connections)
        return settings

    @staticmethod
    def from_json(value: dict[str, Any]) -> KeptSettings:
        connections = tuple(Connection(**connection) for connection in value.get("connections", ()))
        return KeptSettings(**{**value, "tags": frozenset(value["tags"]), "connections": connections})


def keep(datasource: FoundDatasource) -> KeptSettings:
    """Return the settings to put back after this datasource is overwritten."""
    connections = tuple(replace(connection, id="") for connection in datasource.connections)
    texts = (datasource.description, datasource.certified, datasource.certification_note)
    return KeptSettings(datasource.tags, *texts, datasource.owner_id, connections)


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


def lost_settings(
    datasource: FoundDatasource,
    kept: KeptSettings,
    credentials: Sequence[ConnectionCredential] = (),
    *,
    only: tuple[str, ...] | None = None,
) -> tuple[str, ...]:
    """Return a warning for each setting that is gone since we published, and that nobody puts back."""
    return tuple(
        f"The {step.shown} of {datasource.shown} is gone since we published it, and somebody else has published it"
        " after us, so nothing was put back. Set it again by hand if it is needed."
        for step in _steps(datasource, kept, credentials, only)
    )


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
    """The credentials with which a datasource signs in to its source; matched to connections by server address.

    A key pair and an OAuth token are saved in Tableau, by the user who publishes, and found there by the user name.
    """

    server_address: str
    username: str
    password: str = field(repr=False)
    server_port: str = ""
    method: SignInMethod = "password"

    def fits(self, connection: Connection) -> bool:
        ports = {self.server_port, connection.server_port} - {""}
        return len(ports) <= 1 and self.server_address.casefold() == connection.server_address.casefold()


def credential_to_publish(
    credentials: Sequence[ConnectionCredential], servers: Collection[str]
) -> ConnectionCredential | None:
    """Return the credentials that a publish may carry: the first ones, if the package reads from their server alone.

    A publish has room for one user and password and does not say for which connection. With a second server in the package
    they could be embedded for that one; so each connection is then given its own after the publish. A publish has no words
    for a key pair.
    """
    first = next(iter(credentials), None)
    if first is None or first.method == "key_pair":
        return None
    return first if {server.casefold() for server in servers} == {first.server_address.casefold()} else None


@dataclass(frozen=True)
class LostConnection:
    """A connection that a publish changed: as it is now, if it exists, as it was, and its credentials."""

    now: Connection | None
    previous: Connection
    credential: ConnectionCredential | None


def lost_connections(
    now: Sequence[Connection], before: Sequence[Connection], credentials: Sequence[ConnectionCredential]
) -> Iterator[LostConnection]:
    """Return each connection whose address, user name, way of signing in or embedded credentials a publish removed."""
    left = list(now)
    # Unmoved connections first, so that they are not matched with another one of the same type.
    for previous in sorted(before, key=lambda connection: not any(_same_place(connection, other) for other in now)):
        match = next((connection for connection in left if _same_place(connection, previous)), None)
        match = match or next((connection for connection in left if connection.type == previous.type), None)
        if match is not None:
            left.remove(match)
        credential = next((item for item in credentials if item.fits(previous)), None)
        if match is None or not _is_whole(match, previous, credential):
            yield LostConnection(match, previous, credential)


def _is_whole(now: Connection, previous: Connection, credential: ConnectionCredential | None) -> bool:
    """Whether nothing is missing; embedded credentials bring their own user name and way of signing in."""
    if not _same_place(now, previous) or now.embed_password < previous.embed_password:
        return False
    if not previous.embed_password:
        return previous.username in ("", now.username)
    return credential is None or (now.username in ("", credential.username) and now.method == credential.method)


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
        item.username, item.embed_password = credential.username, True
        if credential.method == "password":
            item.password = credential.password
        if credential.method != "password" or lost.now.method != "password":
            same = previous.authentication if previous.method == credential.method else ""
            item.auth_type = same or _AUTHENTICATIONS[credential.method]
    # Of the datasource the client takes the id only.
    server.datasources.update_connection(datasource, item)


@dataclass(frozen=True)
class Attachments:
    """Tasks of the datasource and subscriptions of the site, by id, each in words; None if they could not be read."""

    tasks: Mapping[str, str] | None = None
    subscriptions: Mapping[str, str] | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Attachments:
        return Attachments(**value)


def list_attachments(client: TableauClient, datasource: FoundDatasource) -> Attachments:
    """Return the tasks and subscriptions of now; what this user may not see must not stop a refresh."""
    return Attachments(_tasks(client, datasource), _subscriptions(client, datasource))


def _tasks(client: TableauClient, datasource: FoundDatasource) -> dict[str, str] | None:
    try:
        return {task.id: _task_in_words(task) for task in refresh_tasks(client, datasource)}
    except DatasourceError:
        return None


def _task_in_words(task: RefreshTask) -> str:
    return f"{'incremental' if task.incremental else 'full'} refresh on {task.schedule}"


def _subscriptions(client: TableauClient, datasource: FoundDatasource) -> dict[str, str] | None:
    options = TSC.RequestOptions(pagesize=_MOST_SUBSCRIPTIONS)
    doing = f"list the subscriptions beside {datasource.shown}"
    try:
        items, pages = client.call(lambda server: server.subscriptions.get(options), doing=doing)
    except DatasourceError:
        return None
    if pages.total_available > _MOST_SUBSCRIPTIONS:
        return None
    return {str(item.id): f"subscription {item.subject!r}" for item in items}


def gone(before: Attachments, after: Attachments, datasource: FoundDatasource) -> tuple[str, ...]:
    """Return a warning for each task and subscription that the publish removed."""
    tasks = [
        f"{datasource.shown} lost its {task} when it was overwritten. Create it again on the server."
        for task in _missing(before.tasks, after.tasks)
    ]
    subscriptions = [
        f"The {subscription} is gone since {datasource.shown} was overwritten. Unless somebody removed it on purpose,"
        " subscribe again on the server."
        for subscription in _missing(before.subscriptions, after.subscriptions)
    ]
    return (*tasks, *subscriptions)


def _missing(before: Mapping[str, str] | None, after: Mapping[str, str] | None) -> list[str]:
    if before is None or after is None:
        return []
    return [text for key, text in before.items() if key not in after]
