"""Projects and datasources: find them by path and name, and read what the server says about them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from defusedxml.ElementTree import fromstring
from tableauserverclient.datetime_helpers import parse_datetime

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.failures import RefusedError

_PAGE = 1000
_MOST_READS = 5
# A filter expression has no way to quote these; what holds one is found by listing.
NOT_IN_FILTERS = frozenset(",:&[]*")
# `updatedAt` has whole seconds: two changes further apart than this cannot show the same one.
_SETTLE_SECONDS = 1.1


def find_project(client: TableauClient, path: str) -> FoundProject:
    """Return the project at `parent/child`, or the only one of that name; `/name` is the one at the top."""
    projects = list_projects(client)
    name = path.strip().strip("/")
    if "/" in path.strip():
        matches = [project for project in projects if project.path == name]
    else:
        matches = [project for project in projects if project.name == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        paths = ", ".join(sorted(_written(project.path) for project in matches))
        raise DatasourceError(
            f"{len(matches)} projects on {client.where} are called {name!r}: {paths}. Write the full path of the project."
        )
    raise DatasourceError(
        f"There is no project {name!r} on {client.where} that this user can see."
        f"{_close(name, [project.path for project in projects], [project.name for project in projects])}"
        " Check the name, or ask for permission to view the project."
    )


def list_projects(client: TableauClient) -> list[FoundProject]:
    """All projects that the user can see, with their paths."""
    items = _everything(client, "projects", "list the projects")
    by_id = {item.id: item for item in items}
    return [FoundProject(item.id, item.name, _path(item, by_id), item.writeable) for item in items]


def _path(item: Any, by_id: dict[str, Any]) -> str:
    """Names from the top down; a parent that the user cannot see is left out."""
    names, seen = [item.name], {item.id}
    while (item := by_id.get(item.parent_id)) is not None and item.id not in seen:
        seen.add(item.id)
        names.append(item.name)
    return "/".join(reversed(names))


def _written(path: str) -> str:
    return repr(path if "/" in path else f"/{path}")


def find_datasource(client: TableauClient, *, project: FoundProject, name: str) -> FoundDatasource:
    """Return the datasource of that name in that project; raise with similar names if there is none."""
    datasource = look_for_datasource(client, project=project, name=name)
    if datasource is not None:
        return datasource
    raise DatasourceError(
        f"{none_of_that_name(client, project=project, name=name)} Check the name and the project, or ask for permission to view it."
    )


def none_of_that_name(client: TableauClient, *, project: FoundProject, name: str) -> str:
    """Return a sentence that there is no such datasource, with similar names."""
    items = _everything(client, "datasources", f"list the datasources of project {project.path!r}")
    inside = [item.name for item in items if item.project_id == project.id]
    elsewhere = sorted({str(item.project_name) for item in items if item.name == name})
    other = f" There is one of that name in {', '.join(map(repr, elsewhere))}." if elsewhere else ""
    return (
        f"There is no datasource {name!r} in project {project.path!r} on {client.where} that this user can see."
        f"{other}{_close(name, inside)}"
    )


def name_of_id(client: TableauClient, datasource_id: str) -> str | None:
    """Return the current name of the datasource with that id, as messages show it; None if this user sees none."""
    doing = f"look for the datasource with id {datasource_id}"
    try:
        item = client.call(lambda server: server.datasources.get_by_id(datasource_id), doing=doing)
    except RefusedError:
        return None
    return shown_place(item.name, str(item.project_name), client.where)


def list_extracts(client: TableauClient) -> list[ListedExtract]:
    """Return all datasources with an extract that the user can see, as the list shows them."""
    items = _everything(client, "datasources", "list the datasources")
    return [
        ListedExtract(item.id, item.name, item.project_id, item.size)
        # Older servers do not say whether there is an extract.
        for item in items
        if item.has_extracts is not False
    ]


def look_for_datasource(client: TableauClient, *, project: FoundProject, name: str) -> FoundDatasource | None:
    """Return the datasource of that name in that project, or None."""
    doing = f"find datasource {name!r} in project {project.path!r}"
    items = _everything(client, "datasources", doing, {"name": name, "projectName": project.name})
    for item in items:
        # Projects of one name can lie in several places: only the id tells them apart.
        if item.name == name and item.project_id == project.id:
            return read_datasource(client, item.id, project=project, name=name)
    return None


def reread(client: TableauClient, datasource: FoundDatasource) -> FoundDatasource | None:
    """Return the datasource as it is now; None if it was deleted."""
    return read_datasource(client, datasource.id, project=datasource.project, name=datasource.name)


def read_datasource(
    client: TableauClient, datasource_id: str, *, project: FoundProject, name: str
) -> FoundDatasource | None:
    """Read everything about one datasource; None if there is none with that id. The name is for messages.

    This takes several calls. A publish or a refresh between them would mix two versions, so the calls are repeated until
    the datasource's entry is the same before and after them.
    """
    doing = f"read datasource {name!r} in project {project.path!r}"

    def read() -> Any:
        return client.call(lambda server: server.datasources.get_by_id(datasource_id), doing=doing)

    try:
        item = read()
        for _ in range(_MOST_READS):
            connections = client.call(partial(_connections, item=item), doing=f"{doing} and its connections")
            history = _history(client, item, doing)
            before, item = item, read()
            if (before.updated_at, before.size) == (item.updated_at, item.size):
                break
    except RefusedError as error:
        if error.code == "404004":
            return None
        raise
    return FoundDatasource(
        id=item.id,
        name=item.name,
        project=project,
        owner_id=item.owner_id or "",
        tags=frozenset(item.tags or ()),
        description=item.description or "",
        certified=bool(item.certified),
        certification_note=item.certification_note or "",
        updated_at=item.updated_at,
        has_extracts=item.has_extracts,
        size_mb=item.size,
        connections=connections,
        webpage_url=item.webpage_url or "",
        history=history,
        read_at=client.retry.clock(),
    )


def settled(
    client: TableauClient, datasource: FoundDatasource, *, earlier: FoundDatasource | None = None
) -> FoundDatasource:
    """Read the datasource again when every further change will show in its version.

    Times have whole seconds: a second change within one second would not show. So wait until that second has passed,
    counted from now, or from `earlier`, a previous reading that shows the same version.
    """
    since = client.retry.clock()
    if earlier is not None and server_version(earlier) == server_version(datasource):
        since = earlier.read_at
    left = _SETTLE_SECONDS - (client.retry.clock() - since)
    if left > 0:
        client.retry.sleep(left)
    now = reread(client, datasource)
    if now is None:
        raise DatasourceError(
            f"{datasource.shown} on {client.where} was deleted. Publish it again, or name another one."
        )
    return now


def moved_on(client: TableauClient, datasource: FoundDatasource) -> FoundDatasource:
    """Read the datasource after a change of ours that adds no revision, such as a PATCH.

    The new version shows at once, unless the change came in the same second as the last one, or the server shows it late.
    """
    now = reread(client, datasource)
    if now is not None and now.revision is not None and server_version(now) != server_version(datasource):
        return now
    return settled(client, datasource)


def _connections(server: Any, item: Any) -> tuple[Connection, ...]:
    server.datasources.populate_connections(item)
    return tuple(
        Connection(
            id=connection.id or "",
            type=connection.connection_type or "",
            server_address=connection.server_address or "",
            server_port=connection.server_port or "",
            username=connection.username or "",
            embed_password=bool(connection.embed_password),
            authentication=connection.auth_type or "",
        )
        for connection in item.connections
    )


def _history(client: TableauClient, item: Any, doing: str) -> tuple[Revision, ...] | None:
    """All revisions; None where the site keeps none or does not show them to this user."""
    revisions: list[Revision] = []
    try:
        while True:
            options = TSC.RequestOptions(pagenumber=1 + len(revisions) // _PAGE, pagesize=_PAGE)
            read = partial(_revisions, datasource_id=item.id, options=options)
            page = client.call(read, doing=f"{doing} and its revisions")
            revisions.extend(page)
            if len(page) < _PAGE:
                return tuple(revisions)
    except RefusedError:
        return tuple(revisions) or None


def _revisions(server: Any, *, datasource_id: str, options: Any) -> list[Revision]:
    """Read one page of revisions. The client's own call reads the first page only, and drops the size."""
    endpoint = server.datasources
    answer = endpoint.get_request(f"{endpoint.baseurl}/{datasource_id}/revisions", options)
    return [
        _revision(element, server.namespace)
        for element in fromstring(answer.content).findall(".//t:revision", namespaces=server.namespace)
        if element.get("revisionNumber", "").isdigit()
    ]


