"""The extract's datasource on the server: look at it, download its package, name the credentials it signs in with."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tir_dagster.errors import DatasourceError, ExtractError, MachineError
from tir_dagster.files import need_space
from tir_dagster.hyper.hyperfile import describe, describe_all
from tir_dagster.hyper.package.archive import open_archive
from tir_dagster.hyper.package.package import extract_hyper, read_package
from tir_dagster.refresh.context import Log, Looked, RefreshContext, ServerLook, remove
from tir_dagster.refresh.state.versions import Version
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import (
    Connection,
    FoundDatasource,
    find_project,
    look_for_datasource,
)
from tir_dagster.tableau.settings import (
    ConnectionCredential,
    check_credentials,
    check_settable,
)
from tir_dagster.tableau.transfer import NoExtractError, download, tell_progress


def look_at_server(client: TableauClient, spec: ExtractSpec) -> ServerLook:
    project = find_project(client, spec.datasource.project)
    return ServerLook(project, look_for_datasource(client, project=project, name=spec.datasource.name))


def credentials_for(
    spec: ExtractSpec,
    datasource: FoundDatasource | None,
    env: Mapping[str, str],
    *,
    rest_version: tuple[int, int] | None = None,
) -> list[ConnectionCredential]:
    """Return the spec's credentials for every connection with embedded ones; raise if they are missing or do not fit.

    With the server's REST version, raise also if it is too old to set them after a publish.
    """
    if datasource is None:
        return []
    named = named_credentials(spec, datasource.connections, env)
    check_credentials(datasource, named)
    if rest_version is not None:
        check_settable(datasource, [item for item in named if item.method == "key_pair"], rest_version)
    return named


def named_credentials(
    spec: ExtractSpec, connections: Sequence[Connection], env: Mapping[str, str]
) -> list[ConnectionCredential]:
    embedded = [connection for connection in connections if connection.embed_password]
    credentials = spec.datasource.credentials
    if credentials is None or not embedded:
        return []
    _refuse_many(spec, {connection.server_address.casefold(): connection for connection in embedded}.values())
    username = credentials.username or _variable(spec, credentials.username_env, env)
    method = credentials.method
    password = _variable(spec, credentials.password_env, env) if method == "password" else ""
    return [
        ConnectionCredential(connection.server_address, username, password, connection.server_port, method)
        for connection in embedded
    ]


def _refuse_many(spec: ExtractSpec, places: Collection[Connection]) -> None:
    """Raise if there are several servers: the spec names the credentials of one, and no other may get them."""
    if len(places) > 1:
        addresses = "; ".join(sorted(f"{connection.type} {connection.server_address}" for connection in places))
        raise DatasourceError(
            f"{spec.name}: datasource {spec.datasource.name!r} in project {spec.datasource.project!r} has passwords embedded for"
            f" {len(places)} servers ({addresses}), and the spec names the credentials of one. Nothing was touched. Remove the connections"
            " that the extract does not need in Tableau, or choose the delivery `trigger`."
        )


def _variable(spec: ExtractSpec, name: str | None, env: Mapping[str, str]) -> str:
    value = env.get(name or "")
    if not value:
        raise DatasourceError(
            f"{spec.name}: the environment variable {name}, which the spec names for the datasource's credentials, is not set. "
            "Set it before the refresh: publishing without it would leave the datasource without its credentials."
        )
    return value


def fetch_shell(
    client: TableauClient,
    datasource: FoundDatasource,
    folder: Path,
    *,
    several: bool = False,
    log: Log = lambda _: None,
) -> tuple[Path, Path]:
    """Download the package and take it apart: the shell (everything but the rows), and the Hyper file.

    Raise if the file cannot be refreshed by key, with one table or with `several`.
    """
    # The package, and the Hyper file out of it.
    need_space(folder, 2 * (datasource.size_mb or 0) * 1_000_000)
    target, progress = folder / "download.tdsx", tell_progress(log, "downloading", clock=client.retry.clock)
    package = read_package(download(client, datasource, target, progress=progress))
    hyper = extract_hyper(package, folder / "download.hyper")
    try:
        if several:
            describe_all(hyper)
        else:
            describe(hyper)
    except MachineError:
        raise
    except ExtractError as error:
        raise NoExtractError(f"The {datasource.shown} cannot be refreshed by key: {error}") from error
    shell = folder / "shell.tdsx"
    with open_archive(package.path) as archive:
        assert package.hyper_member is not None, "extract_hyper refused it otherwise"
        archive.rewritten(shell.name, {package.hyper_member: b""}).write(shell)
    package.path.unlink()
    return shell, hyper


def server_package(context: RefreshContext, looked: Looked) -> tuple[Path | None, Path | None]:
    """Return the package around the extract, and the file whose column types a full refresh keeps; downloaded if need be.

    There is no package if nobody built one in Tableau.
    """
    datasource, base, confirmed = looked.server.datasource, looked.base, looked.confirmed
    if datasource is None:
        return None, None
    if base is not None and confirmed is not None and _is_the_servers(context, looked, base):
        # The local version is provably the server's: nothing to download. Without a shell we created it ourselves.
        shell = base.shell
        return (shell if shell.is_file() else None), base.extract
    if base is not None and looked.bare:
        return None, base.extract
    shell, hyper = _downloaded(context, datasource, looked.server.version_text or "")
    return (None if read_package(shell).is_bare else shell), hyper


def _downloaded(context: RefreshContext, datasource: FoundDatasource, version: str) -> tuple[Path, Path]:
    """Download the package of this server version once; stages in other processes find it."""
    folder = context.downloads / hashlib.sha256(version.encode()).hexdigest()[:16]
    shell, hyper = folder / "shell.tdsx", folder / "download.hyper"
    if not (shell.is_file() and hyper.is_file()):
        remove(context.downloads)
        context.log("downloading the datasource's package")
        with TableauClient(context.tableau) as client:
            several = bool(context.spec.tables)
            fetched = fetch_shell(client, datasource, context.work / "download", several=several, log=context.log)
        folder.mkdir(parents=True, exist_ok=True)
        # The Hyper file last: if it exists, both exist.
        fetched[0].replace(shell)
        fetched[1].replace(hyper)
    return shell, hyper


def _is_the_servers(context: RefreshContext, looked: Looked, base: Version) -> bool:
    """Whether the base and its shell are provably what the server holds, the refresh events included."""
    same = looked.confirmed is not None and looked.server.version_text == looked.confirmed.server_version
    return same and (context.spec.delivery != "server" or bool(base.manifest.get("from_server")))
