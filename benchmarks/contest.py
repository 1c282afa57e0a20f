"""The contest: every way brings its own datasource up to date after the same change, and is then compared with the source.

Each result is written as soon as it exists. What failed is a result, too.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from benchmarks import script_2021
from benchmarks.bags import compare_published, write_source
from benchmarks.contest_report import Contest, Result
from benchmarks.contest_ways import OURS, RECENT, SCATTERED, SCENARIOS, WAYS, Way
from benchmarks.kept import KeptValues
from benchmarks.report import QUIET_PERIOD
from benchmarks.rivals import Task, run_rival
from benchmarks.run import Bench, change_mix, measuring
from tir_dagster.hyper.engine import close_shared_engine
from tir_dagster.orchestration.interrupts import StoppedError
from tir_dagster.sandbox import sample
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import parse_specs

RESULTS = "results.jsonl"
NEWEST_MONTHS = 2
# What one run at 10,000,000 rows can afford more than once.
REPEATED_BELOW = 60.0
# Two revisions of every datasource on the stand-in, which would keep 25.
REVISIONS = 2
JOB_SECONDS = 7_200
_SPEC = """\
extracts:
  - name: {name}
    source: MYDB.MYSCHEMA.MYTABLE
    delivery: {delivery}
    {more}
    datasource:
      project: {project}
      name: {name}
      credentials: {{username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD}}
"""
_KEYED = """row_key: ORDER_ID
    slices: {{column: ORDER_DATE, by: month, start: {start}}}
    changes: {{watermark: UPDATED_AT, look_back: 0 seconds}}"""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What a run of the contest measures; `--resume` goes on with a run that was asked for the same."""

    rows: int
    changed: float
    seed: int
    repetitions: int
    ways: tuple[str, ...]
    limit: float

    @property
    def keys(self) -> int:
        return max(8, round(self.rows * self.changed / 100))


@dataclass(frozen=True)
class Turn:
    """One repetition of one way."""

    scenario: str
    round: int
    way: Way

    @property
    def id(self) -> tuple[str, int, str]:
        return (self.scenario, self.round, self.way.name)


def turns_of(asked: Asked, scenario: str, number: int, known: Mapping[tuple[str, int, str], Result]) -> list[Turn]:
    """The ways of one round. Each begins with another one; a way that was slow in the first round, or failed, is not repeated."""
    ways = [way for way in WAYS if scenario in way.scenarios and way.name in asked.ways]
    if number > 1:
        firsts = {way.name: known.get((scenario, 1, way.name)) for way in ways}
        ways = [way for way in ways if (first := firsts[way.name]) and first.ok and first.total <= REPEATED_BELOW]
    shift = (number - 1) * 3 % max(len(ways), 1)
    return [Turn(scenario, number, way) for way in (*ways[shift:], *ways[:shift])]


def run_contest(folder: Path, asked: Asked, store: Store, progress: Say) -> Contest:
    """Run what is not in the store yet, and return everything that is."""
    with measuring(folder, progress) as bench:
        arena = Arena(folder, bench, asked, progress)
        arena.begin()
        clock = Clock(asked, store, progress)
        for scenario in SCENARIOS:
            for number in range(1, asked.repetitions + 1):
                turns = turns_of(asked, scenario, number, store.known)
                open_turns = [turn for turn in turns if turn.id not in store.known]
                failed: dict[str, str] = {}
                if open_turns:
                    failed = arena.prepare([turn.way for turn in open_turns], fresh=number == 1)
                arena.change(scenario)
                if open_turns:
                    arena.look_at_source()
                for turn in open_turns:
                    error = failed.get(turn.way.name)
                    store.add(Result(*turn.id, error=f"before the change: {error}") if error else arena.take(turn))
                    clock.tell(turn)
                arena.forget(_not_needed(asked, scenario, number, store))
    return store.contest()


def _not_needed(asked: Asked, scenario: str, number: int, store: Store) -> list[Way]:
    """Ways whose files can go: no later round has them."""
    later = [(scenario, following) for following in range(number + 1, asked.repetitions + 1)]
    if scenario == SCATTERED:
        later.append((RECENT, 1))
    needed = {turn.way.name for place in later for turn in turns_of(asked, *place, store.known)}
    return [way for way in WAYS if way.name not in needed]


class Store:
    """The results of a run, kept as soon as they exist."""

    def __init__(self, folder: Path, asked: Asked, setting: Mapping[str, Any], *, resume: bool) -> None:
        self._kept = KeptValues(folder / RESULTS, asdict(asked), setting, resume=resume)
        results = [Result.from_dict(value) for value in self._kept.values]
        # What failed gets another chance when a run is resumed.
        self.known = {result.id: result for result in results if result.ok}
        self._kept.keep_only(asdict(result) for result in self.known.values())

    def add(self, result: Result) -> None:
        self.known[result.id] = result
        self._kept.add(asdict(result))

    def contest(self) -> Contest:
        return Contest(**self._kept.head, results=tuple(self.known.values()))


