from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tir_dagster.spark.session import class_archive, configure, spark_conf
from tir_dagster_tests.processes import wait_for


def test_workers_run_this_python(spark):
    assert spark.sparkContext.pythonExec == sys.executable


def test_values_do_not_depend_on_who_made_the_session(spark):
    other = spark.newSession()
    other.conf.set("spark.sql.session.timeZone", "America/New_York")
    other.conf.set("spark.sql.parquet.outputTimestampType", "INT96")

    configure(other)

    assert other.conf.get("spark.sql.session.timeZone") == "UTC"
    assert other.conf.get("spark.sql.parquet.outputTimestampType") == "TIMESTAMP_MICROS"


def test_given_settings_win_except_those_that_values_depend_on(tmp_path):
    conf = spark_conf(home=tmp_path, conf={"spark.master": "local[1]", "spark.sql.session.timeZone": "Asia/Tokyo"})

    assert (conf["spark.master"], conf["spark.sql.session.timeZone"]) == ("local[1]", "UTC")
    assert all(isinstance(value, str) for value in conf.values())


def test_a_class_archive_is_used_where_there_is_one(tmp_path):
    assert "SharedArchiveFile" not in spark_conf(home=tmp_path)["spark.driver.extraJavaOptions"]
    class_archive(tmp_path).parent.mkdir(parents=True)
    class_archive(tmp_path).touch()

    assert str(class_archive(tmp_path)) in spark_conf(home=tmp_path)["spark.driver.extraJavaOptions"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_jvm_that_is_still_starting_ends_with_whoever_waits_for_it(tmp_path: Path, number: signal.Signals):
    """As at Ctrl-C while Spark starts: pyspark itself leaves it behind."""
    (tmp_path / "bin").mkdir()
    submit = tmp_path / "bin" / "spark-submit"
    submit.write_text(f'#!/bin/sh\necho $$ > "{tmp_path}/pid"\nexec sleep 600\n')
    submit.chmod(0o755)
    script = (
        "import pathlib, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "from tir_dagster.spark.session import spark_session\n"
        f"spark_session('a test', home=pathlib.Path({str(tmp_path)!r}))\n"
    )
    env = {**os.environ, "SPARK_HOME": str(tmp_path)}
    started = subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.DEVNULL)
    pid = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), "a JVM"))
    started.send_signal(number)
    assert started.wait(60) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
