"""What the server says about a datasource: values that are read once and compared later."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime


@dataclass(frozen=True)
class FoundProject:
    """A project; its path names it among projects of the same name."""

    id: str
    name: str
    path: str


@dataclass(frozen=True)
class Connection:
    """One live connection of a datasource, without its password: nobody ever gets that back."""

    id: str
    type: str
    server_address: str
    server_port: str
    username: str
    embed_password: bool


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
    hold the same content unless two refreshes fell into one second: see `settled`.
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


def server_version(found: FoundDatasource) -> ServerVersion:
    """A value that changes with every publish and every refresh, by anybody."""
    size = found.current.size_bytes if found.current else None
    return ServerVersion(found.id, found.revision, found.updated_at, found.size_mb if size is None else size)
