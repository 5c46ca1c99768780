"""Checkpoints of one rank: state tree to items, snapshot into a slot, seal, restore; imports no torch by itself."""
