"""Measurements: ratios within one run, read by people, never a gate on absolute time."""
