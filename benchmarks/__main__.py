"""`python -m benchmarks`: see `--help`."""

from benchmarks.command import bench

bench(prog_name="python -m benchmarks")
