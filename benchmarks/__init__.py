"""Benchmarks of the product on this machine: `make bench`. Not part of the package that users install."""
