"""Which Spark a process uses, and what is believed of a server's state file. Without any Spark."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tir_dagster.background import start_time, write_json
from tir_dagster.errors import SourceError
from tir_dagster.spark import server
from tir_dagster.spark.remote import Remote
from tir_dagster.spark.server import SparkServer, find_server, remote_spark, server_state, stop_server
from tir_dagster_tests.processes import free_port


def remembered(home: Path, **fields) -> SparkServer:
    """A state file of this very process, as if it were the server; the fields make it another one."""
    own_process = SparkServer(
        os.getpid(), free_port(), start_time(os.getpid()) or "", server._packages(), "an id", "a token"
    )
    state = replace(own_process, **fields)
    write_json(home / "spark" / "server.json", asdict(state))
    return state


@pytest.mark.parametrize("content", ["", "[]", '{"pid": 1}', "{"])
def test_a_damaged_state_file_is_no_server(tmp_path, content):
    (tmp_path / "spark").mkdir()
    (tmp_path / "spark" / "server.json").write_text(content)

    assert server_state(tmp_path) == ("stopped", None)
    assert remote_spark({}, tmp_path, pytest.fail) is None


def test_the_state_is_readable_by_its_owner_only(tmp_path):
    state = remembered(tmp_path)

    assert find_server(tmp_path) == state
    assert (tmp_path / "spark" / "server.json").stat().st_mode & 0o777 == 0o600
    assert "a token" not in repr(state)


def test_a_process_that_got_the_pid_later_is_neither_used_nor_ended(tmp_path):
    remembered(tmp_path, started="another boot/1")
    messages: list[str] = []

    assert server_state(tmp_path)[0] == "ended"
    assert remote_spark({}, tmp_path, messages.append) is None
    assert messages == [f"the Spark server of {tmp_path} is ended and is not used; `tir spark up` starts a new one"]
    assert stop_server(tmp_path) is None, "this process lives"
    assert server_state(tmp_path) == ("stopped", None)


def test_a_server_that_does_not_answer_is_not_used(tmp_path):
    remembered(tmp_path)
    messages: list[str] = []

    assert remote_spark({}, tmp_path, messages.append) is None
    assert "is not answering and is not used" in messages[0]


def test_a_server_whose_workers_run_other_code_is_not_used(tmp_path, monkeypatch):
    remembered(tmp_path, made_by="an older version")
    monkeypatch.setattr(SparkServer, "answers", True)
    messages: list[str] = []

    assert server_state(tmp_path)[0] == "outdated"
    assert remote_spark({}, tmp_path, messages.append) is None
    assert "was started by other versions of the packages" in messages[0]


def test_spark_remote_wins_over_the_homes_own_server(tmp_path, monkeypatch):
    state = remembered(tmp_path)
    monkeypatch.setattr(SparkServer, "answers", True)

    assert remote_spark({}, tmp_path, pytest.fail) == state.remote(tmp_path)
    explicit = remote_spark({"SPARK_REMOTE": "sc://spark.example.com"}, tmp_path, pytest.fail)
    assert explicit == Remote("sc://spark.example.com")


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("sc://spark.example.com", "spark.example.com"),
        ("sc://spark.example.com:443/;token=secret;use_ssl=true", "spark.example.com:443"),
        ("sc://me:secret@spark.example.com:15002/", "spark.example.com:15002"),
    ],
)
def test_an_address_is_shown_without_what_is_secret_in_it(address, name):
    remote = Remote(address, token="secret")

    assert remote.name == name
    assert "secret" not in repr(remote) + remote.advice


def test_what_is_no_address_of_a_spark_server_is_refused_unshown(tmp_path):
    with pytest.raises(SourceError, match="SPARK_REMOTE is no address") as caught:
        remote_spark({"SPARK_REMOTE": "https://me:secret@example.com"}, tmp_path, pytest.fail)

    assert "secret" not in str(caught.value)


def test_two_homes_are_two_servers(tmp_path):
    first, second = remembered(tmp_path / "first"), remembered(tmp_path / "second")

    assert find_server(tmp_path / "first") == first
    assert json.loads((tmp_path / "second" / "spark" / "server.json").read_text()) == asdict(second)
