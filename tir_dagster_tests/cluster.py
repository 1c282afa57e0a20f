"""A standalone Spark cluster of this machine whose workers share nothing with the driver: own folders, own environment, own Python.

Their Python has the packages that `tir spark requirements` lists, but not tir_dagster: its code has to travel. Rows can only reach the
driver through the staging place.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

from tir_dagster_tests.jvm import options
from tir_dagster_tests.processes import answers_on, free_port, wait_for

_SPARK_HOME = Path(pyspark.__file__).parent
_CLASSES = "org.apache.spark.deploy"
# What the machine of an executor has; of the driver's variables it gets none.
_OF_THE_MACHINE = ("PATH", "JAVA_HOME", "LANG", "LC_ALL")
STARTED_SECONDS = 300.0


def bare_python(folder: Path) -> Path:
    """Make a Python that finds the packages of this one, but neither tir_dagster nor what is installed in editable form."""
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # Paths in it are used, but not the .pth files in those: these are what leads to tir_dagster.
    (packages / "packages.pth").write_text(sysconfig.get_paths()["purelib"], encoding="utf-8")
    return folder / "bin" / "python"


@dataclass
class Cluster:
    """One master and two workers, each with room for an executor of two applications; a worker can be killed, and another one started."""

    folder: Path
    python: Path
    # What the executors' machines know by themselves, such as credentials of the object store.
    env: Mapping[str, str]
    port: int = field(default_factory=free_port)
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def master(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a session on it, as a user writes them."""
        return {
            "spark.pyspark.python": str(self.python),
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.cores.max": "2",
            "spark.executor.extraJavaOptions": options(),
            "spark.driver.host": "127.0.0.1",
        }

    def start(self) -> None:
        self.others.append(self._launch("master", "master.Master", "--host", "127.0.0.1", "--port", str(self.port)))
        wait_for(lambda: answers_on(self.port), "Spark's master", seconds=STARTED_SECONDS, log=self.log("master"))
        for _ in range(2):
            self.add_worker()

    def add_worker(self) -> None:
        name = f"worker{len(list(self.folder.glob('worker*')))}"
        resources = ("--cores", "2", "--memory", "1200m", "--work-dir", str(self.folder / name / "work"))
        self.workers.append(self._launch(name, "worker.Worker", "--host", "127.0.0.1", *resources, self.master))
        registered = b"Successfully registered with master"
        wait_for(lambda: registered in self.log(name).read_bytes(), name, seconds=STARTED_SECONDS, log=self.log(name))

    def start_connect_server(self, settings: Mapping[str, str], token: str) -> str:
        """Start a Spark Connect server whose executors are this cluster's; return its address."""
        port = free_port()
        conf = {
            **self.settings,
            **settings,
            "spark.master": self.master,
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(port),
        }
        env = {"SPARK_CONNECT_AUTHENTICATE_TOKEN": token, "PYSPARK_PYTHON": str(self.python)}
        flags = [f"--conf={name}={value}" for name, value in conf.items()]
        server = "org.apache.spark.sql.connect.service.SparkConnectServer"
        command = [str(_SPARK_HOME / "bin" / "spark-submit"), f"--class={server}", *flags, "spark-internal"]
        name = f"connect{len(self.others)}"
        self.others.append(self._run(name, command, env))
        wait_for(lambda: answers_on(port), "the Connect server", seconds=STARTED_SECONDS, log=self.log(name))
        return f"sc://localhost:{port}"

    def log(self, name: str) -> Path:
        return self.folder / name / "log"

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        """End a worker with its executors at once, as a machine that loses its power does."""
        self.workers.remove(worker)
        for pid in (worker.pid, *descendants(worker.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        worker.wait()

    def busy_worker(self, ports: Sequence[int]) -> subprocess.Popen[bytes] | None:
        """Return a worker one of whose tasks talks to a server on one of these ports."""
        for worker in self.workers:
            if any(talks_to(pid, ports) for pid in descendants(worker.pid)):
                return worker
        return None

    def stop(self) -> None:
        for worker in list(self.workers):
            self.kill(worker)
        for process in self.others:
            process.kill()
            process.wait()

    def _launch(self, name: str, kind: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [str(_SPARK_HOME / "bin" / "spark-class"), f"{_CLASSES}.{kind}", "--webui-port", "0", *arguments]
        return self._run(name, command, {"SPARK_DAEMON_MEMORY": "256m"})

    def _run(self, name: str, command: list[str], more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        java = {"SPARK_HOME": str(_SPARK_HOME), "SPARK_DAEMON_JAVA_OPTS": options(), "SPARK_SUBMIT_OPTS": options()}
        return run_on_machine(self.folder / name, command, {**java, **self.env, **more})


def run_on_machine(own: Path, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Run a command as on a machine of its own: its folder is all that it knows of this one. Its log is `log` in there."""
    (own / "tmp").mkdir(parents=True)
    machine = {name: os.environ[name] for name in _OF_THE_MACHINE if name in os.environ}
    places = {"HOME": str(own), "TMPDIR": str(own / "tmp"), "SPARK_LOCAL_DIRS": str(own / "local")}
    with (own / "log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=own, env={**machine, **places, **env}, stdout=log, stderr=subprocess.STDOUT
        )


@contextmanager
def running_cluster(folder: Path, env: Mapping[str, str]) -> Iterator[Cluster]:
    cluster = Cluster(folder, bare_python(folder / "python"), env)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def descendants(pid: int) -> list[int]:
    """Return the processes below this one, as Linux knows them."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name before it may hold spaces and brackets.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    return _all_below(children, pid)


def _all_below(children: Mapping[int, list[int]], pid: int) -> list[int]:
    return [one for child in children.get(pid, []) for one in (child, *_all_below(children, child))]


def talks_to(pid: int, ports: Sequence[int]) -> bool:
    """Return whether the process has an open connection to one of these ports of this machine."""
    sockets = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "01" and int(fields[2].rpartition(":")[2], 16) in ports:
            sockets.add(f"socket:[{fields[9]}]")
    try:
        return any(str(handle.readlink()) in sockets for handle in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
