"""Fuzzing: `python -m tests.fuzz` (see `__main__`)."""
