"""Reasons to checkpoint: deadlines, signals, cadence."""
