"""First tables.

Written out rather than taken from `catalog.tables`, which moves on while this revision must not.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "tasks",
        sa.Column("id", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("split", sa.String),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("path", sa.String),
        sa.Column("function", sa.String),
        sa.Column("operator", sa.String),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("updated", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tasks"),
    )
    op.create_index("ix_tasks_status_split", "tasks", ["status", "split"])
    op.create_index("ix_tasks_source", "tasks", ["source"])
    op.create_table(
        "reports",
        sa.Column("task_id", sa.String, nullable=False),
        sa.Column("accepted", sa.Boolean, nullable=False),
        sa.Column("rejected_by", sa.String),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("updated", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("task_id", name="pk_reports"),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name="fk_reports_task_id", ondelete="CASCADE"),
    )
    op.create_index("ix_reports_rejected_by", "reports", ["rejected_by"])
    op.create_table(
        "candidate_sets",
        sa.Column("task_id", sa.String, nullable=False),
        sa.Column("chance", sa.Float, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("updated", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("task_id", name="pk_candidate_sets"),
        sa.ForeignKeyConstraint(
            ["task_id"], ["tasks.id"], name="fk_candidate_sets_task_id", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("folder", sa.String, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("finished", sa.Float),
        sa.Column("record", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_index("ix_runs_kind_created", "runs", ["kind", "created"])
    op.create_table(
        "trajectories",
        sa.Column("id", sa.String, nullable=False),
        sa.Column("run_id", sa.String, nullable=False),
        sa.Column("task_id", sa.String, nullable=False),
        sa.Column("agent", sa.String, nullable=False),
        sa.Column("policy", sa.String, nullable=False),
        sa.Column("effort", sa.Integer),
        sa.Column("group", sa.String, nullable=False),
        sa.Column("reward", sa.Float),
        sa.Column("failure", sa.String),
        sa.Column("sampled_tokens", sa.Integer, nullable=False),
        sa.Column("file", sa.String, nullable=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("length", sa.Integer, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_trajectories"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_trajectories_run_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["task_id"], ["tasks.id"], name="fk_trajectories_task_id", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_trajectories_run_id_task_id", "trajectories", ["run_id", "task_id"])
    op.create_index("ix_trajectories_task_id", "trajectories", ["task_id"])
    op.create_table(
        "verdicts",
        sa.Column("key", sa.String, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("hits", sa.Integer, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_verdicts"),
    )
    op.create_table(
        "stages",
        sa.Column("name", sa.String, nullable=False),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("name", "key", name="pk_stages"),
    )


def downgrade() -> None:
    for table in ("stages", "verdicts", "trajectories", "runs", "candidate_sets", "reports", "tasks"):
        op.drop_table(table)
