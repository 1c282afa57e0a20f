"""The options of every JVM that tests start; as a program it prints those that the archive of classes is made with."""

from __future__ import annotations

from pathlib import Path

# Small data in short-lived JVMs, where compiling well takes longer than it saves. An archive fits only the same ones.
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Made by `tir warm-up`, which make calls before the tests.
_ARCHIVES = Path(__file__).parents[1] / "build" / "classes" / "spark"


def options() -> str:
    """Those options, and the archive if there is one; a JVM that it does not fit passes it over."""
    archive = next(_ARCHIVES.glob("*.jsa"), None)
    return f'{_QUICK} "-XX:SharedArchiveFile={archive}" -Xshare:auto -Xlog:disable' if archive else _QUICK


if __name__ == "__main__":
    print(_QUICK)