class Clock:
    """Says how much is done, and about how long the rest will take."""

    def __init__(self, asked: Asked, store: Store, progress: Say) -> None:
        self._asked, self._store, self._progress = asked, store, progress
        self._begun, self._done = time.monotonic(), 0

    def tell(self, turn: Turn) -> None:
        self._done += 1
        rounds = [(scenario, number) for scenario in SCENARIOS for number in range(1, self._asked.repetitions + 1)]
        left = [
            open_turn
            for place in rounds
            for open_turn in turns_of(self._asked, *place, {**self._store.known, **self._hoped(turn)})
            if open_turn.id not in self._store.known
        ]
        each = (time.monotonic() - self._begun) / self._done
        # By what a way took before; what was not run yet takes as long as a turn does on average.
        expected = sum(self._seconds(open_turn, each) for open_turn in left)
        self._progress(f"{self._done} done, {len(left)} left: about {expected / 60:,.0f} min")

    def _hoped(self, turn: Turn) -> dict[tuple[str, int, str], Result]:
        """Rounds to come have no first results yet: as if all ways were quick there."""
        quick = Result(turn.scenario, 1, turn.way.name)
        firsts = [replace(quick, scenario=scenario, way=way.name) for scenario in SCENARIOS for way in WAYS]
        return {result.id: result for result in firsts if result.id not in self._store.known}

    def _seconds(self, turn: Turn, otherwise: float) -> float:
        known = [result.wall for result in self._store.known.values() if result.way == turn.way.name and result.ok]
        return max(known, default=otherwise)


