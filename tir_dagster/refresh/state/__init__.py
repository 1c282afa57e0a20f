"""The state between refreshes, on disk: leases, change sets, versions, intents, notes."""
