"""Programs that run in the peers' own virtual environments and print one JSON object. No import of ours."""
