"""`tir bench`: a full refresh and one by key, stage by stage, beside the bare limits of the same machine in the same run."""

from tir_dagster.bench.command import bench as bench
