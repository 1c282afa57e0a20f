"""Spark on other machines: a standalone cluster whose workers share no folder with the driver, alone and behind a Connect server.

Each story is a first load, a load of files, and the refresh that finds what it changed, in one process like a daemon's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import boto3
import pytest
import requests

from tir_dagster_tests.cluster import Cluster, bare_python, running_cluster
from tir_dagster_tests.conftest import Warehouse
from tir_dagster_tests.jvm import options
from tir_dagster_tests.kubernetes import Kubernetes, running_kubernetes
from tir_dagster_tests.orchestration.conftest import Place, download
from tir_dagster_tests.packages import plain, rows_of
from tir_dagster_tests.processes import wait_for

BUCKET, TOKEN = "staging", "the-token-of-the-connect-server"
S3_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
STAGING = f"s3://{BUCKET}/tir"
STEPS = (("refresh", "orders"), ("load", "order_files"), ("refresh", "orders"))
HEADER = "ORDER_ID,ORDER_DATE,CUSTOMER,QUANTITY,UPDATED_AT,OP\n"
LOADS = """\
loads:
  - name: order_files
    table: MYDB.MYSCHEMA.MYTABLE
    files: {path: "s3://landing/cluster", format: csv}
    mode: merge
    key: ORDER_ID
    order_by: UPDATED_AT
    delete_flag: OP
    columns: {ORDER_ID: "NUMBER(38,0)", ORDER_DATE: DATE, CUSTOMER: VARCHAR, QUANTITY: NUMBER, UPDATED_AT: TIMESTAMP_NTZ}
"""
# Runs the commands one after the other in one process, each when the test says so, and prints what they print.
COMMANDS = """
import json, sys
from click.testing import CliRunner
from tir_dagster.cli.main import tir
for line in sys.stdin:
    done = CliRunner().invoke(tir, json.loads(line))
    print(json.dumps([done.exit_code, done.stdout, done.stderr]), flush=True)
"""


@dataclass
class Driver:
    """The process that runs commands, and what each printed."""

    process: subprocess.Popen[str]
    outputs: list[str] = field(default_factory=list)

    def begin(self, *arguments: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()

    def end(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        exit_code, output, errors = json.loads(self.process.stdout.readline())
        self.outputs.append(output + errors)
        assert exit_code == 0, errors
        return json.loads(output)

    def run(self, *arguments: str) -> dict[str, Any]:
        self.begin(*arguments)
        return self.end()


@pytest.fixture(scope="module")
def s3(place: Place) -> Any:
    client = boto3.Session().client("s3")
    client.create_bucket(Bucket=BUCKET)
    return client


@pytest.fixture(scope="module")
def cluster(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster of this file; its machines know the keys of the staging place, and nothing else of the driver's environment."""
    keys = {name: place.sandbox.env[name] for name in S3_KEYS}
    with running_cluster(tmp_path_factory.mktemp("cluster"), keys) as cluster:
        yield cluster


