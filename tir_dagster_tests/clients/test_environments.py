from __future__ import annotations

import pytest

from tir_dagster_tests.clients.conftest import ROOT, client_environment, run_client

pytestmark = pytest.mark.client


def test_a_client_has_an_environment_of_its_own_which_is_found_again(tmp_path):
    programs = client_environment("nothing", "pip")
    assert programs == ROOT / "build" / "clients" / "nothing" / "bin"
    made = (programs.parent / ".ready").stat().st_mtime_ns
    assert client_environment("nothing", "pip") == programs
    assert (programs.parent / ".ready").stat().st_mtime_ns == made
    shown = run_client(programs / "python", "-c", "import sys; print(sys.prefix)", env={}, folder=tmp_path)
    assert shown.stdout.strip() == str(programs.parent)
    run_client(programs / "python", "-c", "import dagster", env={"PYTHONWARNINGS": "ignore"}, folder=tmp_path, code=1)
