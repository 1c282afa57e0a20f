"""Publish a file: as it came when it is a package or a document, wrapped into a package when it is a bare extract."""

from __future__ import annotations

import zipfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.archive import BadPackageError
from tir_dagster.sandbox.tableau.content import Credentials, Publication, store_publication
from tir_dagster.sandbox.tableau.document import Document
from tir_dagster.sandbox.tableau.hyper_model import EXTRACT_MEMBER, NoStarError, document_of_hyper_file
from tir_dagster.sandbox.tableau.wire import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tir_dagster.sandbox.tableau.people import Session
    from tir_dagster.sandbox.tableau.server import Server

KINDS = ("tdsx", "tds", "hyper")
# The REST version of Tableau 2021.4, the first that takes several tables in a .hyper file.
RELATES_SINCE = (3, 14)


@dataclass(frozen=True)
class StagedPublish:
    """A publish whose file lies among the incoming ones."""

    publication: Publication
    file: str
    kind: str

    def as_json(self) -> dict[str, Any]:
        return {"publication": asdict(self.publication), "file": self.file, "kind": self.kind}

    @staticmethod
    def from_json(value: dict[str, Any]) -> StagedPublish:
        publication = dict(value["publication"])
        if publication["credentials"] is not None:
            publication["credentials"] = Credentials(**publication["credentials"])
        return StagedPublish(Publication(**publication), value["file"], value["kind"])


def publish_staged(
    server: Server,
    session: Session,
    staged: StagedPublish,
    also: Callable[[Any, str], bool] | None = None,
) -> str:
    """Check the file and store it; the datasource's id. `also` takes part in the transaction and may veto it."""
    path = server.root / "incoming" / staged.file
    try:
        document, path, suffix = _checked(server, staged, path)
        return store_publication(
            server, session, staged.publication, path=path, suffix=suffix, document=document, also=also
        )
    except BadPackageError as error:
        # Seen of real servers: this code beside the words on fact tables.
        code = 400000 if isinstance(error, NoStarError) else 400011
        raise ApiError(code, f"There was a problem publishing the file '{staged.publication.name}'. {error}") from error
    finally:
        path.unlink(missing_ok=True)
        (server.root / "incoming" / staged.file).unlink(missing_ok=True)


def _checked(server: Server, staged: StagedPublish, path: Path) -> tuple[Document, Path, str]:
    if not path.exists():
        raise BadPackageError("The uploaded file is gone.")
    if staged.kind == "tdsx":
        return server.checker.package(path), path, ".tdsx"
    if staged.kind == "tds":
        return server.checker.plain_document(path), path, ".tds"
    tables, keys = server.checker.hyper_file(path)
    if len(tables) > 1 and server.settings.current.version < RELATES_SINCE:
        raise BadPackageError("The extract must hold exactly one table.")
    text = document_of_hyper_file(staged.publication.name, tables, keys)
    wrapped = path.with_suffix(".tdsx")
    with zipfile.ZipFile(wrapped, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as package:
        package.writestr("datasource.tds", text)
        package.write(path, EXTRACT_MEMBER)
    return Document(text), wrapped, ".tdsx"
