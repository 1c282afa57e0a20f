"""The delivery `republish`: the whole extract is published, into a package kept to the letter or as a new datasource."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tir_dagster.durable import need_space
from tir_dagster.errors import DatasourceError, ExtractError, MachineError
from tir_dagster.hyper.hyperfile import describe
from tir_dagster.hyper.package.archive import open_archive
from tir_dagster.hyper.package.package import extract_hyper, read_package, refresh_change, write_package
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import (
    Connection,
    FoundDatasource,
    FoundProject,
    ServerVersion,
    find_project,
    look_for_datasource,
    reread,
    server_version,
    settled,
)
from tir_dagster.tableau.publishing import Check, ForeignPublishError, always, check_undisturbed
from tir_dagster.tableau.settings import (
    ConnectionCredential,
    Restored,
    check_credentials,
    is_remembered,
    nothing,
    put_back_remembered,
    remember,
    remembered_connections,
)
from tir_dagster.tableau.tasks import look_beside
from tir_dagster.tableau.transfer import NoExtractError, download, publish
from tir_dagster.tableau.upload import tell_progress

Log = Callable[[str], None]


@dataclass(frozen=True)
class ServerLook:
    """What the server holds now under the extract's name; `found` is None where there is nothing yet."""

    project: FoundProject
    found: FoundDatasource | None

    @property
    def version(self) -> ServerVersion | None:
        return server_version(self.found) if self.found else None

    @property
    def version_text(self) -> str | None:
        return str(self.version) if self.found else None


@dataclass(frozen=True)
class Delivered:
    """The datasource after a publish, warnings about what could not be put back, and whether its rows must be compared to be sure."""

    found: FoundDatasource
    warnings: tuple[str, ...]
    doubtful: bool = False


def look_at_server(client: TableauClient, spec: ExtractSpec) -> ServerLook:
    project = find_project(client, spec.datasource.project)
    return ServerLook(project, look_for_datasource(client, project=project, name=spec.datasource.name))


def credentials_for(
    spec: ExtractSpec, found: FoundDatasource | None, env: Mapping[str, str]
) -> list[ConnectionCredential]:
    """The credentials the spec names, for every connection that has embedded ones; refused here if they are missing."""
    if found is None:
        return []
    named = _named(spec, found.connections, env)
    check_credentials(found, named)
    return named


def _named(spec: ExtractSpec, connections: Sequence[Connection], env: Mapping[str, str]) -> list[ConnectionCredential]:
    embedded = [connection for connection in connections if connection.embed_password]
    given = spec.datasource.credentials
    if given is None or not embedded:
        return []
    _refuse_many(spec, {one.server_address.casefold(): one for one in embedded}.values())
    username = given.username or _variable(spec, given.username_env, env)
    password = _variable(spec, given.password_env, env)
    return [ConnectionCredential(one.server_address, username, password, one.server_port) for one in embedded]


def _refuse_many(spec: ExtractSpec, places: Collection[Connection]) -> None:
    """The spec names the credentials of one server: another one must never get them."""
    if len(places) > 1:
        shown = "; ".join(sorted(f"{one.type} {one.server_address}" for one in places))
        raise DatasourceError(
            f"{spec.name}: datasource {spec.datasource.name!r} in project {spec.datasource.project!r} has passwords embedded for"
            f" {len(places)} servers ({shown}), and the spec names the credentials of one. Nothing was touched. Remove the connections"
            " that the extract does not need in Tableau, or choose the delivery `trigger`."
        )


def _variable(spec: ExtractSpec, name: str | None, env: Mapping[str, str]) -> str:
    value = env.get(name or "")
    if not value:
        raise DatasourceError(
            f"{spec.name}: the environment variable {name}, which the spec names for the datasource's credentials, is not set. "
            "Set it before the refresh: publishing without it would leave the datasource without its password."
        )
    return value


