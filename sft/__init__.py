"""Supervised fine-tuning on verified trajectories."""
