"""Known ways to fake a verdict, and honest solutions beside them, as data.

`programs/KIND/NAME.toml` are hacks, `honest/NAME.toml` solutions: title, source of the idea, and what
the agent would have left behind. The probes of `verifiers.hacks` belong to the catalogue too, by reference.
"""
