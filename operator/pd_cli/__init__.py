"""The `pdcluster` command."""