@pytest.fixture
def drive(place: Place, cluster: Cluster, s3: Any, tmp_path: Path) -> Iterator[Callable[[str], Driver]]:
    """Starts a driver with a state of its own and this block `spark:`."""
    drivers: list[Driver] = []

    def start(block: str, **env: str) -> Driver:
        specs = tmp_path / "specs.yaml"
        specs.write_text(place.spec_text.replace("mydatasource", "on_cluster") + LOADS + block, encoding="utf-8")
        own = {"TIR_HOME": str(tmp_path / "state"), "DAGSTER_HOME": str(tmp_path / "dagster"), "TIR_SPECS": str(specs)}
        with (tmp_path / "driver.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", COMMANDS],
                env={**os.environ, **own, "TIR_SPARK_ROWS": "0", **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        drivers.append(Driver(process))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.process.kill()
        driver.process.communicate()


def on_master(cluster: Cluster, **config: str) -> str:
    settings = "".join(f"    {name}: {json.dumps(value)}\n" for name, value in {**cluster.settings, **config}.items())
    return f"spark:\n  master: {cluster.master}\n  staging: {STAGING}\n  config:\n{settings}"


def on_connect(address: str) -> str:
    return f"spark: {{remote: '{address}', staging: '{STAGING}'}}\n"


def land(place: Place, s3: Any, count: int) -> None:
    """Land files that update, insert and delete orders."""
    ((stamp,),) = place.sql("SELECT DATEADD('second', 1, MAX(UPDATED_AT)) FROM MYTABLE")
    ids = [row[0] for row in place.sql(f"SELECT ORDER_ID FROM MYTABLE ORDER BY ORDER_ID LIMIT {count}")]
    first = int(place.sql("SELECT MAX(ORDER_ID) FROM MYTABLE")[0][0]) + 1
    updated = [f"{order},2026-01-06,moved,7,{stamp},\n" for order in ids[1:]]
    inserted = [f"{first + number},2026-01-05,new,1,{stamp},\n" for number in range(count)]
    rows = [f"{ids[0]},,,,{stamp},D\n", *updated, *inserted]
    for number in range(4):
        key = f"cluster/{time.time_ns()}-{number}.csv"
        s3.put_object(Bucket="landing", Key=key, Body=(HEADER + "".join(rows[number::4])).encode())


def left_in(s3: Any) -> list[str]:
    """The parts in the staging place; an empty object may stand for the folder."""
    return [entry["Key"] for entry in s3.list_objects_v2(Bucket=BUCKET).get("Contents", ()) if entry["Size"]]


# A cluster takes a minute and a half; what its parts do is shown without one in tir_dagster_tests/spark (places, choice, package).
@pytest.mark.long
@pytest.mark.parametrize("way", ["master", "connect"])
def test_load_detection_first_load_and_refresh_on_machines_that_share_no_folder(place, cluster, s3, drive, way):
    driver = started(way, cluster, drive)
    land(place, s3, 5)

    first, loaded, refreshed = (driver.run(*step, "--json") for step in STEPS)

    assert first["decision"] == "full"
    assert (loaded["rows_read"], loaded["rows_deleted"], loaded["rows_inserted"]) == (10, 1, 5)
    assert (refreshed["decision"], refreshed["rows_purged"], refreshed["rows_appended"]) == ("incremental", 5, 9)
    assert rows_published(place) == place.source_rows()
    assert left_in(s3) == []
    assert (
        f"starting Spark on {cluster.master}" if way == "master" else "using Spark at localhost:"
    ) in driver.outputs[0]
    assert [output for output in driver.outputs if TOKEN in output] == []
    assert [log for log in cluster.folder.rglob("stderr") if TOKEN in log.read_text(errors="replace")] == []


def started(way: str, cluster: Cluster, drive: Callable[..., Driver], **config: str) -> Driver:
    if way == "master":
        return drive(on_master(cluster, **config))
    address = cluster.start_connect_server(config, TOKEN)
    return drive(on_connect(address), SPARK_CONNECT_AUTHENTICATE_TOKEN=TOKEN)


def rows_published(place: Place) -> Counter:
    package = download(place.sandbox, "on_cluster", place.folder / "seen")
    return Counter(tuple(map(plain, row)) for row in rows_of(package, place.folder / "seen"))


@pytest.fixture
def warehouse(place: Place) -> Iterator[Warehouse]:
    """The warehouse of this file's sandbox, without faults in the end."""
    address = Warehouse(f"http://127.0.0.1:{place.sandbox.env['SNOWFLAKE_PORT']}")
    yield address
    requests.delete(f"{address.url}/sandbox/faults", timeout=30)


@pytest.mark.long
@pytest.mark.parametrize("way", ["master", "connect"])
def test_a_worker_that_is_killed_in_the_middle_of_each_step_changes_nothing(place, cluster, s3, drive, warehouse, way):
    for factor in (1, 2, 4, 8):
        place.sql(
            f"INSERT INTO MYTABLE SELECT ORDER_ID + {factor} * 10000000, * EXCLUDE (ORDER_ID) FROM MYTABLE "
            f"WHERE ORDER_ID < 10000000 * {factor}"
        )
    # A Python worker of a task ends with it: whoever talks to the warehouse or the staging place is at work.
    driver = started(way, cluster, drive, **{"spark.python.worker.reuse": "false"})
    land(place, s3, 10_000)
    storage = urlparse(place.sandbox.env["AWS_ENDPOINT_URL_S3"]).port
    ports = [int(place.sandbox.env["SNOWFLAKE_PORT"]), int(storage or 0)]
    for step in STEPS:
        driver.begin(*step, "--json")
        # Parts of results, and what tasks of a load ask, take long enough to be met.
        warehouse.break_next(kind="delay", path="results|login-request", times=1000, seconds=1.0)
        worker = wait_for(lambda: cluster.busy_worker(ports), f"a task of {step}", seconds=900, pause=0)
        cluster.kill(worker)
        requests.delete(f"{warehouse.url}/sandbox/faults", timeout=30)
        cluster.add_worker()
        driver.end()

    assert rows_published(place) == place.source_rows()
    assert left_in(s3) == []


@pytest.fixture
def kubernetes(place: Place, tmp_path: Path) -> Iterator[Kubernetes]:
    """A cluster with a secret that holds the keys of the staging place."""
    secrets = {("staging", name): place.sandbox.env[name] for name in S3_KEYS}
    with running_kubernetes(tmp_path / "pods", secrets) as cluster:
        yield cluster


@pytest.mark.long
def test_pods_get_what_the_block_says_and_no_secret_and_the_rows_are_right(place, kubernetes, s3, drive, tmp_path):
    python = bare_python(tmp_path / "python")
    config = {
        "spark.kubernetes.container.image": "registry.example.com/tir-executors:1",
        "spark.kubernetes.namespace": "spark",
        **{f"spark.kubernetes.executor.secretKeyRef.{name}": f"staging:{name}" for name in S3_KEYS},
        "spark.executorEnv.SAID": "by the block",
        "spark.executor.instances": "2",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": options(),
        "spark.pyspark.python": str(python),
        "spark.driver.host": "127.0.0.1",
    }
    settings = "".join(f"    {name}: {json.dumps(value)}\n" for name, value in config.items())
    driver = drive(f"spark:\n  master: {kubernetes.master}\n  staging: {STAGING}\n  config:\n{settings}")
    land(place, s3, 5)

    first, loaded, refreshed = (driver.run(*step, "--json") for step in STEPS)

    assert (first["decision"], loaded["rows_read"], refreshed["decision"]) == ("full", 10, "incremental")
    assert rows_published(place) == place.source_rows()
    assert left_in(s3) == []
    assert f"starting Spark on {kubernetes.master}" in driver.outputs[0]
    asked = json.dumps(kubernetes.pods)
    for pod in kubernetes.pods:
        (container,) = pod["spec"]["containers"]
        env = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert (pod["metadata"]["namespace"], container["image"]) == (
            "spark",
            config["spark.kubernetes.container.image"],
        )
        assert (env["SAID"], env["SPARK_EXECUTOR_MEMORY"]) == ("by the block", "512m")
    assert len(kubernetes.pods) == 2
    assert [
        name for name in ("SNOWFLAKE_PASSWORD", "TABLEAU_TOKEN_SECRET", *S3_KEYS) if place.sandbox.env[name] in asked
    ] == []


@pytest.mark.client
def test_executors_run_with_the_python_that_the_documentation_makes(place, cluster, s3, drive, tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "spark.md").read_text(encoding="utf-8")
    commands = text.partition("### Their Python")[2].partition("```sh\n")[2].partition("```")[0]
    own = {"/opt/tir": str(tmp_path / "tir"), "python3 ": f"{sys.executable} "}
    for written, here in own.items():
        commands = commands.replace(written, here)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["sh", "-ec", commands], check=True, cwd=tmp_path, env={**os.environ, "PATH": path}, timeout=600)
    driver = drive(on_master(cluster, **{"spark.pyspark.python": str(tmp_path / "tir" / "bin" / "python")}))
    land(place, s3, 5)

    assert [driver.run(*step, "--json")["seconds"] > 0 for step in STEPS] == [True] * 3

    assert rows_published(place) == place.source_rows()
