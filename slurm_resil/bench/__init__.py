"""Measurements on the user's own system: ratios against the plain way, and figures."""
