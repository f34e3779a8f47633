"""How much there is to compute of a prompt: what a worker tells, and a router predicts by."""


def pairs(tokens: float, before: float = 0.0) -> float:
    """Of a token and one that it looks back on: what attention over consecutive tokens, behind
    so many others, goes with."""
    return tokens * (before + tokens / 2)
