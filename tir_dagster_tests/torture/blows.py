"""What is done to a run that stands at a crash point, or to the machine around it."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from tir_dagster.sandbox import processes
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import Admin
from tir_dagster_tests.torture.subjects import Extract, Subject, Victim, kill, named

ANY_TIME = "any time"
# A disk so small that a test may fill it.
DISK_BYTES = 64 << 20
_JUMP_HOURS = 25.0


@dataclass
class World:
    """The stand-ins, and the disk that extracts are on."""

    sandbox: Sandbox
    folder: Path
    # Whether the folder is a small disk of its own; elsewhere a limit on the size of files stands for a full disk.
    has_own_disk: bool = False
    extracts: list[Extract] = field(default_factory=list)
    usual_seconds: dict[str, float] = field(default_factory=dict)
    _settings_before: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(sandbox: Sandbox, folder: Path, *, small_disk: bool) -> World:
        """Make the folder, and mount a small disk on it if wanted and if this user may."""
        folder.mkdir(parents=True)
        if not small_disk:
            return World(sandbox, folder)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
        try:
            mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            mounted = False
        return World(sandbox, folder, mounted)

    def close(self) -> None:
        if self._settings_before:
            self._set_warehouse(self._settings_before)
        if self.has_own_disk:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False)

    @property
    def warehouse_url(self) -> str:
        return f"http://{self.sandbox.env['SNOWFLAKE_HOST']}:{self.sandbox.env['SNOWFLAKE_PORT']}"

    @property
    def tableau(self) -> Admin:
        return Admin(self.sandbox.tableau_url)

    def calm(self) -> None:
        """End all faults; the transaction of a process that is gone blocks others for a moment only."""
        for url in (self.sandbox.tableau_url, self.warehouse_url):
            requests.delete(f"{url}/sandbox/faults", timeout=30).raise_for_status()
        if not self._settings_before:
            answer = requests.get(f"{self.warehouse_url}/sandbox/settings", timeout=30)
            self._settings_before = {"idle_transaction_seconds": answer.json()["idle_transaction_seconds"]}
        self._set_warehouse({"idle_transaction_seconds": 0.2})

    def _set_warehouse(self, settings: Mapping[str, Any]) -> None:
        requests.put(f"{self.warehouse_url}/sandbox/settings", json=settings, timeout=30).raise_for_status()

    def pid(self, server: str) -> int:
        pid = processes.status(self.sandbox.home)[server].pid
        assert pid is not None, f"{server} does not run"
        return pid


@dataclass(frozen=True)
class Struck:
    """What a blow did: how many processes it killed, and how the run ended that it hit."""

    reached: bool
    kills: int = 0
    ended: str = "killed"


Blow = Callable[[World, Subject, Victim, random.Random], Struck]


def _ended(victim: Victim) -> str:
    """Let the victim go on to its end; return whether it was done or failed."""
    end = victim.end()
    assert victim.told is not None, "it died"
    assert victim.told[0] != "failed unexpectedly", f"it ended with an error that nobody explains: {victim.trace}"
    return "done" if isinstance(end, list) else f"failed: {end.split(':')[0]}"


def _gone_on(victim: Victim, kills: int = 0) -> Struck:
    victim.go_on()
    return Struck(reached=True, kills=kills, ended=_ended(victim))


def kill_run(world: World, subject: Subject, victim: Victim, chance: random.Random) -> Struck:
    """Kill the run itself."""
    del world, subject, chance
    return Struck(reached=True, kills=int(victim.kill()))


def kill_hyperd(world: World, subject: Subject, victim: Victim, chance: random.Random) -> Struck:
    """Kill hyperd behind the run's back."""
    del world, chance
    return _gone_on(victim, kill(named(subject.marked(), "hyperd")))


def kill_tableau(world: World, subject: Subject, victim: Victim, chance: random.Random) -> Struck:
    """Kill the Tableau stand-in; it comes back at once."""
    del subject, chance
    settings = requests.get(f"{world.sandbox.tableau_url}/sandbox/settings", timeout=30).json()
    kills = kill([world.pid("tableau")])
    processes.start(world.sandbox.home)
    world.tableau.set(clock_offset_seconds=settings["clock_offset_seconds"])
    return _gone_on(victim, kills)


def kill_warehouse(world: World, subject: Subject, victim: Victim, chance: random.Random) -> Struck:
    """Kill the warehouse stand-in; it comes back at once."""
    del subject, chance
    kills = kill([world.pid("warehouse")])
    processes.start(world.sandbox.home)
    world.calm()
    for extract in world.extracts:
        extract.connect()
    return _gone_on(victim, kills)


def freeze_tableau(world: World, subject: Subject, victim: Victim, chance: random.Random) -> Struck:
    """Stop the Tableau stand-in for a while: nobody answers, nothing is refused."""
    del subject
    pid = [world.pid("tableau")]
    kill(pid, signal.SIGSTOP)
    try:
        victim.go_on()
        time.sleep(chance.uniform(0.5, 3))
    finally:
        kill(pid, signal.SIGCONT)
    return Struck(reached=True, ended=_ended(victim))


def cut_network(world: World, subject: Subject, victim: Victim, chance: random.Random) -> Struck:
    """Reset every connection to Tableau for minutes of the server's clock."""
    del subject
    world.tableau.fault("cut", times=chance.choice((1, 3, 100)), when=chance.choice(("before", "after", "during")))
    try:
        return _gone_on(victim)
    finally:
        world.tableau.clear_faults()


