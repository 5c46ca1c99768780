"""Burst buffer to parallel file system: plan (pure), collective writes, throttle, lease."""
