"""Agents, one per node, and their leader: agreement, seals, restore decisions, heartbeats."""
