"""The doors for people: the `posttrain` command."""
