"""From a checked request to tokens and sampling, with the limits that apply."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pd_core.failures import Failure, FailureKind
from pd_router.errors import ApiError, invalid, unsupported
from pd_router.messages import ChatMessage, Tool
from pd_router.openai import MOST_TOKENS, Ask
from pd_router.structured import BadForm, Form, call_form, check, checker
from pd_router.templates import TemplateFailed
from pd_router.text import TextStack
from pd_router.types import Limits, Sampling

_HEAD_CHARS_A_TOKEN = 16
"""A text's head of so many characters for each token that fits has more tokens than fit,
unless it is very uniform."""
_CUT_TOKENS = 16
"""By so many, generously, a head's tokens may differ from the whole text's."""


async def tokenize(
    ask: Ask, stack: TextStack, limits: Limits | None, pool: ThreadPoolExecutor
) -> list[tuple[int, ...]]:
    """Token ids of each prompt; none is empty. ApiError where the request can't be served."""
    await _check_form(ask, stack)
    if ask.kind == "chat":
        text = render(stack, ask.messages, ask.tools)
        await _refuse_hopeless(ask, stack, text, limits, pool)
        # The template writes all special tokens itself.
        prompts = [await stack.encode(text, pool, add_special_tokens=False)]
    else:
        prompts = []
        for number, prompt in enumerate(ask.prompts):
            if isinstance(prompt, str):
                await _refuse_hopeless(ask, stack, prompt, limits, pool)
                prompts.append(await stack.encode(prompt, pool, add_special_tokens=True))
            else:
                where = "prompt" if len(ask.prompts) == 1 else f"prompt[{number}]"
                _check_ids(prompt, where, stack.vocab_size)
                prompts.append(prompt)
    for ids in prompts:
        if not ids:
            raise invalid(_param(ask), "The prompt has 0 tokens; at least 1 is needed.")
    _check_ids(ask.stop_token_ids, "stop_token_ids", stack.vocab_size)
    for token, _ in ask.logit_bias:
        if token >= stack.vocab_size:
            raise invalid("logit_bias", _no_token(f"logit_bias.{token}", token, stack.vocab_size))
    return prompts


def render(stack: TextStack, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> str:
    """A chat as the model's template writes it."""
    if tools and not stack.takes_tools:
        raise unsupported("tools", "this model's chat template has none")
    if tools and stack.call_format is None:
        raise unsupported("tools", "how this model writes its calls isn't known here")
    if not stack.takes_tools:
        for number, message in enumerate(messages):
            if "tool_calls" in message:
                raise unsupported(
                    f"messages[{number}].tool_calls", "this model's chat template has none"
                )
            if message["role"] == "tool":
                raise unsupported(f"messages[{number}].role", "this model's chat has no tools")
    try:
        return stack.render(messages, tools)
    except TemplateFailed as error:
        raise invalid("messages", str(error), "chat_template_error") from None


def sampling_for(
    ask: Ask, stack: TextStack, ids: Sequence[int], limits: Limits | None
) -> Sampling | None:
    """How to continue a prompt; None when nothing is to be generated."""
    # Where the limits aren't known, workers end a request at their context by themselves.
    max_tokens = MOST_TOKENS if ask.max_tokens is None else ask.max_tokens
    if limits is not None:
        max_tokens = min(max_tokens, _room(ask, len(ids), limits))
    if max_tokens == 0:
        return None
    stop_ids = ask.stop_token_ids if ask.ignore_eos else (*ask.stop_token_ids, *stack.eos_token_ids)
    form = _form(ask, stack)
    greedy = ask.top_p == 0  # the smallest set that holds anything: the likeliest token
    return Sampling(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else ask.temperature,
        top_p=1.0 if greedy else ask.top_p,
        top_k=min(ask.top_k, stack.vocab_size),
        min_p=ask.min_p,
        seed=ask.seed,
        logprobs=ask.logprobs,
        top_logprobs=ask.top_logprobs,
        min_tokens=min(ask.min_tokens, max_tokens),
        ignore_eos=ask.ignore_eos,
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        repetition_penalty=ask.repetition_penalty,
        presence_penalty=ask.presence_penalty,
        frequency_penalty=ask.frequency_penalty,
        logit_bias=ask.logit_bias,
        grammar=form.grammar if form is not None else "",
    )


def _form(ask: Ask, stack: TextStack) -> Form | None:
    """What the answer keeps to; None: nothing. Models without tools are refused elsewhere."""
    if ask.must_call and stack.call_format is not None:
        return call_form(stack.call_format, ask.must_call)
    return ask.form


async def _check_form(ask: Ask, stack: TextStack) -> None:
    try:
        form = _form(ask, stack)
        if form is not None:
            await asyncio.get_running_loop().run_in_executor(checker(), check, form)
    except BadForm as bad:
        raise invalid(bad.param, f"'{bad.param}' {bad.message}") from None


async def _refuse_hopeless(
    ask: Ask, stack: TextStack, text: str, limits: Limits | None, pool: ThreadPoolExecutor
) -> None:
    """Spares a text that can't fit the seconds and the memory that encoding it would take."""
    if limits is None:
        return
    most = min(limits.context_tokens, limits.pool_tokens)
    least = stack.least_tokens(text)
    head = most * _HEAD_CHARS_A_TOKEN
    if least <= most and len(text) > 2 * head:
        ids = await stack.encode(text[:head], pool, add_special_tokens=False)
        least = len(ids) - _CUT_TOKENS
    if least > most:
        _room(ask, least, limits, "at least ")


def _room(ask: Ask, prompt_tokens: int, limits: Limits, about: str = "") -> int:
    """Tokens that may come after the prompt; ApiError when it doesn't fit itself."""
    wanted = 0 if ask.max_tokens == 0 else 1
    if prompt_tokens + wanted > limits.context_tokens:
        kind = FailureKind.CONTEXT_TOO_LONG
        what = f"the model's context is {limits.context_tokens} tokens, answer included"
    elif prompt_tokens + wanted > limits.pool_tokens:
        kind = FailureKind.POOL_TOO_SMALL
        what = f"the workers' KV cache takes {limits.pool_tokens} tokens, answer included"
    else:
        return min(limits.context_tokens, limits.pool_tokens) - prompt_tokens
    message = f"The prompt has {about}{prompt_tokens} tokens, but {what}."
    raise ApiError.of(Failure(kind, message), _param(ask))


def _check_ids(ids: Sequence[int], where: str, vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        place = f"{where}[{bad}]"
        raise invalid(place, _no_token(place, ids[bad], vocab_size))


def _no_token(place: str, token: int, vocab_size: int) -> str:
    return f"'{place}' is {token}; this model has the token ids 0 to {vocab_size - 1}."


def _param(ask: Ask) -> str:
    return "messages" if ask.kind == "chat" else "prompt"
