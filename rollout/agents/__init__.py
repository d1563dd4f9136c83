"""Agents: programs that act on a task through a session."""
