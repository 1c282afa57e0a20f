"""Play the cases: those that hit only one extract side by side, the others one after the other."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.torture.blows import ANY_TIME, DISK_BLOWS, OWN_BLOWS, Struck, World, strike
from tir_dagster_tests.torture.cases import Case
from tir_dagster_tests.torture.commands import Commands
from tir_dagster_tests.torture.subjects import Extract, Load, RolledBack, Subject

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What a case did: each blow, and what the clean run after them did, or what was wrong."""

    case: Case
    blows: tuple[Struck, ...]
    healed: str = ""
    failure: str = ""
    seconds: float = 0.0

    @staticmethod
    def of(value: Mapping[str, Any]) -> Result:
        """Return the result that was kept as JSON."""
        case = Case(**{**value["case"], "points": tuple(value["case"]["points"])})
        return Result(**{**value, "case": case, "blows": tuple(Struck(**blow) for blow in value["blows"])})

    @property
    def kills(self) -> int:
        return sum(blow.kills for blow in self.blows)


def make_subject(world: World, name: str) -> Subject:
    if name in ("load", "command"):
        # Not on the small disk, which Dagster's history of hundreds of commands would fill.
        roomy = world.folder.parent / "roomy"
        roomy.mkdir(exist_ok=True)
        return Load(world.sandbox, roomy) if name == "load" else Commands(world.sandbox, roomy)
    extract = (
        RolledBack(world.sandbox, world.folder) if name == "rollback" else Extract(world.sandbox, world.folder, name)
    )
    world.extracts.append(extract)
    return extract


def play_all(
    sandbox: Sandbox,
    folder: Path,
    cases: Sequence[Case],
    *,
    tell: Tell,
    keep: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Play all cases; a subject that failed is left alone. `keep` gets each result when it is there, from any thread.

    An interrupt ends it after the cases that are being played.
    """
    stop = threading.Event()
    world = World.of(sandbox, folder / "disk", small_disk=any(case.blow in DISK_BLOWS for case in cases))
    try:
        world.calm()
        # One after the other: they publish and declare tables.
        subjects = {name: make_subject(world, name) for name in dict.fromkeys(case.subject for case in cases)}
        by_subject: dict[str, list[Case]] = defaultdict(list)
        for case in cases:
            if case.blow in OWN_BLOWS:
                by_subject[case.subject].append(case)
        with ThreadPoolExecutor(max_workers=max(1, len(by_subject))) as pool:
            played = [
                pool.submit(_play_in_turn, world, subjects[name], own, tell, keep, stop)
                for name, own in by_subject.items()
            ]
            try:
                results = [result for future in played for result in future.result()]
            except BaseException:
                stop.set()
                raise
        failed = {result.case.subject for result in results if result.failure}
        for name, subject in subjects.items():
            if name not in failed:
                others = [case for case in cases if case.subject == name and case.blow not in OWN_BLOWS]
                results += _play_in_turn(world, subject, others, tell, keep, stop)
        return results
    finally:
        world.close()


def _play_in_turn(
    world: World,
    subject: Subject,
    cases: Sequence[Case],
    tell: Tell,
    keep: Callable[[Result], None],
    stop: threading.Event,
) -> list[Result]:
    results: list[Result] = []
    for case in cases:
        if stop.is_set():
            break
        result = play(world, subject, case)
        if stop.is_set() and result.failure:
            # Ctrl-C reaches the processes of the case, too.
            break
        results.append(result)
        keep(result)
        tell(f"{result.seconds:6.1f} s  {case}  →  {result.healed or f'FAILED: {result.failure}'}")
        if result.failure:
            break
    return results


def play(world: World, subject: Subject, case: Case) -> Result:
    """Strike, then run once cleanly; nothing may be wrong afterwards."""
    begun = time.monotonic()
    chance = random.Random(case.seed)
    struck: list[Struck] = []
    healed = failure = ""
    try:
        struck.extend(strike(world, subject, case.blow, point, chance) for point in case.points)
        if isinstance(subject, Extract) and _may_show_later_rows(case):
            subject.expect_full = True
        if case.blow not in OWN_BLOWS:
            world.calm()
        calmed = time.monotonic()
        healed = subject.heal()
        world.usual_seconds[subject.name] = time.monotonic() - calmed
        if isinstance(subject, Extract) and not subject.tags:
            subject.tag("dear")
        _check_reached(case, struck)
    except Exception as error:
        text = str(error) if isinstance(error, AssertionError) else ""
        failure = text or "".join(traceback.format_exception(error))[-3000:]
        healed = ""
    return Result(case, tuple(struck), healed, failure, round(time.monotonic() - begun, 1))


def _may_show_later_rows(case: Case) -> bool:
    """Whether Tableau's own refresh may have gone on after a kill, while the source changed for the next one.

    It shows rows of no version of ours then, as if somebody else had published.
    """
    return case.subject == "server" and not {"asked", ANY_TIME}.isdisjoint(case.points[:-1])


def _check_reached(case: Case, struck: Sequence[Struck]) -> None:
    """Raise if a run did not come to a point that it must come to."""
    at_points = zip(case.points, struck, strict=True)
    missed = [blow.ended for point, blow in at_points if point != ANY_TIME and not blow.reached]
    assert case.blow != "kill" or not missed or _may_show_later_rows(case), f"{missed}"
