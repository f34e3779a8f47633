"""What ends a command of this package with a message instead of a traceback."""


class ClusterError(Exception):
    """Something is missing or went wrong; the message says what to do about it."""