def fill_disk(world: World, subject: Subject, victim: Victim, chance: random.Random) -> Struck:
    """Leave only some bytes of space, or none."""
    if not world.has_own_disk:
        return _limit_files(subject, victim, chance)
    ballast = world.folder / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        os.truncate(ballast, max(0, ballast.stat().st_size - chance.choice((0, 4096, 32768, 262144))))
        return _gone_on(victim)
    finally:
        ballast.unlink()


def _limit_files(subject: Subject, victim: Victim, chance: random.Random) -> Struck:
    pid = victim.process.pid
    assert pid is not None
    limit = chance.choice((0, 512, 4096, 65536))
    for limited in (pid, *named(subject.marked(), "hyperd")):
        resource.prlimit(limited, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return _gone_on(victim)


def forbid_writing(world: World, subject: Subject, victim: Victim, chance: random.Random) -> Struck:
    """Make the state folder read-only."""
    del chance
    assert isinstance(subject, Extract)
    if world.has_own_disk:
        remount = ["mount", "-o", "remount,{}", str(world.folder)]
        done = subprocess.run([part.format("ro") for part in remount], capture_output=True, check=False)
        if done.returncode:
            # Somebody has a file open to write: try at another point.
            victim.kill()
            return Struck(reached=False)
        try:
            return _gone_on(victim)
        finally:
            subprocess.run([part.format("rw") for part in remount], check=True)
    folders = [folder for folder in (subject.folder, *subject.folder.rglob("*")) if folder.is_dir()]
    for folder in folders:
        folder.chmod(0o500)
    try:
        return _gone_on(victim)
    finally:
        for folder in folders:
            if folder.is_dir():
                folder.chmod(0o700)


def move_clock(world: World, subject: Subject, victim: Victim, chance: random.Random) -> Struck:
    """Let the server's clock jump ahead of ours by more than a day."""
    del subject, chance
    known = requests.get(f"{world.sandbox.tableau_url}/sandbox/settings", timeout=30).json()["clock_offset_seconds"]
    world.tableau.set(clock_offset_seconds=known + _JUMP_HOURS * 3600)
    return _gone_on(victim)


def publish_between(world: World, subject: Subject, victim: Victim, chance: random.Random) -> Struck:
    """Somebody else publishes the datasource."""
    del world, chance
    assert isinstance(subject, Extract)
    subject.publish_foreign()
    subject.expect_full = True
    return _gone_on(victim)


def edit_tags(world: World, subject: Subject, victim: Victim, chance: random.Random) -> Struck:
    """A person tags the datasource."""
    del world
    assert isinstance(subject, Extract)
    subject.tag(f"tag {chance.randrange(1000)}")
    return _gone_on(victim)


def run_twice(world: World, subject: Subject, victim: Victim, chance: random.Random) -> Struck:
    """Start a second run of the same extract while the first one stands there; perhaps kill the first one."""
    del world
    second = subject.victim(chance)
    kills = 0
    if chance.random() < 0.5:
        kills = int(victim.kill())
    else:
        victim.go_on()
        assert _ended(victim) == "done", f"the first of two runs {victim.told}"
    ended = _ended(second)
    assert ended == "done", f"the second of two runs {ended}\n{second.trace}"
    return Struck(reached=True, kills=kills, ended=ended)


def kill_spark(world: World, subject: Subject, victim: Victim, chance: random.Random) -> Struck:
    """Kill Spark's JVM some time after it started, or its Python workers as soon as there are some."""
    del world
    program = chance.choice(("java", "python"))
    while not (pids := named(subject.marked(), program)) and victim.is_at_work():
        time.sleep(0.02)
    if program == "java":
        victim.is_at_work(seconds=chance.uniform(0, 2))
    kills = kill(pids)
    return Struck(reached=bool(pids), kills=kills, ended=_ended(victim))


BLOWS: Mapping[str, Blow] = {
    "kill": kill_run,
    "kill hyperd": kill_hyperd,
    "kill Tableau": kill_tableau,
    "kill the warehouse": kill_warehouse,
    "kill Spark": kill_spark,
    "freeze Tableau": freeze_tableau,
    "cut the network": cut_network,
    "fill the disk": fill_disk,
    "forbid writing": forbid_writing,
    "move the clock": move_clock,
    "publish in between": publish_between,
    "edit tags": edit_tags,
    "run twice": run_twice,
}
# These need a disk of their own.
DISK_BLOWS = ("fill the disk", "forbid writing")
# These hit only the run itself, or its own hyperd: several extracts may be hit at a time.
OWN_BLOWS = ("kill", "kill hyperd")


def strike(world: World, subject: Subject, blow: str, point: str, chance: random.Random) -> Struck:
    """Give the subject something to do, start a run, and hit it at the point."""
    subject.change(chance)
    task: dict[str, Any] = {} if point == ANY_TIME else {"point": point}
    if blow == "kill Spark":
        task["spark"] = True
    elif blow == "move the clock":
        task["hours_ahead"] = chance.choice((-_JUMP_HOURS, _JUMP_HOURS))
    victim = subject.victim(chance, **task)
    if blow == "kill Spark":
        return kill_spark(world, subject, victim, chance)
    if point != ANY_TIME:
        if victim.wait_for_point():
            return BLOWS[blow](world, subject, victim, chance)
        return Struck(reached=False, ended=f"never came to {point}: {victim.told}")
    # A clean run is two runs and a look at the result.
    seconds = chance.uniform(0, world.usual_seconds.get(subject.name, 6.0) * 0.4)
    still_at_work = victim.is_at_work(seconds=seconds)
    if blow == "kill":
        return Struck(reached=still_at_work, kills=int(victim.kill()), ended="it had ended before")
    kills = kill(named(subject.marked(), "hyperd"))
    return Struck(reached=True, kills=kills, ended=_ended(victim))
