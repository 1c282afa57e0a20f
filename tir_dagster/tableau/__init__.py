"""Tableau Server over REST: sign in, find, download, publish, refresh and wait for jobs. It knows no delivery."""
