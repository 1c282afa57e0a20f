"""Java for Spark: a missing or old one is told before Spark starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tir_dagster.errors import SourceError
from tir_dagster.spark.java import require_java


def java_home(folder: Path, version: str) -> Path:
    """A folder whose java says it is that version."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-16' >&2\n", encoding="utf-8")
    java.chmod(0o755)
    return folder


def complaint(env: dict[str, str]) -> str:
    with pytest.raises(SourceError) as caught:
        require_java(env)
    return str(caught.value)


@pytest.mark.parametrize(
    ("version", "stated_version"), [("1.8.0_392", "Java 8"), ("11.0.22", "Java 11"), ("9", "Java 9")]
)
def test_an_old_java_is_refused_with_its_version_and_what_to_install(tmp_path, version, stated_version):
    message = complaint({"JAVA_HOME": str(java_home(tmp_path, version))})
    assert f"Spark needs Java 17 or 21, and {tmp_path}/bin/java is {stated_version}." in message
    assert "openjdk-17-jre-headless" in message


def test_a_java_home_without_java_is_refused_even_if_there_is_one_on_the_path(tmp_path):
    # Spark looks no further than JAVA_HOME either.
    env = {"JAVA_HOME": str(tmp_path / "none"), "PATH": str(java_home(tmp_path, "17.0.9") / "bin")}
    assert f"JAVA_HOME is {tmp_path}/none, which has no bin/java" in complaint(env)


def test_no_java_at_all_is_refused(tmp_path):
    assert "there is no java on PATH, and JAVA_HOME is not set" in complaint({"PATH": str(tmp_path)})


def test_a_java_that_does_not_run_is_refused(tmp_path):
    (java_home(tmp_path, "17") / "bin" / "java").write_bytes(b"\x00not a program")
    assert f"{tmp_path}/bin/java does not run" in complaint({"JAVA_HOME": str(tmp_path)})


@pytest.mark.parametrize("version", ["17.0.9", "21", "21.0.2", "25"])
def test_a_java_that_spark_takes_is_left_alone(tmp_path, version):
    require_java({"JAVA_HOME": str(java_home(tmp_path, version))})
    require_java({"PATH": str(tmp_path / "bin")})


def test_a_spark_elsewhere_needs_no_java_here(tmp_path):
    require_java({"SPARK_REMOTE": "sc://spark.example.com", "PATH": str(tmp_path)})


def test_the_java_of_these_tests_is_good():
    require_java(os.environ)
