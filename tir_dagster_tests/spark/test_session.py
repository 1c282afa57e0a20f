from __future__ import annotations

import sys

from tir_dagster.spark.session import class_archive, configure, spark_conf


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
