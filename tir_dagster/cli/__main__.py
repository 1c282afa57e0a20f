"""`python -m tir_dagster.cli`."""

from tir_dagster.cli.main import main

main()