def _text(error: Exception) -> str:
    """The error in one line."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def extract_of(way: Way, start: str) -> ExtractSpec:
    """The extract that one of our ways keeps equal to the sample; `start` is the first month."""
    keyed = way.delivery != "trigger"
    more = _KEYED.format(start=start) if keyed else "policy: auto"
    text = _SPEC.format(name=way.shown_name, delivery=way.delivery, more=more, project=sample.PROJECT)
    (spec,) = parse_specs(text, f"{way.name}.yaml")
    return replace(spec, changes=replace(spec.changes, detector=way.detector)) if keyed else spec  # type: ignore[arg-type]


class Arena:
    """One table, one datasource for each way, and the source as it is after the last change."""

    def __init__(self, folder: Path, bench: Bench, asked: Asked, progress: Say) -> None:
        self._folder, self._bench, self._asked, self._progress = folder / "contest", bench, asked, progress
        self._source = self._folder / "source.hyper"
        self._specs: dict[str, ExtractSpec] = {}
        self._project = self._day = self._since = ""
        self._changes = 0

    def begin(self) -> None:
        """Seed the table, and let the stand-in keep no more revisions than the disk has room for."""
        self._folder.mkdir()
        settings = {"revisions_kept": REVISIONS}
        answer = requests.put(f"{self._bench.env['TABLEAU_SERVER_URL']}/sandbox/settings", json=settings, timeout=30)
        answer.raise_for_status()
        self._bench.warm_up(("republish",))
        self._bench.seed(self._asked.rows, self._asked.seed)
        with script_2021.signed_in(self._bench.env) as server:
            (project,) = [item for item in TSC.Pager(server.projects) if item.name == sample.PROJECT]
            self._project = str(project.id)
        self._declare()

    def _declare(self) -> None:
        first, last = self._bench.query(f"SELECT MIN(ORDER_DATE), MAX(ORDER_DATE) FROM {sample.TABLE}")[0]
        # The first day of the newest months: what the script of 2021 was set to load again.
        day = last.replace(day=1)
        for _ in range(NEWEST_MONTHS - 1):
            day = (day - timedelta(days=1)).replace(day=1)
        self._day = day.isoformat()
        self._specs = {way.name: extract_of(way, f"{first:%Y-%m}") for way in WAYS if way.family == OURS}

    def prepare(self, ways: Sequence[Way], *, fresh: bool) -> dict[str, str]:
        """Bring the datasources of these ways up to date: whatever they show, the change that follows is all that is new.

        In later rounds others' datasources stay as their ways have left them, unless this process has not made them yet.
        Return the errors of the ways that cannot begin.
        """
        self._since = str(self._bench.query(f"SELECT MAX(UPDATED_AT) FROM {sample.TABLE}")[0][0])
        wanting = [way for way in ways if fresh or not self._work(way).is_dir()]
        steps: list[tuple[Callable[[list[Way]], None], list[Way]]] = [
            (self._make_tableau_datasources, [way for way in wanting if way.datasource == "tableau"]),
            (self._keep_files, [way for way in wanting if way.datasource == "local"]),
            *((self._bring_up_to_date, [way]) for way in ways if way.family == OURS),
        ]
        failed: dict[str, str] = {}
        for step, concerned in steps:
            try:
                step([way for way in concerned if way.name not in failed])
            except StoppedError:
                raise
            except Exception as error:
                self._progress(f"failed: {_text(error)}")
                failed |= {way.name: _text(error) for way in concerned}
        for way in ways:
            self._work(way).mkdir(parents=True, exist_ok=True)
        return failed

    def _bring_up_to_date(self, ways: list[Way]) -> None:
        for way in ways:
            self._progress(f"{way.title}: up to date before the change")
            self._bench.play(self._specs[way.name], "by_key")

    def _keep_files(self, ways: list[Way]) -> None:
        """What a script has kept of its last run: a Hyper file with the rows of now."""
        if ways:
            self._progress("writing the files that scripts have kept")
            write_source(self._bench.env, self._source)
        for way in ways:
            self._work(way).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._source, self._work(way) / "local.hyper")

    def _make_tableau_datasources(self, ways: list[Way]) -> None:
        """Let Tableau's stand-in load one, and publish what it made under the names of the others."""
        # What is published once stays ours.
        ways = [way for way in ways if way.family != OURS or not self._work(way).is_dir()]
        if not ways:
            return
        first, *others = ways
        self._progress("Tableau's own full refresh makes the datasources that belong to Tableau")
        sample.seed_datasource(self._bench.env, timeout=JOB_SECONDS, name=first.shown_name)
        with script_2021.signed_in(self._bench.env) as server:
            datasource = script_2021.named(server, first.shown_name)
            package = Path(server.datasources.download(datasource.id, filepath=str(self._folder / "tableau")))
            for way in others:
                script_2021.publish(server, self._project, way.shown_name, package, self._bench.env)
        package.unlink()

    def change(self, scenario: str) -> None:
        self._changes += 1
        self._progress(f"changing {self._asked.keys:,} orders: {SCENARIOS[scenario]}")
        recent = NEWEST_MONTHS if scenario == RECENT else None
        sample.change_table(self._bench.env, seed=self._changes, mix=change_mix(self._asked.keys), recent=recent)

    def look_at_source(self) -> None:
        self._progress("writing the source as it is now, to compare with")
        write_source(self._bench.env, self._source)

    def take(self, turn: Turn) -> Result:
        """Let one way do its work, and compare what it has published."""
        way, begun = turn.way, time.monotonic()
        self._progress(f"{turn.scenario}, round {turn.round}: {way.family}, {way.title}")
        result = Result(turn.scenario, turn.round, way.name)
        try:
            result = self._ours(way, result) if way.family == OURS else self._other(way, result)
            difference = compare_published(
                self._bench.env, project=sample.PROJECT, name=way.shown_name, source=self._source
            )
            result = replace(result, **asdict(difference))
        except StoppedError:
            raise
        except Exception as error:
            result = replace(result, error=_text(error))
        verdict = result.error or f"{result.total:.1f} s; {result.orders:,} orders wrong or missing"
        self._progress(f"{way.family}, {way.title}: {verdict}")
        return replace(result, wall=round(time.monotonic() - begun, 1))

    def _ours(self, way: Way, result: Result) -> Result:
        case = self._bench.play(self._specs[way.name], way.refresh).case
        return replace(
            result,
            seconds=round(case.seconds, 3),
            server=round(case.server, 3),
            quiet=round(case.stage(QUIET_PERIOD).seconds, 3),
            steps={stage.name: round(stage.seconds, 3) for stage in case.stages if stage.name != QUIET_PERIOD},
            bytes_published=case.stage("publish").bytes or 0,
            peak=case.memory.get("python"),
        )

    def _other(self, way: Way, result: Result) -> Result:
        work = self._work(way) / "work"
        work.mkdir()
        task = Task(
            datasource=way.shown_name,
            project_id=self._project,
            table=sample.TABLE,
            since=self._since,
            day=self._day,
            folder=str(work),
            local=str(self._work(way) / "local.hyper"),
        )
        job = self._bench.stand_ins.forget()
        # Files that scripts keep are opened by Hyper processes of their own.
        close_shared_engine()
        try:
            done = run_rival(way.name, task, limit=self._asked.limit)
        finally:
            shutil.rmtree(work)
        server, _ = self._bench.stand_ins.work(job)
        wall = sum(done.seconds.values())
        server = min(server, wall)
        return replace(
            result,
            seconds=round(wall - server, 3),
            server=round(server, 3),
            steps=done.seconds,
            bytes_published=done.bytes_published,
            peak=done.peak,
        )

    def forget(self, ways: Sequence[Way]) -> None:
        """Delete what is kept for these ways, here and on the server."""
        for way in [way for way in ways if self._work(way).is_dir()]:
            self._bench.remove(way.shown_name)
            shutil.rmtree(self._work(way))

    def _work(self, way: Way) -> Path:
        return self._folder / way.name
