"""Schema revisions of the catalog, run by `catalog.database.migrate`.

To add one: change `catalog/tables.py`, then write `versions/000N_what_changed.py` by hand and set HEAD.
"""

HEAD = "0001"
"""Newest revision; a test holds it equal to the scripts."""
