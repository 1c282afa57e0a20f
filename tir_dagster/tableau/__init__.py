"""Tableau Server: client, find, download, publish, refresh, wait; the deliveries."""
