"""One HTTP request's generations: started, collected step by step, turned into text.

The workers' streams call the sinks; those append to the request's inbox and wake its
coroutine once a step. A token in the middle of a plain stream goes straight to the
client's connection instead, while the coroutine waits.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from pd_core.failures import Failure, FailureKind, RequestFailure
from pd_router import toolcalls
from pd_router.exchange import Pipe
from pd_router.openai import Ask
from pd_router.replies import Part, Replies, TokenLogprob, Usage
from pd_router.text import StopMatcher, TextStack
from pd_router.toolcalls import Reader
from pd_router.types import (
    NOBODY,
    FinishReason,
    GenerateRequest,
    Generation,
    Sampling,
    SessionsApi,
    Timeline,
    Who,
)

# What is kept for a client that doesn't read: about 1 MiB.
MAX_HELD_TOKENS = 4096
_LAZY_TOKENS = 256
_TOP_LOGPROBS_PER_TOKEN = 4  # that many weigh as much as a token


class _Arrival(NamedTuple):
    """A token as it came; `at` is on the monotonic clock."""

    prompt: int
    choice: int
    position: int  # in the choice, from 0
    token: int
    finish: FinishReason | None
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    at: float

    @property
    def ends_or_begins(self) -> bool:
        return self.finish is not None or not self.position


class Inbox:
    """What arrived for one HTTP request and wasn't looked at yet. Bounded.

    Lazy: nobody needs to look before the end, or before much has come.
    """

    def __init__(self, lazy: bool = False) -> None:
        self._lazy = lazy
        self._arrivals: list[_Arrival] = []
        self._weight = 0
        self._waiter: asyncio.Future[None] | None = None
        self.idle = False  # somebody waits, and nothing is there
        self._failure: Failure | None = None
        self.on_gone: Callable[[], None] | None = None  # the client doesn't read

    def put(self, arrival: _Arrival) -> None:
        if self._failure is not None:
            return
        self._arrivals.append(arrival)
        self._weight += 1 + len(arrival.top) // _TOP_LOGPROBS_PER_TOKEN
        if self._weight > MAX_HELD_TOKENS:
            self.fail(Failure(FailureKind.CLIENT_GONE, "The client doesn't read its stream."))
        elif not self._lazy or self._weight >= _LAZY_TOKENS or arrival.ends_or_begins:
            self._wake()

    def fail(self, failure: Failure) -> None:
        """The first failure stays. What arrived before it is still handed out."""
        if self._failure is None:
            self._failure = failure
            if failure.kind is FailureKind.CLIENT_GONE:
                self._arrivals.clear()
                if self.on_gone is not None:
                    self.on_gone()
            self._wake()

    async def take(self) -> list[_Arrival]:
        """All that arrived since the last call; RequestFailure when nothing will any more."""
        while not self._arrivals:
            if self._failure is not None:
                raise RequestFailure(self._failure.kind, self._failure.message)
            self._waiter = asyncio.get_running_loop().create_future()
            self.idle = True
            await self._waiter
        arrivals, self._arrivals, self._weight = self._arrivals, [], 0
        return arrivals

    def _wake(self) -> None:
        self.idle = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class PromptSink:
    """Takes one generation's output into the inbox of its request, or past it: see `Flow`."""

    __slots__ = ("_inbox", "_open", "_prompt", "flows")

    def __init__(self, inbox: Inbox, prompt: int, choices: int) -> None:
        self._inbox = inbox
        self._prompt = prompt
        self._open = choices
        self.flows: list[Flow | None] = [None] * choices

    def on_token(
        self,
        choice: int,
        index: int,
        token: int,
        finish: FinishReason | None,
        logprob: float | None,
        top: tuple[tuple[int, float], ...],
    ) -> None:
        at = time.monotonic()
        if finish is not None:
            self._open -= 1
        elif self._inbox.idle:
            flow = self.flows[choice]
            if flow is not None and flow.passes(index, token, at):
                return
        self._inbox.put(_Arrival(self._prompt, choice, index, token, finish, logprob, top, at))

    def on_done(self) -> None:
        if self._open > 0:
            message = "The workers ended the request before all its choices had ended."
            self._inbox.fail(Failure(FailureKind.INTERNAL, message))

    def on_failed(self, failure: Failure) -> None:
        self._inbox.fail(failure)


