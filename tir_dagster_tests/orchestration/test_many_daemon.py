"""Twenty extracts over five tables by sensors: Dagster's own services, started as deploy/compose.yaml starts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import dagster as dg
import pytest
import yaml
from dagster._core.scheduler.instigation import InstigatorType

from tir_dagster.orchestration.home import dagster_home, dagster_instance
from tir_dagster.orchestration.metadata import last_confirmation
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.refresh.state.lease import lease
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.spec.reading import parse_specs
from tir_dagster_tests.conftest import Sandbox, Warehouse
from tir_dagster_tests.processes import free_port, listening, running, wait_for

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
DATABASE, PROJECT = "CROWD", "a crowd of extracts"
TABLES, EXTRACTS, ROWS = 5, int(os.environ.get("TIR_EXTRACTS", "20")), 300
COLUMNS = ["ID, A", "ID, A, B", "ID, B, UPDATED", "ID, A, B, UPDATED"]
PATIENCE_SECONDS = 2400.0


def spec_text() -> str:
    """Four extracts of each table, each with other columns."""
    extracts = [
        {
            "name": f"e{at}",
            "source": f"{DATABASE}.PUBLIC.T{at % TABLES}",
            "columns": COLUMNS[at // TABLES].split(", "),
            "row_key": "ID",
            "changes": {"detector": "feed"},
            "datasource": {"project": PROJECT, "name": f"e{at}"},
            "thresholds": {"quiet_period": "0 seconds", "interval": "15 seconds"},
        }
        for at in range(EXTRACTS)
    ]
    return yaml.safe_dump({"extracts": extracts})


class Memory:
    """The memory that the services and their runs take together, looked at all the time."""

    def __init__(self, folder: Path) -> None:
        self._home = f"DAGSTER_HOME={folder}".encode()
        self.peak_mb: Counter[str] = Counter()
        self.most_runs = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            now: Counter[str] = Counter()
            runs = 0
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    if (
                        self._home not in (process / "environ").read_bytes().split(b"\0")
                        or int(process.name) == os.getpid()
                    ):
                        continue
                    command = (process / "cmdline").read_bytes()
                    shared = re.search(r"^Pss:\s+(\d+)", (process / "smaps_rollup").read_text(), re.MULTILINE)
                except OSError:
                    continue
                kind = next((kind for kind, mark in KINDS.items() if mark in command), "other")
                runs += kind == "runs"
                now[kind] += int(shared[1]) // 1024 if shared else 0
            now["all"] = sum(now.values())
            self.most_runs = max(self.most_runs, runs)
            self.peak_mb |= now


KINDS = {
    "runs": b"multiprocessing.spawn",
    "hyper": b"hyperd",
    "webserver": b"dagster-webserver",
    "daemon": b"dagster-daemon",
    "code": b"dagster",
}


@contextmanager
def services(folder: Path) -> Iterator[None]:
    """The three services with the commands of the compose file, but on free ports of this machine."""
    code, web = str(free_port()), str(free_port())
    (folder / "workspace.yaml").write_text(
        f"load_from: [{{grpc_server: {{host: 127.0.0.1, port: {code}, location_name: tir_dagster}}}}]\n"
    )
    here = {"0.0.0.0": "127.0.0.1", "4000": code, "3000": web, "/opt/dagster/workspace.yaml": "workspace.yaml"}
    commands = [
        [here.get(word, word) for word in COMPOSE["services"][name]["command"]]
        for name in ("code", "webserver", "daemon")
    ]
    with (
        running(folder, *commands[0]),
        listening(int(code)),
        running(folder, *commands[1]),
        running(folder, *commands[2]),
        listening(int(web)),
    ):
        dagster = Path(sys.executable).with_name("dagster")
        start = [dagster, "sensor", "start", "--start-all", "--workspace", "workspace.yaml"]
        subprocess.run(start, cwd=folder, check=True, timeout=600)
        yield


@pytest.mark.long
def test_twenty_extracts_by_sensors_none_starves_pools_hold_and_memory_is_bounded(
    sandbox: Sandbox, warehouse: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sandbox.prepare(DATABASE, PROJECT)
    connection = sandbox.snowflake(database=DATABASE, schema="PUBLIC")
    execute = connection.cursor().execute
    for at in range(TABLES):
        execute(f"CREATE OR REPLACE TABLE T{at} (ID INT, A INT, B VARCHAR, UPDATED TIMESTAMP_NTZ)")
        execute(f"ALTER TABLE T{at} SET CHANGE_TRACKING = TRUE")
        execute(f"INSERT INTO T{at} SELECT SEQ4(), SEQ4(), 'b', '2025-01-01' FROM TABLE(GENERATOR(ROWCOUNT => {ROWS}))")
    (tmp_path / "specs.yaml").write_text(spec_text(), encoding="utf-8")
    specs = {spec.name: spec for spec in parse_specs(spec_text(), "crowd")}
    home = tmp_path / "home"
    settings = {"TIR_HOME": str(home), "DAGSTER_HOME": str(home / "dagster"), "TIR_SPECS": str(tmp_path / "specs.yaml")}
    for name, value in {**sandbox.env, **settings}.items():
        monkeypatch.setenv(name, value)
    dagster_home()

    with dagster_instance() as instance:

        def confirmed(name: str) -> Confirmation | None:
            return last_confirmation(instance, extract_keys(specs[name]).published_datasource)

        def wait(done, what: str) -> None:
            wait_for(done, what, seconds=PATIENCE_SECONDS, pause=1.0, log=tmp_path / "dagster-daemon.log")

        with Memory(home / "dagster") as memory, services(tmp_path):
            wait(lambda: all(confirmed(name) for name in specs), "all extracts are loaded")
            loaded = dict(memory.peak_mb)

            # Ticks without a change.
            before = ticks(instance)
            warehouse.forget_queries()
            wait(
                lambda: all(ticks(instance)[name] >= before[name] + 3 for name in before),
                "each sensor has ticked three times",
            )
            probes = sum("SYSTEM$LAST_CHANGE_COMMIT_TIME" in query["sql"] for query in warehouse.queries())
            looks = sum((ticks(instance) - before)[f"{name}_source"] for name in specs)

            # One change of a table that four extracts show; somebody else works on one of them all the while.
            reading = [name for name, spec in specs.items() if spec.source == f"{DATABASE}.PUBLIC.T0"]
            versions = {name: confirmed(name).source_version for name in specs}
            warehouse.forget_queries()
            with lease(home / "extracts" / reading[0] / "lease.json", purpose="a long refresh"):
                execute("UPDATE T0 SET A = -1 WHERE ID < 5")
                execute("UPDATE T1 SET A = -1 WHERE ID < 5")
                free = [name for name, spec in specs.items() if spec.source[-1] in "01" and name != reading[0]]
                wait(lambda: all(confirmed(name).source_version > versions[name] for name in free), "the others go on")
                assert confirmed(reading[0]).source_version == versions[reading[0]]
            wait(lambda: confirmed(reading[0]).source_version > versions[reading[0]], "the last one follows")
            statements = [query["sql"] for query in warehouse.queries()]
        records = instance.get_run_records()

    reads = Counter(table for sql in statements for table in re.findall(r"\"(T\d)\" CHANGES\(", sql))
    most, by_pool = overlaps(records), {name: overlaps(of_extract(records, name)) for name in specs}
    measured = {
        "peak MB of the first loads": loaded,
        "peak MB": dict(memory.peak_mb),
        "run processes at once": memory.most_runs,
        "runs": len(records),
        "runs at once": most,
        "ticks of source sensors without a change": looks,
        "probes of them": probes,
        f"statements of two changed tables, {len(free) + 1} extracts": len(statements),
        "reads of what changed": dict(reads),
    }
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "many-extracts.json").write_text(json.dumps(measured, indent=2), encoding="utf-8")
    assert most <= 4, "the queue bounds the runs"
    assert set(by_pool.values()) == {1}, "one run of a datasource at a time"
    assert probes <= looks / 4, measured
    assert reads == {"T0": 1, "T1": 1}, measured
    limit_mb = int(COMPOSE["services"]["code"]["mem_limit"].removesuffix("g")) * 1024
    assert sum(memory.peak_mb[kind] for kind in ("code", "runs", "hyper")) <= limit_mb, measured


def ticks(instance: dg.DagsterInstance) -> Counter[str]:
    """How often each sensor has been evaluated."""
    states = instance.all_instigator_state(instigator_type=InstigatorType.SENSOR)
    return Counter(
        {
            state.instigator_name: len(instance.get_ticks(state.instigator_origin_id, state.selector_id))
            for state in states
        }
    )


def of_extract(records: list[dg.RunRecord], name: str) -> list[dg.RunRecord]:
    return [record for record in records if record.dagster_run.job_name in (f"{name}_detect", f"{name}_refresh")]


def overlaps(records: list[dg.RunRecord]) -> int:
    """Return how many of the runs ran at once at most."""
    moments = sorted(
        (moment, step)
        for record in records
        for moment, step in ((record.start_time, 1), (record.end_time, -1))
        if moment
    )
    count = most = 0
    for _, step in moments:
        count += step
        most = max(most, count)
    return most