def _revision(element: Any, namespace: dict[str, str]) -> Revision:
    publisher = element.find("t:publisher", namespaces=namespace)
    size = element.get("sizeInBytes", "")
    return Revision(
        number=int(element.get("revisionNumber")),
        publisher_id=publisher.get("id") if publisher is not None else None,
        published_at=parse_datetime(element.get("publishedAt")),
        size_bytes=int(size) if size.isdigit() else None,
    )


def _everything(client: TableauClient, endpoint: str, doing: str, equal: dict[str, str] | None = None) -> Sequence[Any]:
    """Return all items of a list; the server filters them where its filters can express the values."""
    options = TSC.RequestOptions(pagesize=_PAGE)
    for attribute, value in (equal or {}).items():
        if not NOT_IN_FILTERS & set(value):
            options.filter.add(TSC.Filter(attribute, TSC.RequestOptions.Operator.Equals, value))
    return client.call(lambda server: list(TSC.Pager(getattr(server, endpoint), options)), doing=doing)


def _close(name: str, *candidates: Iterable[str]) -> str:
    """Return ` Similar names: …`, or an empty text."""
    lowered: dict[str, str] = {}
    for names in candidates:
        for candidate in names:
            lowered.setdefault(candidate.casefold(), candidate)
    close = difflib.get_close_matches(name.casefold(), list(lowered), n=3, cutoff=0.6)
    return f" Similar names: {', '.join(repr(lowered[candidate]) for candidate in close)}." if close else ""


