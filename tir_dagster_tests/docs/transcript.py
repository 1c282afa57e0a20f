"""Commands and their output in a page: fenced blocks of `console`, whose lines with `$ ` are commands and all others what they print.

`…` stands for any lines. Times, moments, seconds and widths of columns are not compared; all other numbers are.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from tir_dagster.cli.main import tir

_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:\+00:00|Z)?")
_SECONDS = re.compile(r"\d+(?:\.\d+)? (?:s\b|min(?= ago))")
_GAP = re.compile(r"  +")


@dataclass(frozen=True)
class Step:
    """A command and the lines that it prints."""

    command: str
    lines: tuple[str, ...]

    def matches(self, printed: str) -> bool:
        wanted = "".join(r"(?:.*\n)*" if line == "…" else f"{re.escape(comparable(line))}\n" for line in self.lines)
        return re.fullmatch(wanted, "".join(f"{comparable(line)}\n" for line in printed.splitlines())) is not None


def comparable(line: str) -> str:
    return _GAP.sub("  ", _SECONDS.sub("0.0 s", _MOMENT.sub("MOMENT", line.rstrip())))


def steps(page: str) -> Iterator[Step]:
    """Yield the commands of a page in their order."""
    for block in _BLOCK.findall(page):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            yield Step(command, tuple(lines))


_END = "=== the command ended with "


def play_page(page: str, folder: Path, env: Mapping[str, str], *, log: Path) -> list[tuple[Step, str]]:
    """Run all commands of a page in one shell, in which variables stay, up to one that fails; return what each of them printed.

    What goes to standard error is in the file `log`.
    """
    shown = list(steps(page))
    script = "".join(f"{step.command}\ncode=$?; echo '{_END}'$code; [ $code = 0 ] || exit $code\n" for step in shown)
    with log.open("w", encoding="utf-8") as problems:
        command = ["bash", "-c", script]
        done = subprocess.run(
            command, cwd=folder, env=dict(env), stdout=subprocess.PIPE, stderr=problems, text=True, check=False
        )
    printed = re.split(rf"^{_END}\d+\n", done.stdout, flags=re.MULTILINE)[: len(shown)]
    told = f"{printed[-1]}{log.read_text(encoding='utf-8')[-2000:]}"
    assert done.returncode == 0, (
        f"{done.stdout.count(_END)} commands ran, the last of them ended with {done.returncode}:\n{told}"
    )
    return list(zip(shown, printed, strict=True))


def play(step: Step, folder: Path, env: Mapping[str, str]) -> str:
    """Run the command in the folder and return what it printed: `tir` in this process, others in a shell."""
    words = shlex.split(os.path.expandvars(step.command))
    if words[0] == "tir":
        answer = CliRunner().invoke(tir, words[1:], env=env, catch_exceptions=False)
        code, out, problem = answer.exit_code, answer.stdout, answer.stderr
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        inherited = {**os.environ, **env, "PATH": path}
        done = subprocess.run(
            step.command, shell=True, cwd=folder, env=inherited, capture_output=True, text=True, check=False
        )
        code, out, problem = done.returncode, done.stdout, done.stderr
    assert code == 0, f"{step.command} ended with {code}:\n{out}{problem}"
    return out
