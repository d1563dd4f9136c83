"""Reinforcement learning: advantages, the price of length, policy losses, the asynchronous loop."""
