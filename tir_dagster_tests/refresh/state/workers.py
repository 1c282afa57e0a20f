"""One extract refreshed by several workers: processes with disks of their own, whose state is on the sandbox's S3."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import requests

from tir_dagster.refresh.state.objects import S3Store
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.torture.subjects import Extract, Victim, check_names
from tir_dagster_tests.torture.victim import Task, read_confirmation


class Bucket:
    """The stand-in as its operator sees it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.url = sandbox.env["AWS_ENDPOINT_URL_S3"]

    def calls(self) -> list[dict[str, Any]]:
        """Return the calls since the last time this was asked."""
        return requests.delete(f"{self.url}/sandbox/calls", timeout=30).json()["calls"]

    def fail(self, *faults: dict[str, Any]) -> None:
        assert requests.post(f"{self.url}/sandbox/faults", json=list(faults), timeout=30).ok

    def calm(self) -> None:
        requests.delete(f"{self.url}/sandbox/faults", timeout=30)
        self.clock_ahead(0)

    def clock_ahead(self, seconds: float) -> None:
        assert requests.post(f"{self.url}/sandbox/clock", json={"ahead": seconds}, timeout=30).ok


class Workers(Extract):
    """An extract by one delivery; `at` says which worker plays the next task."""

    def __init__(self, sandbox: Sandbox, folder: Path, delivery: str = "republish") -> None:
        self.state = f"s3://landing/{folder.name}"
        self.log = folder / "log"
        self.log.mkdir(parents=True)
        self.folders = folder
        self.at = 1
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            assert os.environ[name] == sandbox.env[name], "the store is asked by this process, too"
        self.bucket = Bucket(sandbox)
        super().__init__(sandbox, folder, delivery, table=f"workers_{delivery}")

    @property
    def store(self) -> S3Store:
        return S3Store(self.state, self.sandbox.env)

    @property
    def unit(self) -> str:
        return f"extracts/{self.served.name}"

    @property
    def disk(self) -> Path:
        """The home of the worker whose turn it is."""
        return self.folders / f"worker{self.at}"

    @property
    def folder(self) -> Path:
        return self.disk / "extracts" / self.served.name

    def task(self, **more: Any) -> Task:
        (self.disk / "tmp").mkdir(parents=True, exist_ok=True)
        served = self.served
        return Task("refresh", served.spec(), served.env, self.disk, self._mark, log=self.log, state=self.state, **more)

    def play(self, worker: int, **more: Any) -> Victim:
        """Start a refresh on a worker."""
        self.at = worker
        return self.victim(random.Random(0), **more)

    def held_state(self) -> dict[str, Any]:
        """Return the shared state as it is in the bucket."""
        stored = self.store.get(f"{self.unit}/state.json")
        assert stored is not None, f"no state in {self.state}"
        value: dict[str, Any] = json.loads(stored.body)
        return value

    def holder(self) -> dict[str, Any] | None:
        """Return who has the lease."""
        holder: dict[str, Any] | None = self.held_state()["holder"]
        return holder

    def check_state(self, *, published: bool) -> None:
        """Raise AssertionError if more stays on the worker's disk or in the bucket than docs/survival.md names."""
        check_names(self.folder, published=published)
        assert list((self.disk / "tmp").iterdir()) == []
        confirmed, state = read_confirmation(self.log), self.held_state()
        assert confirmed is not None
        assert state["holder"] is None
        assert not state["unclean"]
        pending = [name for name in state["texts"] if name.startswith("change_sets/") and "looked" not in name]
        assert pending == []
        versions = {name.split("/")[1] for name in state["texts"] if name.startswith("versions/")}
        assert confirmed.version in versions
        assert len(versions) <= 3 + 2, versions
        history = self.store.get(f"{self.unit}/{state['history']}")
        assert history is not None
        entries = json.loads(history.body)
        assert f"history/{confirmed.version}/record.json" in entries
        listed = {file for file, _ in (*state["files"].values(), *entries.values())}
        there = {key.removeprefix(f"{self.unit}/") for key in self.store.keys(f"{self.unit}/")}
        assert there == {"state.json", state["history"], *listed}
