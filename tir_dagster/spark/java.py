"""Java for Spark: looked up where Spark looks, to report a missing or old Java before Spark fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tir_dagster.errors import SourceError

OLDEST = 17
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_SECONDS = 30


def require_java(env: Mapping[str, str]) -> None:
    """Raise SourceError if Spark cannot start here for lack of Java; a Spark elsewhere (Spark Connect) brings its own Java."""
    if not env.get("SPARK_REMOTE") and (problem := _problem(env)):
        raise SourceError(
            f"Spark needs Java 17 or 21, and {problem}. Nothing was touched. Install one (Debian, Ubuntu: "
            "sudo apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17), or set JAVA_HOME to its folder."
        )


def _problem(env: Mapping[str, str]) -> str | None:
    home = env.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java", path=env.get("PATH") or os.defpath)
    if java is None:
        return "there is no java on PATH, and JAVA_HOME is not set"
    if not os.access(java, os.X_OK):
        return f"JAVA_HOME is {home}, which has no bin/java"
    try:
        completed = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return f"{java} does not run"
    match = _VERSION.search(completed.stderr + completed.stdout)
    # Spark itself judges a newer Java, or one whose version is not known.
    return f"{java} is Java {match[1]}" if match and int(match[1]) < OLDEST else None
