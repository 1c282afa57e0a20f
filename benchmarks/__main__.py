"""`python -m benchmarks`: see `--help`."""

import sys

import click

from benchmarks.command import bench
from tir_dagster.errors import TirError

try:
    bench(prog_name="python -m benchmarks")
except TirError as error:
    click.echo(f"Error: {error}", err=True)
    # That of a signal where one has stopped the run.
    sys.exit(getattr(error, "exit_code", 1))
