"""What is durable between refreshes: leases, change sets, versions, intents."""
