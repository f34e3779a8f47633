"""Whether a prompt fits the workers at all. Pure."""

from collections.abc import Sequence

from pd_core.failures import FailureKind, RequestFailure
from pd_router.fleet import WorkerView


def refuse_size(prompt_tokens: int, usable: Sequence[WorkerView]) -> None:
    """A prompt and one token must fit somewhere."""
    if any(view.holds(prompt_tokens) for view in usable):
        return
    context = max(view.max_model_tokens for view in usable)
    if prompt_tokens >= context:
        raise RequestFailure(
            FailureKind.CONTEXT_TOO_LONG,
            f"the prompt has {prompt_tokens} tokens; with at least one token of output it must "
            f"fit the model's context of {context} tokens: shorten it",
        )
    pool = max(view.pool_tokens for view in usable)
    raise RequestFailure(
        FailureKind.POOL_TOO_SMALL,
        f"the prompt has {prompt_tokens} tokens, but the workers' KV pools hold at most {pool}: "
        "shorten it, or give them larger ones",
    )