class _Choice:
    """One choice's tokens on their way to text."""

    def __init__(self, number: int, ask: Ask, stack: TextStack, context: Sequence[int]) -> None:
        self.part = Part(number)
        self.finish: FinishReason | None = None
        self.count = 0
        self.first_at = 0.0
        self.last_at = 0.0
        self.text_at: float | None = None  # when there first was something to send
        self._ask = ask
        self._stack = stack
        self.detokenizer = stack.detokenizer(context)
        self._stops = StopMatcher(ask.stops) if ask.stops else None
        self._reader = _call_reader(ask, stack)
        self._calls = 0
        self._chars = 0  # of the text so far, what is held back too

    def add(self, arrival: _Arrival) -> None:
        """Takes the choice's next token in."""
        if not self.count:
            self.first_at = arrival.at
        self.last_at = arrival.at
        self.count += 1
        self._note(arrival)
        finish = arrival.finish or self._own_stop(arrival.token)
        text = "" if finish == "stop" else self.detokenizer.push(arrival.token)
        if finish is not None:
            text += self.detokenizer.finish()
        self._chars += len(text)
        if self._stops is not None and self.count > self._ask.min_tokens:
            text, found = self._stops.push(text)
            if found:
                finish = "stop"
            elif finish is not None:
                text += self._stops.finish()
        self.finish = self.part.finish = finish
        if self._reader is not None:
            text = self._read_calls(self._reader, text)
        self.part.text += text
        if self.text_at is None and (text or finish or self.part.calls):
            self.text_at = arrival.at

    def _read_calls(self, reader: Reader, text: str) -> str:
        """Takes calls of tools out of the text."""
        text, calls = reader.push(text)
        if self.finish is not None:
            rest, more = reader.finish()
            text, calls = text + rest, calls + more
        for call in calls:
            if not (self._ask.one_call and self._calls):
                self.part.calls.append((self._calls, call))
                self._calls += 1
        self.part.finish = self.reason
        return text

    @property
    def reason(self) -> FinishReason | Literal["tool_calls"] | None:
        """Why it ended, as clients are told."""
        return "tool_calls" if self._calls and self.finish == "stop" else self.finish

    def end_empty(self) -> None:
        """max_tokens 0: there is nothing to say, and the limit is reached."""
        self.finish = self.part.finish = "length"

    def take_part(self) -> Part | None:
        """What can go out now, if anything. A token without text doesn't go out alone."""
        part = self.part
        if not (part.text or part.calls or part.finish):
            return None
        self.part = Part(part.choice, first=False)
        return part

    def _own_stop(self, token: int) -> FinishReason | None:
        """Workers that ignore end tokens ignore the client's stop tokens too: they end here."""
        ask = self._ask
        if ask.ignore_eos and self.count > ask.min_tokens and token in ask.stop_token_ids:
            return "stop"
        return None

    def _note(self, arrival: _Arrival) -> None:
        if self._ask.return_token_ids:
            self.part.token_ids.append(arrival.token)
        if self._ask.logprobs and arrival.logprob is not None:
            raw = self._stack.token_bytes
            top = arrival.top[: self._ask.top_logprobs]
            self.part.logprobs.append(
                TokenLogprob(
                    raw(arrival.token),
                    arrival.logprob,
                    tuple((raw(token), logprob) for token, logprob in top),
                    self._chars,
                )
            )


