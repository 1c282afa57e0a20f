"""Which keys changed: ledger, detectors, change sets, plan. Its core is pure: no Dagster, no I/O."""
