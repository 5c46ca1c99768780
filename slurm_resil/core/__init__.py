"""Foundations: the standard library only, imported by everything, importing nothing of this package above it."""