@dataclass(frozen=True)
class FoundProject:
    """A project; its path names it among projects of the same name."""

    id: str
    name: str
    path: str
    # Whether this user may publish there; None where the server does not say.
    writeable: bool | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ListedExtract:
    """A datasource with an extract as the list shows it."""

    id: str
    name: str
    project_id: str
    size_mb: int | None


SignInMethod = Literal["password", "key_pair", "oauth"]


@dataclass(frozen=True)
class Connection:
    """One live connection of a datasource, without its password: the server never returns that."""

    id: str
    type: str
    server_address: str
    server_port: str
    username: str
    embed_password: bool
    # As the server writes it, such as `auth-keypair`; older servers do not show it.
    authentication: str = ""

    @property
    def method(self) -> SignInMethod:
        """How it signs in; what the server does not show, or calls by one of many names, is a password."""
        kind = self.authentication.casefold()
        if "keypair" in kind:
            return "key_pair"
        return "oauth" if "oauth" in kind else "password"


@dataclass(frozen=True)
class Revision:
    """One publish of a datasource. Refreshes by the server are no revisions."""

    number: int
    publisher_id: str | None
    published_at: datetime | None
    size_bytes: int | None


@dataclass(frozen=True)
class ServerVersion:
    """Which content the server holds, as far as its REST API tells.

    A publish adds a revision and moves `updated_at`; a refresh moves `updated_at` and nearly always the size. Changed
    descriptions and owners move `updated_at` too, so two different versions can hold the same rows. Two equal ones
    hold the same content unless two refreshes fell into one second: see `settled`; or the server does not show refreshes
    and changes of data, as some users report: then only its jobs do, see `changes_since`.
    """

    datasource_id: str
    revision: int | None
    updated_at: datetime | None
    size_bytes: int | None

    def __str__(self) -> str:
        moment = self.updated_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if self.updated_at else "-"
        return f"{self.datasource_id} {_or_dash(self.revision)} {moment} {_or_dash(self.size_bytes)}"

    @staticmethod
    def parse(text: str) -> ServerVersion:
        """The version that `str` wrote; ValueError for anything else."""
        datasource_id, revision, moment, size = text.split(" ")
        return ServerVersion(
            datasource_id,
            None if revision == "-" else int(revision),
            None if moment == "-" else datetime.strptime(moment, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC),
            None if size == "-" else int(size),
        )


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def shown_place(name: str, project: str, where: str) -> str:
    """A datasource and where it lives, as messages name it."""
    return f"datasource {name!r} in project {project!r} on {where}"


@dataclass(frozen=True)
class FoundDatasource:
    """A published datasource at one moment."""

    id: str
    name: str
    project: FoundProject
    owner_id: str
    tags: frozenset[str]
    description: str
    certified: bool
    certification_note: str
    updated_at: datetime | None
    has_extracts: bool | None
    size_mb: int | None
    connections: tuple[Connection, ...]
    webpage_url: str
    # None where the server keeps or shows no history.
    history: tuple[Revision, ...] | None = field(repr=False)
    # When it was read, by the client's own clock.
    read_at: float = field(default=0.0, repr=False, compare=False)

    @property
    def shown(self) -> str:
        """The datasource as messages name it."""
        return f"datasource {self.name!r} in project {self.project.path!r}"

    @property
    def current(self) -> Revision | None:
        return max(self.history, key=lambda revision: revision.number) if self.history else None

    @property
    def revision(self) -> int | None:
        return self.current.number if self.current else None


def server_version(datasource: FoundDatasource) -> ServerVersion:
    """Return a value that changes with every publish and, on most servers, every refresh, whoever started it."""
    size = datasource.current.size_bytes if datasource.current else None
    return ServerVersion(
        datasource.id, datasource.revision, datasource.updated_at, datasource.size_mb if size is None else size
    )
