"""Move packages: download a datasource's, publish one without ever overwriting what somebody else put there."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.credentials import ConnectionCredential
from tir_dagster.tableau.fetching import Fetching
from tir_dagster.tableau.found import FoundDatasource, FoundProject, ServerVersion
from tir_dagster.tableau.keep import Seen, nothing
from tir_dagster.tableau.progress import Progress
from tir_dagster.tableau.publishing import Check, Publishing, always
from tir_dagster.tableau.trouble import RefusedError
from tir_dagster.tableau.upload import Parcel

_KINDS = (".tdsx", ".hyper")
# A connection that brings so much and then breaks is slow, not broken: large files take many of them.
_GOOD_PART = 64 * 1024 * 1024
# A document says what it is right after its declaration and a comment or two.
_BEGINNING = 4_000


class NoExtractError(DatasourceError):
    """What the server holds is no extract that can be refreshed by key, or compared with ours."""


def _no_package(found: FoundDatasource, where: str, file: Path) -> DatasourceError:
    """A document is the datasource's own; anything else was cut, or is the page of a proxy, and tells nothing of it."""
    with file.open("rb") as opened:
        is_document = b"<datasource" in opened.read(_BEGINNING)
    if is_document:
        return NoExtractError(
            f"{found.shown} on {where} is not a package with an extract but a plain document: it reads its source live. "
            "Publish it with an extract first."
        )
    return DatasourceError(
        f"{found.shown} on {where} did not come as a package. Check that no proxy answers in the server's place, then run again."
    )


def download(
    client: TableauClient,
    found: FoundDatasource,
    target: Path,
    *,
    revision: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """The datasource's package at exactly this path, whole or not at all; the path again.

    `revision` is one of its history; without it, and for the newest one, which servers do not give by its number, what
    the datasource shows now.
    """
    older = revision is not None and revision != found.revision
    what = f"revisions/{revision}/content" if older else "content"
    doing = f"download revision {revision} of {found.shown}" if older else f"download {found.shown}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _beside(target) as (out, part):
            _fetch(client, Fetching(found, what, out, part.parent, client.timeouts, progress), doing)
            if target.suffix.lower() == ".tdsx" and not zipfile.is_zipfile(part):
                raise _no_package(found, client.where, part)
    except OSError as error:
        raise DatasourceError(
            f"Could not {doing} to {target}: {error.strerror or error}. Free some space or choose another folder."
        ) from error
    return target


def _fetch(client: TableauClient, fetching: Fetching, doing: str) -> None:
    """Until it is all there; the tries begin anew where a good part came since, of a file that can be continued."""
    while True:
        before = fetching.came
        try:
            client.call(fetching, doing=doing)
        except RefusedError:
            raise
        except DatasourceError:
            if not fetching.came.goes_on_from(before, _GOOD_PART):
                raise
        else:
            return


@contextmanager
def _beside(target: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """A file next to the target that takes its place at the end, or leaves no trace."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            yield out, part
            out.flush()
            os.fsync(out.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def publish(
    client: TableauClient,
    package: Path,
    *,
    project: FoundProject,
    name: str,
    overwrite: bool = False,
    expected: ServerVersion | None = None,
    connections: Sequence[ConnectionCredential] = (),
    as_job: bool = False,
    job_timeout: float = 3600.0,
    progress: Progress | None = None,
    check: Check = always,
    seen: Seen = nothing,
    inferred: Check = always,
) -> FoundDatasource:
    """Publish a .tdsx or .hyper file; the datasource as it is afterwards.

    With `expected`, a datasource that is no longer that version is left alone: ForeignPublishError. Without it,
    `overwrite` replaces whatever is there at the start. A publish whose answer is lost is looked for on the server,
    and sent again only when it is not there: `inferred` is told, for rows that nobody answered for should be compared.
    `check` may still say no, right before every such request; `seen` is told what is about to be overwritten.
    """
    if package.suffix not in _KINDS or not package.is_file():
        raise DatasourceError(
            f"Could not publish {package} as datasource {name!r}: it must be a {' or '.join(_KINDS)} file that exists."
        )
    parcel = Parcel(package, project.id, name, overwrite, tuple(connections), as_job)
    publishing = Publishing(
        client,
        parcel,
        project,
        job_timeout=job_timeout,
        progress=progress,
        check=check,
        seen=seen,
        inferred=inferred,
    )
    return publishing.run(expected)
