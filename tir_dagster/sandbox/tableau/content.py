"""Projects, datasources, connections and revisions as the store holds them."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.sign_in_methods import method_of, saved_secret
from tir_dagster.sandbox.tableau.store import Row, insert, update
from tir_dagster.sandbox.tableau.webhooks import CREATED, UPDATED, announce
from tir_dagster.sandbox.tableau.wire import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tir_dagster.sandbox.tableau.document import Document, LiveConnection
    from tir_dagster.sandbox.tableau.people import Session
    from tir_dagster.sandbox.tableau.server import Server


@dataclass(frozen=True)
class Credentials:
    """The credentials of a publish, for the datasource's first connection.

    A publish does not say for which one they are, and which of several a real server takes is not documented: the
    others have none until the connections endpoint sets them.
    """

    username: str
    password: str = field(repr=False)
    embed: bool
    # The publisher's saved OAuth credential of that user name.
    oauth: bool = False


@dataclass(frozen=True)
class Publication:
    """A publish as asked for, apart from its file."""

    name: str
    project_id: str
    overwrite: bool
    description: str | None = None
    certified: bool | None = None
    certification_note: str | None = None
    credentials: Credentials | None = None


def project(server: Server, session: Session, project_id: str) -> Row:
    row = server.store.row("SELECT * FROM projects WHERE id = ? AND site_id = ?", project_id, session.site_id)
    if row is None:
        raise ApiError(404005, f"Project {project_id!r} could not be found.")
    return row


def datasource(server: Server, session: Session, datasource_id: str) -> Row:
    row = server.store.row("SELECT * FROM datasources WHERE id = ? AND site_id = ?", datasource_id, session.site_id)
    if row is None:
        raise ApiError(404004, f"Datasource {datasource_id!r} could not be found.")
    return row


def create_project(server: Server, session: Session, attributes: dict[str, str]) -> Row:
    name, parent = attributes.get("name", "").strip(), attributes.get("parentProjectId")
    if not name:
        raise ApiError(400000, "A project needs a name.")
    if parent:
        project(server, session, parent)
    project_id, now = str(uuid.uuid4()), time.time()
    with server.store.transaction() as db:
        if db.execute(
            "SELECT 1 FROM projects WHERE site_id = ? AND coalesce(parent_id, '') = ? AND name = ?",
            (session.site_id, parent or "", name),
        ).fetchone():
            raise ApiError(409006, f"A project named {name!r} already exists there.")
        insert(
            db,
            "projects",
            id=project_id,
            site_id=session.site_id,
            parent_id=parent or None,
            name=name,
            description=attributes.get("description"),
            content_permissions=attributes.get("contentPermissions", "ManagedByOwner"),
            owner_id=session.user_id,
            created=now,
            updated=now,
        )
    return project(server, session, project_id)


def check_publication(server: Server, session: Session, publication: Publication) -> Row | None:
    """The datasource that would be overwritten, if any; refuses what cannot be published at all."""
    project(server, session, publication.project_id)
    existing = server.store.row(
        "SELECT * FROM datasources WHERE project_id = ? AND name = ?", publication.project_id, publication.name
    )
    if existing is not None and not publication.overwrite:
        raise ApiError(
            403007,
            f"A datasource named {publication.name!r} already exists. Use overwrite to replace it.",
        )
    return existing


def check_quota(server: Server, site_id: str, more: int) -> None:
    """Refuse what would not fit into the site's storage; the code a real server answers is not documented."""
    limit = server.settings.current.storage_quota_mb
    used = server.store.rows(
        "SELECT coalesce(sum(r.size), 0) AS bytes FROM revisions r JOIN datasources d ON d.id = r.datasource_id"
        " WHERE d.site_id = ?",
        site_id,
    )[0]["bytes"]
    if limit and used + more > limit * 1024 * 1024:
        raise ApiError(403004, f"The site's storage quota of {limit} MB is used up.")


