"""Alembic's entry: run the revisions on the connection that `catalog.database` hands over."""

from __future__ import annotations

from alembic import context

from catalog.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite cannot alter most things in place
)
with context.begin_transaction():
    context.run_migrations()
