"""The cases of a torture: which subject is hit by what, where, and how often in a row before the clean run."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tir_dagster_tests.torture.blows import ANY_TIME, OWN_BLOWS
from tir_dagster_tests.torture.subjects import POINTS

_EXTRACTS = ("republish", "patch", "server")
# Each hits every one of these subjects at that share of its points, in a run of a thousand kills.
_DISTURBANCES = (
    "kill Tableau",
    "kill the warehouse",
    "freeze Tableau",
    "cut the network",
    "fill the disk",
    "forbid writing",
    "move the clock",
    "publish in between",
    "edit tags",
    "run twice",
)
# Of all kills, at a named point, at any time, of hyperd; the others are of the stand-ins and Spark.
_AT_POINTS, _ANY_TIME, _HYPERD = 0.66, 0.2, 0.08
_LONGEST_CHAIN = 3


@dataclass(frozen=True)
class Case:
    """One or more blows of a kind, each at its point, and then a clean run."""

    subject: str
    blow: str
    points: tuple[str, ...]
    seed: int

    def __str__(self) -> str:
        return f"{self.subject}: {self.blow}: {', '.join(self.points)}: {self.seed}"

    @staticmethod
    def parse(text: str) -> Case:
        subject, blow, points, seed = (part.strip() for part in text.split(":"))
        return Case(subject, blow, tuple(point.strip() for point in points.split(",")), int(seed))

    @property
    def command(self) -> str:
        return f"python -m tir_dagster_tests.torture --case '{self}'"

    def concerns(self, only: str) -> bool:
        return not only or only in (self.subject, self.blow, *self.points)


def cases(kills: int, seed: int, *, only: str = "") -> list[Case]:
    """Return the cases of about so many kills; those that hit the shared stand-ins come last."""
    chance = random.Random(seed)
    chosen = [*_kill_cases(kills, chance), *_disturbing_cases(kills, chance)]
    return [case for case in chosen if case.concerns(only)]


def short_cases() -> list[Case]:
    """Return a few cases that take seconds: each point of the commonest delivery and of a load, several in a row."""
    chained = [
        Case(subject, "kill", tuple(chunk), seed)
        for subject, size in (("republish", 6), ("load", 3))
        for seed, chunk in enumerate(_chunks(POINTS[subject], size))
    ]
    return [*chained, Case("republish", "kill", (ANY_TIME, ANY_TIME), 7), Case("load", "kill", (ANY_TIME,), 8)]


def _chunks(points: Sequence[str], size: int) -> Iterable[Sequence[str]]:
    # The last ones first: each recovers from the one before, and is killed there.
    backwards = points[::-1]
    return [backwards[start : start + size] for start in range(0, len(backwards), size)]


def _kill_cases(kills: int, chance: random.Random) -> list[Case]:
    each = max(1, round(kills * _AT_POINTS / sum(map(len, POINTS.values()))))
    by_chance = max(1, round(kills * _ANY_TIME / len(POINTS)))
    by_hyperd = max(1, round(kills * _HYPERD / len(_EXTRACTS)))
    chosen: list[Case] = []
    for subject, points in POINTS.items():
        # A command takes as long as several of the others.
        part = 10 if subject == "command" else 1
        blows = [*points] * max(1, each // part) + [ANY_TIME] * max(1, by_chance // part)
        chance.shuffle(blows)
        while blows:
            # Not several rollbacks: one that landed leaves nothing to roll back to.
            chain = blows[: 1 if subject in ("rollback", "command") else chance.randint(1, _LONGEST_CHAIN)]
            del blows[: len(chain)]
            chosen.append(Case(subject, "kill", tuple(chain), chance.randrange(10**6)))
        if subject == "server":
            # Rows are missing on the server then, and the next run brings them back first.
            returns = ("landed", "returned")
            chosen += [Case(subject, "kill", returns, chance.randrange(10**6)) for _ in range(each)]
        if subject in _EXTRACTS:
            places = [chance.choice((*_with_hyperd(points), ANY_TIME)) for _ in range(by_hyperd)]
            chosen += [Case(subject, "kill hyperd", (place,), chance.randrange(10**6)) for place in places]
    return chosen


def _with_hyperd(points: Sequence[str]) -> list[str]:
    """Return the points at which hyperd runs."""
    first, last = points.index("compared"), points.index("published")
    return list(points[first : last + 1])


def _disturbing_cases(kills: int, chance: random.Random) -> list[Case]:
    count = max(1, round(kills / 1000 * 8))
    chosen = []
    for blow in _DISTURBANCES:
        for subject in _EXTRACTS:
            for _ in range(count):
                point = chance.choice(POINTS[subject])
                chosen.append(Case(subject, blow, (point,), chance.randrange(10**6)))
    chosen += [
        Case("republish", "kill Spark", (ANY_TIME,), chance.randrange(10**6)) for _ in range(max(1, round(kills / 50)))
    ]
    assert not any(case.blow in OWN_BLOWS for case in chosen)
    return chosen