def store_publication(
    server: Server,
    session: Session,
    publication: Publication,
    *,
    path: Path,
    suffix: str,
    document: Document,
    also: Callable[[Any, str], bool] | None = None,
) -> str:
    """Keep the file, then name it in one transaction; the id of the datasource.

    Overwriting keeps the id and resets owner, tags and embedded credentials. The description is taken when one is
    given and kept otherwise, and certification stays: neither was measured against a real server.
    """
    size = path.stat().st_size
    check_quota(server, session.site_id, size)
    file = server.keep_package(path, suffix)
    dropped: list[str] = []
    try:
        with server.store.transaction() as db:
            existing = check_publication(server, session, publication)
            datasource_id: str = existing["id"] if existing is not None else str(uuid.uuid4())
            revision = existing["revision"] + 1 if existing is not None else 1
            if existing is None:
                _insert_datasource(db, session, publication, datasource_id, now=server.now())
            _update_datasource(
                db, session, publication, document, datasource_id=datasource_id, revision=revision, now=server.now()
            )
            insert(
                db,
                "revisions",
                datasource_id=datasource_id,
                number=revision,
                file=file,
                size=size,
                publisher_id=session.user_id,
                published=server.now(),
            )
            _replace_connections(db, session, datasource_id, document, publication)
            if existing is not None and server.settings.current.overwrite_loses_tasks:
                db.execute("DELETE FROM tasks WHERE datasource_id = ?", (datasource_id,))
            dropped = _settle_revision(server, db, datasource_id, revision - 1)
            kept = max(1, server.settings.current.revisions_kept)
            dropped += _forget_old_revisions(db, datasource_id, revision - kept)
            announce(server, db, CREATED if existing is None else UPDATED, datasource_id)
            if also is not None and not also(db, datasource_id):
                raise ApiError(409006, "The publish was cancelled.")
    except BaseException:
        server.drop_packages([file])
        raise
    server.drop_packages(dropped)
    return datasource_id


def _insert_datasource(db: Any, session: Session, publication: Publication, datasource_id: str, *, now: float) -> None:
    slug = re.sub(r"[^A-Za-z0-9_-]", "", publication.name) or "datasource"
    taken = db.execute(
        "SELECT COUNT(*) FROM datasources WHERE site_id = ? AND (content_url = ? OR content_url LIKE ? || '\\_%' ESCAPE '\\')",
        (session.site_id, slug, slug),
    ).fetchone()[0]
    insert(
        db,
        "datasources",
        id=datasource_id,
        site_id=session.site_id,
        project_id=publication.project_id,
        name=publication.name,
        content_url=f"{slug}_{int(now * 1000)}" if taken else slug,
        kind="",
        owner_id=session.user_id,
        tags="[]",
        certified=0,
        has_extracts=0,
        revision=0,
        generation=0,
        created=now,
        updated=now,
    )


def _update_datasource(
    db: Any,
    session: Session,
    publication: Publication,
    document: Document,
    *,
    datasource_id: str,
    revision: int,
    now: float,
) -> None:
    connections = document.connections()
    changes: dict[str, Any] = {
        "kind": connections[0].kind if connections else "",
        "owner_id": session.user_id,
        "tags": "[]",
        "has_extracts": int(document.has_extract),
        "revision": revision,
        "updated": now,
    }
    if publication.description is not None:
        changes["description"] = publication.description
    if publication.certified is not None:
        changes["certified"] = int(publication.certified)
    if publication.certification_note is not None:
        changes["certification_note"] = publication.certification_note
    update(db, "datasources", datasource_id, **changes)
    db.execute("UPDATE datasources SET generation = generation + 1 WHERE id = ?", (datasource_id,))


def _replace_connections(
    db: Any, session: Session, datasource_id: str, document: Document, publication: Publication
) -> None:
    """New connections with new ids, which sign in as the document says: nothing that was set on the old ones survives."""
    db.execute("DELETE FROM connections WHERE datasource_id = ?", (datasource_id,))
    for position, live in enumerate(document.connections()):
        given = publication.credentials if position == 0 else None
        secret = None if given is None else _embedded_secret(db, session, live, given)
        insert(
            db,
            "connections",
            id=str(uuid.uuid4()),
            datasource_id=datasource_id,
            position=position,
            name=live.name,
            kind=live.kind,
            server=live.server,
            port=live.port,
            dbname=live.dbname,
            username=given.username if given is not None else live.username,
            password=secret,
            embed=int(secret is not None),
            authentication=live.authentication,
        )


def _embedded_secret(db: Any, session: Session, live: LiveConnection, given: Credentials) -> str | None:
    """What a publish embeds; credentials of another kind than the document's are dropped in silence."""
    if not given.embed or method_of(live.authentication) != ("oauth" if given.oauth else "password"):
        return None
    if not given.oauth:
        return given.password
    secret = saved_secret(db, session.user_id, "oauth", live.server, given.username)
    if secret is None:
        # Which code a real server answers here is not documented.
        raise ApiError(400011, f"User {session.user_name!r} has no saved OAuth credential for {given.username!r}.")
    return secret


