"""Ops for CPUs, compiled by numba when they are first called; machine code is kept on disk between runs."""
