"""Publish a file: as it came when it is a package or a document, wrapped into a package when it is a bare extract."""

from __future__ import annotations

import zipfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.archive import BadPackageError
from tir_dagster.sandbox.tableau.content import Credentials, Publication, store_publication
from tir_dagster.sandbox.tableau.document import Document
from tir_dagster.sandbox.tableau.wire import ApiError
from tir_dagster.sandbox.tableau.xmltree import child, new_tree, serialise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tir_dagster.sandbox.tableau.people import Session
    from tir_dagster.sandbox.tableau.server import Server

KINDS = ("tdsx", "tds", "hyper")


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
        raise ApiError(
            400011, f"There was a problem publishing the file '{staged.publication.name}'. {error}"
        ) from error
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
    tables = server.checker.hyper_file(path)
    text = _document_of_extract(staged.publication.name, tables)
    wrapped = path.with_suffix(".tdsx")
    with zipfile.ZipFile(wrapped, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as package:
        package.writestr("datasource.tds", text)
        package.write(path, "Data/Extracts/datasource.hyper")
    return Document(text), wrapped, ".tdsx"


def _document_of_extract(name: str, tables: list[tuple[str, str, list[str]]]) -> bytes:
    """The document a server makes up for a .hyper file: a connection to the file and nothing to refresh it from."""
    root = new_tree("datasource")
    for key, value in (("formatted-name", name), ("inline", "true"), ("version", "18.1")):
        root.set(key, value)
    federated = child(root, "connection", {"class": "federated"})
    named = child(child(federated, "named-connections"), "named-connection", caption=name, name="hyper.0")
    child(
        named,
        "connection",
        {
            "authentication": "auth-none",
            "class": "hyper",
            "dbname": "Data/Extracts/datasource.hyper",
            "default-settings": "yes",
            "server": "",
            "username": "tableau_internal_user",
        },
    )
    for schema, table, _ in tables:
        child(federated, "relation", connection="hyper.0", name=table, table=f"[{schema}].[{table}]", type="table")
    records = child(federated, "metadata-records")
    for _, table, columns in tables:
        for column in columns:
            record = child(records, "metadata-record", {"class": "column"})
            for tag, value in (
                ("remote-name", column),
                ("local-name", f"[{column}]"),
                ("parent-name", f"[{table}]"),
                ("remote-alias", column),
            ):
                child(record, tag).text = value
    return serialise(root, pretty=True)
