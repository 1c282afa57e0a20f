"""The files of the project, as tests of its packaging see them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def project_files() -> list[Path]:
    """The files git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
