"""Policies act on tasks: engines, agents, the asynchronous service, evaluation."""