def fetch_shell(
    client: TableauClient, found: FoundDatasource, folder: Path, *, log: Log = lambda _: None
) -> tuple[Path, Path]:
    """Download the package and take it apart: the shell (everything but the rows), and the Hyper file."""
    # The package, and the Hyper file out of it.
    need_space(folder, 2 * (found.size_mb or 0) * 1_000_000)
    target, progress = folder / "download.tdsx", tell_progress(log, "downloading", clock=client.retry.clock)
    package = read_package(download(client, found, target, progress=progress))
    hyper = extract_hyper(package, folder / "download.hyper")
    try:
        describe(hyper)
    except MachineError:
        raise
    except ExtractError as error:
        raise NoExtractError(f"The {found.shown} cannot be refreshed by key: {error}") from error
    shell = folder / "shell.tdsx"
    with open_archive(package.path) as archive:
        assert package.hyper_member is not None, "extract_hyper refused it otherwise"
        archive.rewrite(shell, {package.hyper_member: b""})
    package.path.unlink()
    return shell, hyper


def deliver(
    client: TableauClient,
    spec: ExtractSpec,
    look: ServerLook,
    *,
    hyper: Path,
    shell: Path | None,
    rows: int,
    credentials: Sequence[ConnectionCredential],
    folder: Path,
    home: Path,
    log: Log,
    check: Check = always,
    landed: Check = always,
) -> Delivered:
    """Publish over exactly what was looked at, and put back what overwriting loses; gives warnings about the rest.

    The file to send is made in `folder`; what must not be forgotten is written down in `home`. `landed` is told between
    the two.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / (f"{spec.name}.hyper" if shell is None else f"{spec.name}.tdsx")
    target.unlink(missing_ok=True)
    if shell is None:
        # A publish names the file; the version's own file must not be renamed or touched.
        _link(hyper, target)
    else:
        package = read_package(shell)
        write_package(package, target, hyper=hyper, refresh=refresh_change(package, hyper, rows=rows))
    seen = remember(look.found, home, look_beside(client, look.found)) if look.found is not None else nothing
    log(f"publishing {target.stat().st_size / 1e6:,.1f} MB")
    inferred = False

    def infer() -> None:
        nonlocal inferred
        inferred = True

    try:
        found = publish(
            client,
            target,
            project=look.project,
            name=spec.datasource.name,
            overwrite=look.found is not None,
            expected=look.version,
            connections=credentials,
            progress=tell_progress(log, "uploading", clock=client.retry.clock),
            check=check,
            seen=seen,
            inferred=infer,
        )
    finally:
        target.unlink(missing_ok=True)
    landed()
    restored = put_back_remembered(client, found, home, credentials)
    now = _settled(client, found, restored)
    # Where no revisions are shown, nobody can tell whether somebody published since.
    doubtful = inferred or now.revision is None or server_version(now) != server_version(restored.found)
    return Delivered(now, restored.warnings, doubtful)


def _settled(client: TableauClient, published: FoundDatasource, restored: Restored) -> FoundDatasource:
    """The datasource at a moment that can be confirmed: nobody published after us."""
    now = settled(client, restored.found)
    check_undisturbed(published, now, where=client.where, meanwhile="ours was being confirmed")
    return now


def _link(hyper: Path, target: Path) -> None:
    try:
        target.hardlink_to(hyper)
    except OSError:
        # Some file systems know no hard links.
        need_space(target.parent, hyper.stat().st_size)
        shutil.copyfile(hyper, target)


def finish_delivery(
    client: TableauClient,
    spec: ExtractSpec,
    look: ServerLook,
    *,
    home: Path,
    env: Mapping[str, str],
    foreign: bool,
    landed: bool,
) -> tuple[ServerLook, tuple[str, ...]]:
    """Put back what an earlier publish of ours took from the datasource, if that run ended before it could.

    `foreign` and `landed` tell what is known of the rows: what somebody else did is left alone.
    """
    if look.found is None or not is_remembered(home):
        return look, ()
    credentials = _named(spec, remembered_connections(home), env)
    # The look may have taken long, and what is put back moves the version: only what was looked at may be confirmed.
    _check_same(client, look.found, reread(client, look.found))
    restored = put_back_remembered(client, look.found, home, credentials, foreign=foreign, landed=landed)
    now = _settled(client, look.found, restored)
    _check_same(client, restored.found, now)
    return replace(look, found=now), restored.warnings


def _check_same(client: TableauClient, before: FoundDatasource, now: FoundDatasource | None) -> None:
    if now is None or server_version(now) != server_version(before):
        state = f"it is now {server_version(now)}" if now is not None else "it is gone"
        raise ForeignPublishError(
            f"Somebody else changed {before.shown} on {client.where} while it was being looked at (it was"
            f" {server_version(before)}, {state}). Nothing is confirmed. Run again: the next refresh compares what is there."
        )
