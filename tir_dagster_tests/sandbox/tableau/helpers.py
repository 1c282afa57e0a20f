"""What the Tableau stand-in's tests share: packages to publish, jobs to wait for, extracts to look into."""

from __future__ import annotations

import base64
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from cryptography.hazmat.primitives import serialization as keys
from cryptography.hazmat.primitives.asymmetric import rsa
from tableauhyperapi import Connection

from tir_dagster.sandbox.tableau.packages import Column, SnowflakeConnection, build_tdsx
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.processes import wait_for

CREATE, OVERWRITE = TSC.Server.PublishMode.CreateNew, TSC.Server.PublishMode.Overwrite
QUICK = 0.01  # seconds that a job takes at least

LIVE_ONLY = b"""<?xml version='1.0' encoding='utf-8' ?>
<datasource formatted-name='federated.live' inline='true' version='18.1'>
  <connection class='federated'>
    <named-connections>
      <named-connection caption='x' name='snowflake.x'>
        <connection class='snowflake' dbname='D' schema='S' server='sandbox.snowflakecomputing.com' username='U' />
      </named-connection>
    </named-connections>
    <relation connection='snowflake.x' name='T' table='[S].[T]' type='table' />
  </connection>
</datasource>
"""


@dataclass(frozen=True)
class Admin:
    """The sandbox's own calls on the Tableau stand-in."""

    url: str

    def set(self, **settings: Any) -> None:
        answer = requests.put(f"{self.url}/sandbox/settings", json=settings, timeout=30)
        assert answer.ok, answer.text

    def fault(self, kind: str, **fields: Any) -> None:
        answer = requests.post(f"{self.url}/sandbox/faults", json={"kind": kind, **fields}, timeout=30)
        assert answer.ok, answer.text

    def faults(self) -> list[dict[str, Any]]:
        return requests.get(f"{self.url}/sandbox/faults", timeout=30).json()["faults"]

    def clear_faults(self) -> None:
        requests.delete(f"{self.url}/sandbox/faults", timeout=30).raise_for_status()

    def forget_calls(self) -> None:
        """Only so many are kept: what is counted afterwards begins here."""
        requests.delete(f"{self.url}/sandbox/calls", timeout=30).raise_for_status()

    def calls(self) -> list[dict[str, Any]]:
        return requests.get(f"{self.url}/sandbox/calls", timeout=30).json()["calls"]


@dataclass(frozen=True)
class Publisher:
    """One signed-in client in a project of its own."""

    sandbox: Sandbox
    server: TSC.Server
    project: TSC.ProjectItem
    folder: Path

    @property
    def credentials(self) -> TSC.ConnectionCredentials:
        identity = self.sandbox.identity
        return TSC.ConnectionCredentials(identity.snowflake_user, identity.snowflake_password, embed=True)

    def publish(self, file: Path, name: str = "Orders", mode: str = CREATE, **more: Any) -> Any:
        return self.server.datasources.publish(TSC.DatasourceItem(self.project.id, name), str(file), mode, **more)

    def publish_live(self, name: str) -> Any:
        file = self.folder / "live.tds"
        file.write_bytes(LIVE_ONLY)
        return self.publish(file, name)

    def publish_workbook(self, file: Path, name: str = "Sales book", mode: str = CREATE) -> Any:
        return self.server.workbooks.publish(TSC.WorkbookItem(self.project.id, name), str(file), mode)

    def download(self, datasource: Any, revision: str | None = None, **more: Any) -> Path:
        target = self.folder / f"download-{time.monotonic_ns()}"
        endpoint = self.server.datasources
        return Path(endpoint.download_revision(datasource.id, revision, str(target), **more))

    def refresh(self, datasource: Any, *, incremental: bool = False) -> Any:
        """The finished job, whatever became of it."""
        job = self.server.datasources.refresh(datasource, incremental)
        assert job is not None, "a refresh was already queued"
        return self.finished(job.id)

    def begun(self, job_id: str) -> None:
        wait_for(lambda: self.server.jobs.get_by_id(job_id).started_at, f"job {job_id} to run")

    def finished(self, job_id: str) -> Any:
        return wait_for(lambda: _if_over(self.server.jobs.get_by_id(job_id)), f"job {job_id} to end")


def _if_over(job: Any) -> Any:
    return job if job.completed_at is not None else None


