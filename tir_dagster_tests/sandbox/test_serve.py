from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tir_dagster.sandbox import processes
from tir_dagster.sandbox.home import SandboxHome
from tir_dagster.sandbox.serve import OWNER_VARIABLE
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.processes import wait_for


@pytest.fixture
def owner():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_a_server_ends_when_the_process_it_runs_for_was_killed(tmp_path: Path, owner: subprocess.Popen[bytes]):
    SandboxHome(tmp_path).identity()
    command = [sys.executable, "-m", "tir_dagster.sandbox.people", "--home", str(tmp_path)]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stderr=log, env={**os.environ, OWNER_VARIABLE: str(owner.pid)})
    try:
        owner.kill()
        owner.wait()
        wait_for(lambda: server.poll() is not None, "the server's end", log=tmp_path / "log")
    finally:
        server.kill()
        server.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_servers_listen_on_loopback_only(sandbox: Sandbox):
    ports = {state.port for state in processes.status(sandbox.home).values()}
    listening = []
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            if state == "0A" and int(port, 16) in ports:
                listening.append(address)
    assert listening == ["0100007F"] * len(ports)
