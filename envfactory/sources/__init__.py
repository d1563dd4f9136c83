"""Sources: where a package's history comes from. `open_source` chooses one by the form of its name."""

from envfactory.sources.base import History, Limits, Revision, Source, open_source

__all__ = ["History", "Limits", "Revision", "Source", "open_source"]