@dataclass(frozen=True)
class Source:
    """A schema of its own in the embedded warehouse, and packages that read from it."""

    sandbox: Sandbox
    cursor: Any
    database: str
    schema: str
    folder: Path
    hyper: Any

    def sql(self, statement: str) -> None:
        self.cursor.execute(statement.replace("{t}", f"{self.database}.{self.schema}.T"))

    @property
    def connection(self) -> SnowflakeConnection:
        return SnowflakeConnection(
            server=f"{self.sandbox.identity.account}.snowflakecomputing.com",
            dbname=self.database,
            schema=self.schema,
            warehouse="WH",
            role="SYSADMIN",
            username=self.sandbox.identity.snowflake_user,
        )

    def package(self, *columns: Column, **more: Any) -> Path:
        """A package over the table T, or over what `more` says."""
        options: dict[str, Any] = {"caption": "Orders", "table": "T", "snowflake": self.connection, **more}
        if server := options.pop("server", None):
            options["snowflake"] = replace(self.connection, server=server)
        return build_tdsx(self.folder / "package.tdsx", columns=columns, hyper=self.hyper, **options)


@dataclass(frozen=True)
class Looker:
    """Looks into packages."""

    hyper: Any
    folder: Path

    def rows(self, package: Path, sql: str = 'SELECT * FROM "Extract"."Extract" ORDER BY 1') -> list[list[Any]]:
        with zipfile.ZipFile(package) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".hyper"))
            extract = self.folder / f"look-{time.monotonic_ns()}.hyper"
            extract.write_bytes(archive.read(member))
        with Connection(self.hyper, extract) as connection:
            return connection.execute_list_query(sql)

    def document(self, package: Path) -> ET.Element:
        with zipfile.ZipFile(package) as archive:
            return ET.fromstring(archive.read(next(name for name in archive.namelist() if name.endswith(".tds"))))

    def events(self, package: Path) -> list[tuple[str, str, str]]:
        """(type, value, rows) of the extract's refresh events."""
        return [
            (event.get("refresh-type", ""), event.get("increment-value", ""), event.get("rows-inserted", ""))
            for event in self.document(package).iter("refresh-event")
        ]


def rewritten(package: Path, target: Path, *, edit: Any = None, drop: str = "", add: Any = ()) -> Path:
    """A copy with the .tds's text edited, some members dropped and others added."""
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if drop and name.endswith(drop):
                continue
            data = old.read(name)
            new.writestr(name, edit(data.decode()) if edit and name.endswith(".tds") else data)
        for name, data in add:
            new.writestr(name, data)
    return target


def with_second_connection(document: str, server: str = "db.example.com") -> str:
    """The document with one connection more, to another server."""
    other = f"<connection class='postgres' dbname='D' schema='S' server='{server}' username='U' />"
    named = f"<named-connection caption='other' name='postgres.other'>{other}</named-connection>"
    return document.replace("</named-connections>", f"{named}</named-connections>")


def forget_credentials(tableau_url: str) -> None:
    requests.delete(f"{tableau_url}/sandbox/saved-credentials", timeout=30).raise_for_status()


def save_credential(tableau_url: str, **asked: str) -> None:
    """Save a key pair or an OAuth token in a user's account settings: user, method, server, username and secret."""
    answer = requests.post(f"{tableau_url}/sandbox/saved-credentials", json=asked, timeout=30)
    assert answer.ok, answer.text


def private_pem(key: rsa.RSAPrivateKey) -> str:
    return key.private_bytes(keys.Encoding.PEM, keys.PrivateFormat.PKCS8, keys.NoEncryption()).decode()


def new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def save_key_pair(sandbox: Sandbox) -> None:
    """A new key pair of the Snowflake user, saved in the account settings of the Tableau user who publishes."""
    identity, key = sandbox.identity, new_key()
    public = key.public_key().public_bytes(keys.Encoding.DER, keys.PublicFormat.SubjectPublicKeyInfo)
    with sandbox.snowflake() as connection:
        body = base64.b64encode(public).decode()
        connection.cursor().execute(f"ALTER USER {identity.snowflake_user} SET RSA_PUBLIC_KEY = '{body}'")
    save_credential(
        sandbox.tableau_url,
        user=identity.tableau_user,
        method="key_pair",
        server=f"{identity.account}.snowflakecomputing.com",
        username=identity.snowflake_user,
        secret=private_pem(key),
    )
