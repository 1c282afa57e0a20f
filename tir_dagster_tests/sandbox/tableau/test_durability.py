"""A server that is killed comes back with everything it has answered, and finishes what it had begun."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauserverclient.server.endpoint.exceptions import InternalServerError

from tir_dagster.sandbox.home import SandboxHome
from tir_dagster.sandbox.tableau.packages import Column
from tir_dagster.sandbox.tableau.settings import Settings
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.processes import free_port, wait_for
from tir_dagster_tests.sandbox.tableau.helpers import OVERWRITE, Admin, Looker, Publisher, Source
from tir_dagster_tests.sandbox.tableau.live import LiveData, action


class LoneServer:
    """A Tableau stand-in of its own, next to the shared warehouse, to be killed at will."""

    def __init__(self, folder: Path, warehouse_port: str, *, largest_file: int | None = None) -> None:
        self.home = SandboxHome(folder)
        self._port = "0"
        self._warehouse_port = warehouse_port
        self._log = folder / "lone.log"
        self._largest_file = largest_file
        self._process: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        if self._port == "0":
            self._port = str(free_port())
        self.home.root.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tir_dagster.sandbox.tableau", "--home", str(self.home.root)]
        if self._largest_file is not None:
            # Writing past this size fails, as on a full disk.
            command = ["/bin/sh", "-c", f'ulimit -f {self._largest_file // 512} && exec "$@"', "sh", *command]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--port", self._port, "--warehouse-port", self._warehouse_port],
                stdout=log,
                stderr=log,
            )
        wait_for(self._answers, "the server to answer", log=self._log)

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        return [int(pid) for task in tasks for pid in task.read_text().split()]

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            return requests.get(f"{self.url}/sandbox/health", timeout=5).ok
        except requests.ConnectionError:
            return False

    def end(self, signal_number: int) -> None:
        os.kill(self._process.pid, signal_number)
        self._process.wait(timeout=30)

    def files(self, folder: str) -> list[str]:
        return [path.name for path in (self.home.data("tableau") / folder).iterdir()]


@pytest.fixture(scope="module")
def shared(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoneServer]:
    server = LoneServer(tmp_path_factory.mktemp("lone"), sandbox.env["SNOWFLAKE_PORT"])
    server.start()
    yield server
    server.end(signal.SIGTERM)


@pytest.fixture
def lone(shared: LoneServer) -> Iterator[LoneServer]:
    """The server of these tests, which is up and behaves as usual after each of them."""
    yield shared
    Admin(shared.url).set(**asdict(Settings()))
    Admin(shared.url).clear_faults()


@pytest.fixture
def cramped(sandbox: Sandbox, tmp_path: Path) -> Iterator[LoneServer]:
    """A server that cannot write files larger than 4 MB."""
    server = LoneServer(tmp_path / "cramped", sandbox.env["SNOWFLAKE_PORT"], largest_file=4 * 1024 * 1024)
    server.start()
    yield server
    server.end(signal.SIGTERM)


@pytest.fixture
def publisher(lone: LoneServer, sandbox: Sandbox, tmp_path: Path) -> Publisher:
    return publisher_on(lone, sandbox, tmp_path)


def publisher_on(lone: LoneServer, sandbox: Sandbox, folder: Path) -> Publisher:
    """Signed in by password, working on the lone server with the shared warehouse's credentials."""
    identity = lone.home.identity()
    server = TSC.Server(lone.url, use_server_version=True)
    server.auth.sign_in(TSC.TableauAuth(identity.tableau_user, identity.tableau_password, identity.site))
    project = server.projects.create(TSC.ProjectItem(name=f"project-{uuid.uuid4().hex}"))
    return Publisher(sandbox, server, project, folder)


@pytest.fixture
def package(source: Source) -> Path:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0), DAY DATE)")
    source.sql("INSERT INTO {t} VALUES (1, '2023-01-01')")
    return source.package(Column("ID", "NUMBER(38,0)"), Column("DAY", "DATE"), increment_key="DAY")


def test_what_was_answered_is_there_after_a_kill(lone: LoneServer, publisher: Publisher, package: Path) -> None:
    datasource = publisher.publish(package, connection_credentials=publisher.credentials)
    Admin(lone.url).set(job_seconds=0.1)
    lone.end(signal.SIGKILL)
    lone.start()
    # The session is still good, too.
    assert publisher.download(datasource).read_bytes() == package.read_bytes()
    assert requests.get(f"{lone.url}/sandbox/settings", timeout=30).json()["job_seconds"] == 0.1
    assert publisher.refresh(datasource).finish_code == TSC.JobItem.FinishCode.Success


@pytest.mark.parametrize("running", [False, True], ids=["waiting", "running"])
def test_a_refresh_that_was_interrupted_runs_again(
    lone: LoneServer, publisher: Publisher, package: Path, look: Looker, *, running: bool
) -> None:
    datasource = publisher.publish(package, connection_credentials=publisher.credentials)
    admin = Admin(lone.url)
    admin.set(job_seconds=0.2 if running else 60)
    admin.fault("slow_job", seconds=60)
    job = publisher.server.datasources.refresh(datasource)
    if running:
        publisher.begun(job.id)
    lone.end(signal.SIGKILL)
    lone.start()
    assert publisher.server.datasources.refresh(datasource) is None, "the job waits or runs still"
    Admin(lone.url).set(job_seconds=0.2)
    assert publisher.finished(job.id).finish_code == TSC.JobItem.FinishCode.Success
    assert look.events(publisher.download(datasource)) == [("create", "#2023-01-01#", "1")]


