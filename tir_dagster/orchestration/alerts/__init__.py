"""What Dagster ran, told to people."""
