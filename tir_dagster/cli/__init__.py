"""The `tir` command."""