def test_a_publish_job_that_was_interrupted_runs_again(lone: LoneServer, publisher: Publisher, package: Path) -> None:
    before = lone.files("incoming")
    Admin(lone.url).set(job_seconds=60)
    job = publisher.publish(package, as_job=True)
    lone.end(signal.SIGTERM)
    lone.start()
    Admin(lone.url).set(job_seconds=0.1)
    assert publisher.finished(job.id).finish_code == TSC.JobItem.FinishCode.Success
    found = list(publisher.server.datasources.filter(project_name=publisher.project.name))
    assert publisher.download(found[0]).read_bytes() == package.read_bytes()
    assert lone.files("incoming") == before


def test_a_kill_in_the_middle_of_refreshes_never_tears_a_package(
    lone: LoneServer, publisher: Publisher, package: Path, look: Looker, source: Source
) -> None:
    before = set(lone.files("packages"))
    datasource = publisher.publish(package, connection_credentials=publisher.credentials)
    Admin(lone.url).set(job_seconds=0)
    publisher.refresh(datasource)
    for number in range(2, 4):
        source.sql(f"INSERT INTO {{t}} VALUES ({number}, '2023-01-0{number}')")
        job = publisher.server.datasources.refresh(datasource, incremental=True)
        publisher.begun(job.id)
        lone.end(signal.SIGKILL)
        lone.start()
        assert publisher.finished(job.id).finish_code == TSC.JobItem.FinishCode.Success
        after = publisher.download(datasource)
        # Each increment took effect once, however often it was begun.
        assert [row[0] for row in look.rows(after)] == list(range(1, number + 1))
    # What was published, and what it has become.
    assert len(set(lone.files("packages")) - before) == 2
    assert lone.files("scratch") == []


def test_an_upload_that_nobody_can_finish_any_more_is_gone_after_a_restart(
    lone: LoneServer, publisher: Publisher
) -> None:
    server = publisher.server
    url = f"{server.baseurl}/sites/{server.site_id}/fileUploads"
    before = len(lone.files("incoming"))
    assert requests.post(url, headers={"x-tableau-auth": server.auth_token}, timeout=30).status_code == 201
    assert len(lone.files("incoming")) == before + 1
    Admin(lone.url).set(upload_session_minutes=0)
    lone.end(signal.SIGTERM)
    lone.start()
    assert lone.files("incoming") == []


def test_a_full_disk_fails_the_call_and_nothing_else(
    cramped: LoneServer, sandbox: Sandbox, tmp_path: Path, package: Path
) -> None:
    publisher = publisher_on(cramped, sandbox, tmp_path)
    datasource = publisher.publish(package)
    large = publisher.folder / "large.tdsx"
    shutil.copyfile(package, large)
    with zipfile.ZipFile(large, "a") as archive:
        archive.writestr("Data/padding", bytes(6 * 1024 * 1024))
    with pytest.raises(InternalServerError, match="500000"):
        publisher.publish(large, mode=OVERWRITE)
    assert publisher.download(datasource).read_bytes() == package.read_bytes()
    assert cramped.files("incoming") == []
    publisher.publish(package, mode=OVERWRITE)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the child process in /proc")
def test_a_dead_hyper_process_is_replaced(lone: LoneServer, publisher: Publisher, package: Path) -> None:
    datasource = publisher.publish(package, connection_credentials=publisher.credentials)
    hyper = lone.children()
    assert len(hyper) == 1
    os.kill(hyper[0], signal.SIGKILL)
    assert publisher.refresh(datasource).finish_code == TSC.JobItem.FinishCode.Success


@pytest.mark.parametrize("fault", ["slow_job", "late_job"])
def test_a_change_of_data_that_was_interrupted_happens_once(
    lone: LoneServer, publisher: Publisher, look: Looker, fault: str
) -> None:
    live = LiveData.publish(publisher, look, [(1, "a")])
    admin = Admin(lone.url)
    admin.set(job_seconds=0.1)
    admin.fault(fault, seconds=60)
    job = live.send(action("insert"), request_id=fault, payload=live.payload([(2, "b")]))
    if fault == "late_job":
        wait_for(lambda: len(live.rows()) == 2, "the change")
    else:
        publisher.begun(job.id)
    lone.end(signal.SIGKILL)
    lone.start()
    assert live.send(action("insert"), request_id=fault, payload=live.payload([(2, "b")])).id == job.id
    finished = publisher.finished(job.id)
    assert finished.finish_code == TSC.JobItem.FinishCode.Success
    assert live.rows() == [[1, "a"], [2, "b"]]
    live.endpoint.delete(live.datasource.id)


def test_an_event_that_nobody_took_is_delivered_after_a_restart(lone: LoneServer, publisher: Publisher) -> None:
    hook = TSC.WebhookItem()
    hook.name, hook.event, port = "hook", "datasource-created", free_port()
    hook.url = f"http://127.0.0.1:{port}/"
    made = publisher.server.webhooks.create(hook)
    Admin(lone.url).set(webhook_retry_seconds=0.5)
    datasource = publisher.publish_live("Announced")
    lone.end(signal.SIGKILL)
    with socket.create_server(("127.0.0.1", port)) as receiver:
        receiver.settimeout(30)
        lone.start()
        with receiver.accept()[0] as call:
            call.settimeout(30)
            text = b""
            while datasource.id.encode() not in text:
                text += call.recv(65536)
            call.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
    publisher.server.webhooks.delete(made.id)
