"""The tables. A record is kept whole, as canonical JSON; the other columns are what queries filter on.

A change here needs a revision in `catalog/migrations/versions` (a test compares the two).
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)

tasks = Table(
    "tasks",
    metadata,
    Column("id", String, primary_key=True),
    Column("status", String, nullable=False),
    Column("split", String),
    Column("kind", String, nullable=False),
    Column("source", String, nullable=False),
    Column("path", String),
    Column("function", String),
    Column("operator", String),
    Column("record", Text, nullable=False),
    Column("created", Float, nullable=False),
    Column("updated", Float, nullable=False),
    Index(None, "status", "split"),
    Index(None, "source"),
)

reports = Table(
    "reports",
    metadata,
    Column("task_id", String, ForeignKey("tasks.id", ondelete="CASCADE"), primary_key=True),
    Column("accepted", Boolean, nullable=False),
    Column("rejected_by", String),
    Column("record", Text, nullable=False),
    Column("updated", Float, nullable=False),
    Index(None, "rejected_by"),
)

candidate_sets = Table(
    "candidate_sets",
    metadata,
    Column("task_id", String, ForeignKey("tasks.id", ondelete="CASCADE"), primary_key=True),
    Column("chance", Float, nullable=False),
    Column("record", Text, nullable=False),
    Column("updated", Float, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("id", String, primary_key=True),
    Column("kind", String, nullable=False),
    Column("state", String, nullable=False),
    Column("folder", String, nullable=False),
    Column("created", Float, nullable=False),
    Column("finished", Float),
    Column("record", Text, nullable=False),
    Index(None, "kind", "created"),
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("id", String, primary_key=True),
    Column("run_id", String, ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("task_id", String, ForeignKey("tasks.id", ondelete="CASCADE"), nullable=False),
    Column("agent", String, nullable=False),
    Column("policy", String, nullable=False),
    Column("effort", Integer),
    Column("group", String, nullable=False),
    Column("reward", Float),
    Column("failure", String),
    Column("sampled_tokens", Integer, nullable=False),
    Column("file", String, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("length", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Index(None, "run_id", "task_id"),
    Index(None, "task_id"),
)

verdicts = Table(
    "verdicts",
    metadata,
    Column("key", String, primary_key=True),
    Column("record", Text, nullable=False),
    Column("hits", Integer, nullable=False),
    Column("created", Float, nullable=False),
)

stages = Table(
    "stages",
    metadata,
    Column("name", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("value", Text, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("created", Float, nullable=False),
)
