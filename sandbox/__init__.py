"""Isolated places to run commands: images, backends, pool."""