def _settle_revision(server: Server, db: Any, datasource_id: str, number: int) -> list[str]:
    """A revision that is the current one no longer holds what was published, without what refreshes made of it."""
    where = (datasource_id, number)
    row = db.execute(
        "SELECT file, published_file FROM revisions WHERE datasource_id = ? AND number = ?"
        " AND published_file IS NOT NULL",
        where,
    ).fetchone()
    if row is None:
        return []
    size = server.package(row["published_file"]).stat().st_size
    db.execute(
        "UPDATE revisions SET file = published_file, published_file = NULL, size = ?"
        " WHERE datasource_id = ? AND number = ?",
        (size, *where),
    )
    return [row["file"]]


def _forget_old_revisions(db: Any, datasource_id: str, last: int) -> list[str]:
    where = "WHERE datasource_id = ? AND number <= ?"
    old = db.execute(f"SELECT file FROM revisions {where}", (datasource_id, last)).fetchall()
    db.execute(f"DELETE FROM revisions {where}", (datasource_id, last))
    return [row["file"] for row in old]


def delete_revision(server: Server, source: Row, number: int) -> None:
    """Take away a revision's content; it stays in the list. What a real server says to the current one is not known."""
    with server.store.transaction() as db:
        row = revision(db, source["id"], number)
        if number == current_revision(server, source["id"])["number"]:
            raise ApiError(400000, f"Revision {number} is the current one and cannot be removed.")
        db.execute(
            "UPDATE revisions SET deleted = 1, size = 0, file = '' WHERE datasource_id = ? AND number = ?",
            (source["id"], number),
        )
    server.drop_packages([row["file"]])


def revision(db: Any, datasource_id: str, number: int) -> Row:
    """A revision that can still be downloaded."""
    row: Row | None = db.execute(
        "SELECT * FROM revisions WHERE datasource_id = ? AND number = ? AND NOT deleted", (datasource_id, number)
    ).fetchone()
    if row is None:
        raise ApiError(404004, f"Revision {number} of the datasource could not be found.")
    return row


def current_revision(server: Server, datasource_id: str) -> Row:
    row = server.store.row(
        "SELECT r.*, d.generation, d.name, d.site_id FROM revisions r JOIN datasources d ON d.id = r.datasource_id"
        " AND d.revision = r.number WHERE d.id = ?",
        datasource_id,
    )
    if row is None:
        raise ApiError(404004, f"Datasource {datasource_id!r} could not be found.")
    return row


@contextlib.contextmanager
def open_current(server: Server, datasource_id: str) -> Iterator[tuple[Row, IO[bytes]]]:
    """The current revision and its file, opened under the lock: whoever replaces it removes the file."""
    with server.store.transaction():
        row = current_revision(server, datasource_id)
        stream = server.package(row["file"]).open("rb")
    with stream:
        yield row, stream


def replace_extract(
    server: Server, datasource_id: str, *, generation: int, path: Path, also: Callable[[Any], bool]
) -> bool:
    """Put a refreshed package in the place of the current revision's; False when somebody published meanwhile.

    `also` writes down the job's end in the same transaction, or vetoes. A refresh is no revision of its own, as on a
    real server: going back a revision brings back what was published.
    """
    size = path.stat().st_size
    file = server.keep_package(path, ".tdsx")
    old: list[str] = []
    with server.store.transaction() as db:
        row = db.execute("SELECT revision, generation FROM datasources WHERE id = ?", (datasource_id,)).fetchone()
        fits = row is not None and row["generation"] == generation and also(db)
        if fits:
            old = _swap_file(db, (datasource_id, row["revision"]), file, size)
            moved = {"updated": server.now()} if server.settings.current.changes_show else {}
            update(db, "datasources", datasource_id, generation=generation + 1, **moved)
    server.drop_packages(old if fits else [file])
    return fits


def _swap_file(db: Any, where: tuple[str, int], file: str, size: int) -> list[str]:
    """Give the revision new content, and keep what was published; the files that nobody needs any more."""
    row = db.execute(
        "SELECT file, published_file FROM revisions WHERE datasource_id = ? AND number = ?", where
    ).fetchone()
    db.execute(
        "UPDATE revisions SET file = ?, size = ?, published_file = coalesce(published_file, file)"
        " WHERE datasource_id = ? AND number = ?",
        (file, size, *where),
    )
    return [] if row["published_file"] is None else [row["file"]]
