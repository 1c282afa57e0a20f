"""Dagster's own webserver on the project's definitions, and the requests to it that docs/queries.md shows."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

import tir_dagster
from tir_dagster.orchestration.home import dagster_home
from tir_dagster_tests.processes import free_port

DOCS = Path(tir_dagster.__file__).parents[1] / "docs" / "queries.md"


@contextmanager
def serving(spec_text: str, folder: Path) -> Iterator[str]:
    """The address of a webserver that shows these extracts, with the history that commands in this process write."""
    file, port = folder / "served.yaml", free_port()
    file.write_text(spec_text, encoding="utf-8")
    env = {**os.environ, "TIR_SPECS": str(file), "DAGSTER_HOME": str(dagster_home())}
    command = [str(Path(sys.executable).with_name("dagster-webserver")), "-m", "tir_dagster.definitions"]
    with (folder / "webserver.log").open("wb") as log:
        process = subprocess.Popen([*command, "--port", str(port)], env=env, stdout=log, stderr=log)
    try:
        yield _answering(f"http://127.0.0.1:{port}", process)
    finally:
        process.terminate()
        process.wait(60)


def _answering(url: str, process: subprocess.Popen[bytes]) -> str:
    """The address, once it answers."""
    patient = Retry(total=None, connect=600, backoff_factor=0.1, backoff_max=0.2)
    with requests.Session() as session:
        session.mount("http://", HTTPAdapter(max_retries=patient))
        session.get(f"{url}/server_info", timeout=60).raise_for_status()
    assert process.poll() is None, "the webserver ended"
    return url


def shown_request(beginning: str) -> str:
    """The block of the docs that begins so."""
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"    {beginning}"))
    block = itertools.takewhile(lambda line: not line or line.startswith("    "), lines[start:])
    return "\n".join(line[4:] for line in block)


def post_as_curl_would(command: str, url: str) -> None:
    """What the command says, without the program: not every machine has it."""
    words = shlex.split(command.replace("$DAGSTER", url))
    header, value = words[words.index("-H") + 1].split(": ")
    (address,) = [word for word in words if word.startswith(url)]
    answer = requests.post(address, data=words[words.index("-d") + 1], headers={header: value}, timeout=60)
    answer.raise_for_status()


def post_by_python(script: str, url: str) -> None:
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "DAGSTER": url}, check=True)
