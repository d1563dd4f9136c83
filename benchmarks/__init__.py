"""Measurements: each module prints one table and writes JSON."""
