"""Foreign clients in virtual environments of their own, against this test run's sandbox; `make clients` runs them.

Their files of tests are marked: `pytestmark = pytest.mark.client`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What a client shall not inherit: it would find the packages of this environment in place of its own.
_OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def client_environment(name: str, *requirements: str) -> Path:
    """Return the folder with the programs of the virtual environment `build/clients/NAME`, made or found."""
    script = ROOT / "scripts" / "client-environment"
    made = subprocess.run([script, name, *requirements], stdout=subprocess.PIPE, text=True, check=True)
    return Path(made.stdout.strip()) / "bin"


def run_client(
    program: Path, *arguments: str | Path, env: Mapping[str, str], folder: Path, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a program of a client's environment with these variables on top, and check its exit code; give what it printed."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_THIS_PYTHON}
    done = subprocess.run(
        [program, *arguments],
        env={**inherited, **env},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    shown = " ".join(map(str, (program.name, *arguments)))
    assert done.returncode == code, f"{shown} ended with {done.returncode}:\n{done.stdout}"
    return done
