"""What a model really says: transformers' own `generate`, greedy, in fp32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Prompt = str | list[dict[str, str]]
"""Text for /v1/completions, or a chat's messages."""


class Reference:
    """`threads` 0: as torch decides."""

    def __init__(self, folder: Path, threads: int = 0) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        if threads:
            torch.set_num_threads(threads)
        self._torch = torch
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        eos = self._model.generation_config.eos_token_id
        self.eos = frozenset(eos if isinstance(eos, list) else [eos])

    def ids(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        text = self.tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def generate(
        self, prompt: Prompt, max_tokens: int, ignore_eos: bool = False, **options: Any
    ) -> list[int]:
        """The new token ids, the end token included. `options` are those of `generate`."""
        ids = self._torch.tensor([self.ids(prompt)])
        ends = {"eos_token_id": None} if ignore_eos else {}
        with self._torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                **ends,
                **options,
            )
        return [int(t) for t in out[0, ids.shape[1] :]]

    def logprobs(self, prompt: Prompt, new: Sequence[int]) -> list[float]:
        """Natural logarithms of the new tokens' probabilities."""
        ids = self.ids(prompt)
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([[*ids, *new]])).logits[0]
        table = logits.log_softmax(-1)
        return [float(table[len(ids) + i - 1, token]) for i, token in enumerate(new)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
