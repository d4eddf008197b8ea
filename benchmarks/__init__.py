"""Cells in subprocesses and the records they leave: how fast and how hungry every variant and recipe is."""