class Flow:
    """The hottest path, of one choice: tokens in the middle of plain text go to the client's
    connection at once, while the request's coroutine waits."""

    __slots__ = ("_after", "_before", "_choice", "_observe_gap", "_pipe", "_push")

    def __init__(
        self,
        choice: _Choice,
        pipe: Pipe,
        around: tuple[bytes, bytes],
        observe_gap: Callable[[float], None],
    ) -> None:
        """`around`: what stands before and after the text in the choice's events."""
        self._choice = choice
        self._pipe = pipe
        self._before, self._after = around
        self._observe_gap = observe_gap
        self._push = choice.detokenizer.push_json

    def passes(self, position: int, token: int, at: float) -> bool:
        """Whether the token has gone out. Else it waits for `Run.step`."""
        choice, pipe = self._choice, self._pipe
        if position != choice.count or choice.finish is not None or pipe.blocked:
            return False
        self._observe_gap(at - choice.last_at)
        choice.last_at = at
        choice.count = position + 1
        text = self._push(token)
        if text:
            pipe.write(self._before, text, self._after)
        return True


def _call_reader(ask: Ask, stack: TextStack) -> Reader | None:
    """For requests with tools."""
    if not ask.tools or stack.call_format is None:
        return None
    names = frozenset(tool["function"]["name"] for tool in ask.tools)
    return toolcalls.reader(stack.call_format, names)


class Meter(Protocol):
    """Who measures (`metrics.Metrics`). Seconds."""

    def gap_observer(self, timeline: Timeline) -> Callable[[float], None]: ...

    def first_text(self, timeline: Timeline, ttft_s: float) -> None: ...


@dataclass(slots=True)
class _Prompt:
    token_ids: tuple[int, ...]
    choices: list[_Choice]
    open: int  # choices that haven't ended
    generation: Generation | None = None
    sink: PromptSink | None = None
    observe_gap: Callable[[float], None] | None = None  # from the first token on
    text_at: float | None = None


