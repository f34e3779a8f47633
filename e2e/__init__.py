"""A real Kubernetes for tests: built, started and taken down without any account or registry."""
