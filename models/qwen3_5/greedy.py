# SPDX-License-Identifier: Apache-2.0
"""Greedy generation of one request per rank, in steps that all ranks take together."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from xmoe.errors import ConfigError


class Runnable(Protocol):
    """What a session needs of a loaded model."""

    @property
    def model(self) -> Any: ...

    @property
    def end_ids(self) -> frozenset[int]: ...

    def run_empty_step(self) -> None: ...


class GreedySession:
    """One request at a time with a cache of its own.

    Every step runs every MoE layer exactly once, whether this rank has a request or not, so ranks
    that call `step` equally often stay together:

        session.start(prompt_ids, max_new_tokens=8)
        while some rank is not finished:
            session.step()
        session.token_ids
    """

    def __init__(self, loaded: Runnable) -> None:
        self._loaded = loaded
        self._prompt: list[int] = []
        self._limit = 0
        self._cache: Any = None
        self.token_ids: list[int] = []
        parameters = inspect.signature(loaded.model.forward).parameters
        # transformers renamed the argument; both names mean the same object.
        self._keyword = "cache" if "cache" in parameters else "past_key_values"

    @property
    def finished(self) -> bool:
        """True without a request, after an end token, or when the limit is reached."""
        if len(self.token_ids) >= self._limit:
            return True
        return bool(self.token_ids) and self.token_ids[-1] in self._loaded.end_ids

    @property
    def num_pending(self) -> int:
        """Rows this rank brings to the next step: the prompt's length, 1, or 0 when finished."""
        if self.finished:
            return 0
        return 1 if self.token_ids else len(self._prompt)

    def start(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        """Takes a request; computes nothing. Local.

        Raises:
            ConfigError: an empty prompt, an id outside the vocabulary, or a limit below 1.
        """
        vocabulary = self._loaded.model.config.vocab_size
        wrong = [token for token in prompt_ids if not 0 <= token < vocabulary]
        if not prompt_ids or wrong or max_new_tokens < 1:
            raise ConfigError(
                f"request with {len(prompt_ids)} prompt tokens (outside the vocabulary: {wrong}) "
                f"and max_new_tokens={max_new_tokens}; at least one token in [0, {vocabulary}) and "
                "max_new_tokens >= 1 are needed; encode the prompt with the model's own tokenizer"
            )
        from transformers import DynamicCache

        self._prompt = list(prompt_ids)
        self._limit = max_new_tokens
        self._cache = DynamicCache(config=self._loaded.model.config)
        self.token_ids = []

    def clear(self) -> None:
        """Drops the request and its cache. Local."""
        self._limit = 0
        self._cache = None

    def prefill(self) -> int:
        """Runs the prompt and returns the first new token id. Collective."""
        return self._advance(self._prompt)

    def decode(self) -> int:
        """Runs the last token and returns the next id. Collective."""
        return self._advance(self.token_ids[-1:])

    def run_empty_step(self) -> None:
        """Takes part in a step without a token. Collective."""
        self._loaded.run_empty_step()

    def step(self) -> int | None:
        """The next step of this rank: prefill, decode, or an empty one. Collective.

        Returns:
            The new token id, or None for an empty step.
        """
        if self.finished:
            self.run_empty_step()
            return None
        return self.decode() if self.token_ids else self.prefill()

    @torch.no_grad()
    def _advance(self, token_ids: list[int]) -> int:
        ids = torch.tensor([token_ids], device=self._loaded.model.lm_head.weight.device)
        kwargs = {self._keyword: self._cache}
        output = self._loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1, **kwargs)
        # argmax takes the lowest id of equal logits, so ties are stable.
        token = int(output.logits[0, -1].float().argmax())
        self.token_ids.append(token)
        return token
