"""From public repositories to audited tasks: sources, stage agents, gates, candidates, the report."""
