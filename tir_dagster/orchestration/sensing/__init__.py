"""What happens outside and starts runs: changes of the source, reports, webhooks."""
