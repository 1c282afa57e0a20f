"""The method of a script of 2021, written anew from its description: the steps of a person who does everything by hand.

Download the package, unzip all of it, DELETE a range of dates in Hyper, write the last date into the refresh information, deflate
all of it, publish, and let Tableau's own incremental refresh read the range again. It uses the vendors' clients and no code of ours.
"""

from __future__ import annotations

import re
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauhyperapi import Connection, HyperProcess, Telemetry

# The client's own wait sleeps longer and longer, up to half a minute: that would be counted as this way's time.
_POLL_SECONDS = 0.25


@contextmanager
def signed_in(env: Mapping[str, str]) -> Iterator[Any]:
    token = TSC.PersonalAccessTokenAuth(env["TABLEAU_TOKEN_NAME"], env["TABLEAU_TOKEN_SECRET"], env["TABLEAU_SITE"])
    server = TSC.Server(env["TABLEAU_SERVER_URL"], use_server_version=True)
    with server.auth.sign_in(token):
        yield server


@contextmanager
def hyper(file: Path, **options: Any) -> Iterator[Connection]:
    """A connection to a Hyper process that was started for this file."""
    quiet = {"log_config": ""}
    with (
        HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters=quiet) as process,
        Connection(process.endpoint, file, **options) as connection,
    ):
        yield connection


def named(server: Any, name: str) -> Any:
    (datasource,) = [item for item in TSC.Pager(server.datasources) if item.name == name]
    return datasource


def download_and_unzip(server: Any, datasource: Any, folder: Path) -> Path:
    """Return the folder with everything that was in the package."""
    unzipped = folder / "unzipped"
    package = Path(server.datasources.download(datasource.id, filepath=str(folder / "download")))
    with zipfile.ZipFile(package) as archive:
        archive.extractall(unzipped)
    package.unlink()
    return unzipped


def delete_from(connection: Connection, key: str, day: str) -> tuple[int, str]:
    """Return how many rows remain, and the greatest date among them."""
    connection.execute_command(f"""DELETE FROM "Extract"."Extract" WHERE "{key}" >= DATE '{day}'""")
    asked = f'SELECT COUNT(*), CAST(MAX("{key}") AS TEXT) FROM "Extract"."Extract"'
    rows, largest = connection.execute_list_query(asked)[0]
    return int(rows), str(largest)


def set_increment_value(unzipped: Path, largest: str) -> None:
    (document,) = unzipped.rglob("*.tds")
    text = document.read_text(encoding="utf-8")
    value = f'increment-value="#{largest}#"'
    document.write_text(re.sub(r"""increment-value=("[^"]*"|'[^']*')""", value, text), encoding="utf-8")


def deflate_all(unzipped: Path, target: Path) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(path for path in unzipped.rglob("*") if path.is_file()):
            archive.write(file, file.relative_to(unzipped))


def publish(server: Any, project_id: str, name: str, file: Path, env: Mapping[str, str] | None = None) -> None:
    """Overwrite the datasource; with the credentials of `env`, which a publish would otherwise remove."""
    given = env and TSC.ConnectionCredentials(env["SNOWFLAKE_USER"], env["SNOWFLAKE_PASSWORD"], embed=True)
    item = TSC.DatasourceItem(project_id, name=name)
    server.datasources.publish(item, str(file), TSC.Server.PublishMode.Overwrite, connection_credentials=given)


def refresh(server: Any, datasource: Any, *, incremental: bool) -> None:
    """Let Tableau refresh the extract, and wait for its job."""
    job = server.datasources.refresh(datasource, incremental=incremental)
    while (state := server.jobs.get_by_id(job.id)).completed_at is None:
        time.sleep(_POLL_SECONDS)
    if int(state.finish_code) != TSC.JobItem.FinishCode.Success:
        raise RuntimeError(f"Tableau's refresh of {datasource.name} failed: {'; '.join(state.notes)}")
