"""Publish over a datasource that people use, with all that it keeps; and put a kept package back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tir_dagster.hyper.package.package import RefreshChange, greatest_increment, packed, read_package
from tir_dagster.refresh.context import ServerLook
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, server_version
from tir_dagster.tableau.publishing import Check, always
from tir_dagster.tableau.settings import ConnectionCredential, Restored, is_remembered, put_back_remembered, remember
from tir_dagster.tableau.tasks import look_beside
from tir_dagster.tableau.transfer import publish
from tir_dagster.tableau.upload import tell_progress
from tir_dagster.virtual_file import VirtualFile


@dataclass(frozen=True)
class Place:
    """The datasource as it was looked at, and all that publishing over it needs."""

    spec: ExtractSpec
    look: ServerLook
    credentials: Sequence[ConnectionCredential]
    # For what is sent, and for what is written down until it is put back.
    folder: Path
    home: Path
    # Asked right before every request that publishes.
    check: Check = always
    log: Callable[[str], None] = lambda _: None


def put_back(client: TableauClient, place: Place, found: FoundDatasource, *, shell: Path, hyper: Path) -> None:
    """Publish the kept package over what we published ourselves, as it was when that was found out."""
    package = read_package(shell)
    value = greatest_increment(package, hyper)
    # Another one where the server showed later rows than ours: it must go on from the rows that come back.
    refresh = None if value == package.last_increment else RefreshChange(increment_value=value)
    publish_over(client, packed(package, f"{place.spec.name}.tdsx", hyper=hyper, refresh=refresh), place, found)


def publish_over(client: TableauClient, package: VirtualFile, place: Place, found: FoundDatasource) -> Restored:
    """Publish over exactly this, and put back what overwriting loses: what an earlier publish of this run wrote down, else what is there."""
    beside = None if is_remembered(place.home) else look_beside(client, found)
    seen = remember(found, place.home, beside)
    published = publish(
        client,
        package,
        project=place.look.project,
        name=place.spec.datasource.name,
        overwrite=True,
        expected=server_version(found),
        connections=place.credentials,
        progress=tell_progress(place.log, "uploading", clock=client.retry.clock),
        check=place.check,
        seen=seen,
    )
    return put_back_remembered(client, published, place.home, place.credentials)