class Run:
    """All generations of one HTTP request, one for each of its prompts."""

    def __init__(
        self,
        ask: Ask,
        stack: TextStack,
        prompts: Sequence[tuple[int, ...]],
        meter: Meter,
        accepted: float,
        sla: str = "",
    ) -> None:
        """`accepted`: when the HTTP request came, on the monotonic clock; `sla`: its class, as
        metrics name it."""
        self._watched = bool(ask.stops or (ask.ignore_eos and ask.stop_token_ids))
        self.inbox = Inbox(lazy=not (ask.stream or self._watched))
        self._ask = ask
        self._meter = meter
        self._accepted = accepted
        self._sla = sla
        self._prompts: list[_Prompt] = []
        self._way: tuple[Replies, Pipe] | None = None  # past the coroutine
        for ids in prompts:
            # A plain completion goes on where its prompt ends, blanks included.
            context = ids if ask.kind == "completion" else ()
            first = len(self._prompts) * ask.choices
            numbers = range(first, first + ask.choices)
            choices = [_Choice(number, ask, stack, context) for number in numbers]
            self._prompts.append(_Prompt(ids, choices, ask.choices))

    def start(
        self,
        sessions: SessionsApi,
        request_id: str,
        samplings: Sequence[Sampling | None],
        deadline_s: float,
        who: Who = NOBODY,
    ) -> None:
        """Starts all. No sampling: nothing is to be generated for that prompt.

        RequestFailure when one is refused; those started before must then be cancelled.
        """
        for number, (prompt, sampling) in enumerate(zip(self._prompts, samplings, strict=True)):
            if sampling is None:
                for choice in prompt.choices:
                    choice.end_empty()
                prompt.open = 0
                continue
            request = GenerateRequest(
                request_id=request_id if len(self._prompts) == 1 else f"{request_id}-{number}",
                token_ids=prompt.token_ids,
                choices=self._ask.choices,
                sampling=sampling,
                deadline_s=deadline_s,
                cache_salt=who.salt + self._ask.cache_salt,
                priority=self._ask.priority,
                session=who.session,
                sla=who.sla,
                tenant=who.tenant,
            )
            prompt.sink = PromptSink(self.inbox, number, self._ask.choices)
            prompt.generation = sessions.start(request, prompt.sink)
            prompt.generation.timeline.sla = self._sla

    @property
    def done(self) -> bool:
        return not any(prompt.open for prompt in self._prompts)

    async def step(self) -> None:
        """Waits for output and takes in all that is there. RequestFailure ends it."""
        for arrival in await self.inbox.take():
            prompt = self._prompts[arrival.prompt]
            choice = prompt.choices[arrival.choice]
            if choice.finish is not None or prompt.generation is None:
                continue
            if arrival.position != choice.count:
                message = f"Token {arrival.position} came where {choice.count} was next."
                raise RequestFailure(FailureKind.INTERNAL, message)
            self._measure_gap(prompt, choice, arrival.at)
            choice.add(arrival)
            if prompt.text_at is None and choice.text_at is not None:
                prompt.text_at = choice.text_at
                ttft = choice.text_at - self._accepted
                self._meter.first_text(prompt.generation.timeline, ttft)
            if choice.finish is not None:
                prompt.open -= 1
                if not prompt.open:
                    # After a stop string the workers would go on; after their own end
                    # this does nothing.
                    prompt.generation.cancel()

    def pass_on(self, replies: Replies, pipe: Pipe | None) -> None:
        """From now on tokens in the middle of plain text go out without waking anybody."""
        if pipe is None or self._watched or self._ask.tools or not replies.plain:
            return
        self._way = (replies, pipe)
        for prompt in self._prompts:
            for choice in prompt.choices:
                if not choice.part.first:
                    self._open_flow(prompt, choice)

    def _open_flow(self, prompt: _Prompt, choice: _Choice) -> None:
        """Opens the way past the coroutine for a choice whose first event goes out now."""
        observe_gap, sink = self._gap_observer(prompt), prompt.sink
        if self._way is not None and observe_gap is not None and sink is not None:
            replies, pipe = self._way
            number = choice.part.choice
            around = replies.around(number)
            sink.flows[number % self._ask.choices] = Flow(choice, pipe, around, observe_gap)

    def _measure_gap(self, prompt: _Prompt, choice: _Choice, at: float) -> None:
        observe = self._gap_observer(prompt) if choice.count else None
        if observe is not None:
            observe(at - choice.last_at)

    def _gap_observer(self, prompt: _Prompt) -> Callable[[float], None] | None:
        """Of a prompt whose first token is there: then its workers are known."""
        if prompt.observe_gap is None and prompt.generation is not None:
            prompt.observe_gap = self._meter.gap_observer(prompt.generation.timeline)
        return prompt.observe_gap

    def take_parts(self) -> list[Part]:
        """What can go out now, by choice."""
        parts = []
        for prompt in self._prompts:
            for choice in prompt.choices:
                part = choice.take_part()
                if part is not None:
                    parts.append(part)
                    if part.first:
                        self._open_flow(prompt, choice)
        return parts

    def whole(self) -> list[Part]:
        """Everything, once all is done and if take_parts was never called."""
        return [choice.part for prompt in self._prompts for choice in prompt.choices]

    def cancel(self) -> None:
        for prompt in self._prompts:
            if prompt.generation is not None:
                prompt.generation.cancel()

    def usage(self) -> Usage:
        timelines = self.timelines()
        return Usage(
            prompt=sum(len(prompt.token_ids) for prompt in self._prompts),
            completion=sum(c.count for prompt in self._prompts for c in prompt.choices),
            cached=sum(timeline.cached_tokens for timeline in timelines),
        )

    def timelines(self) -> list[Timeline]:
        return [p.generation.timeline for p in self._prompts if p.generation is not None]

    def finishes(self) -> list[str]:
        """Why each choice ended, of those that did."""
        every = (choice.reason for prompt in self._prompts for choice in prompt.choices)
        return [reason for reason in every if reason is not None]

    def settle_timelines(self, tokenize_s: float) -> list[Timeline]:
        """The timelines with what this side knows filled in."""
        for prompt in self._prompts:
            if prompt.generation is None:
                continue
            timeline = prompt.generation.timeline
            spans = [
                (c.last_at - c.first_at) / (c.count - 1) for c in prompt.choices if c.count > 1
            ]
            timeline.tokenize_s = tokenize_s
            timeline.prompt_tokens = len(prompt.token_ids)
            timeline.completion_tokens = sum(choice.count for choice in prompt.choices)
            if prompt.text_at is not None:
                timeline.ttft_s = prompt.text_at - self._accepted
            if spans:
                timeline.tpot_s = sum(spans) / len(spans)
        return self.timelines()
