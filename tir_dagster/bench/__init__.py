"""`tir bench`: a full refresh and one by key beside the bare limits of the same machine; `tir bench package`: a large extract repacked."""

from tir_dagster.bench.command import bench as bench
