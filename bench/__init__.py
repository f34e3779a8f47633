"""What backs each number in the README. Run one with `python -m bench.NAME [--quick]`."""
