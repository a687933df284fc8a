# SPDX-License-Identifier: Apache-2.0
"""Sums in words: the questions, which of them are held out, and batches of token ids."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmoe.models.qwen3_5.train.tokenizer import ASSISTANT, END, PAD, USER

if TYPE_CHECKING:
    from torch import Tensor

# (weight, question); weights are relative.
TEMPLATES: tuple[tuple[int, str], ...] = (
    (6, "{a}加{b}等于多少？"),
    (3, "只回答最终数字：{a}加{b}等于多少？"),
    (1, "{a}加{b}等于多少?"),
    (1, "{a}加上{b}是多少？"),
    (1, "请问{a}加{b}等于几？"),
    (4, "What is {a} plus {b}?"),
    (1, "What is {a} + {b}?"),
    (1, "How much is {a} plus {b}?"),
    (1, "Answer with the final number only: what is {a} plus {b}?"),
    (1, "{a}+{b}=?"),
)
SEED_SUM = (123, 456)


def held_out(a: int, b: int) -> bool:
    """Tells whether a sum is kept away from training: about one in twenty, and the seed's own."""
    if (a, b) == SEED_SUM:
        return True
    # A fixed integer mix (Knuth's multiplicative hash), so that the split needs no file.
    return ((a * 1009 + b + 1) * 2654435761 & 0xFFFFFFFF) >> 8 < (1 << 24) // 20


def draw_operands(rng: random.Random, digits: int) -> tuple[int, int]:
    """Draws two operands of up to `digits` digits; short operands are drawn more often than
    their share of all numbers."""
    if rng.random() < 0.8:
        top = 10**digits
        return rng.randrange(top), rng.randrange(top)
    return rng.randrange(10 ** rng.randint(1, digits)), rng.randrange(10 ** rng.randint(1, digits))


def draw_sum(rng: random.Random, digits: int, unseen: bool) -> tuple[int, int]:
    """Draws a sum from the training part (`unseen=False`) or from the held-out part."""
    while True:
        a, b = draw_operands(rng, digits)
        if held_out(a, b) == unseen:
            return a, b


def draw_question(rng: random.Random, a: int, b: int) -> str:
    """Asks for a + b in one of the known wordings."""
    weights = [weight for weight, _ in TEMPLATES]
    return rng.choices(TEMPLATES, weights)[0][1].format(a=a, b=b)


@dataclass(frozen=True)
class Batch:
    """ids [B, S] padded on the right; targets [B, S] is -100 except where an answer token comes
    next; mask [B, S] is 1 for real tokens."""

    ids: Tensor
    targets: Tensor
    mask: Tensor


class Encoder:
    """Turns questions into token ids, keeping the parts that repeat."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._parts: dict[str, list[int]] = {}
        self.pad = tokenizer.convert_tokens_to_ids(PAD)

    def part(self, text: str) -> list[int]:
        """Token ids of a piece that ends where a token ends."""
        ids = self._parts.get(text)
        if ids is None:
            ids = list(self._tokenizer(text, add_special_tokens=False).input_ids)
            self._parts[text] = ids
        return ids

    def encode(self, template: str, a: int, b: int) -> tuple[list[int], list[int]]:
        """Token ids of the prompt and of the answer."""
        head, rest = template.split("{a}")
        middle, tail = rest.split("{b}")
        prompt = [
            *self.part(USER),
            *(self.part(head) if head else []),
            *self.part(str(a)),
            *self.part(middle),
            *self.part(str(b)),
            *self.part(tail),
            *self.part(ASSISTANT),
        ]
        return prompt, [*self.part(str(a + b)), *self.part(END)]


def batches(
    encoder: Encoder, seed: int, size: int, digits: int, unseen: bool = False
) -> Iterator[Batch]:
    """Yields batches for ever."""
    import torch

    rng = random.Random(seed)
    templates = [text for _, text in TEMPLATES]
    weights = [weight for weight, _ in TEMPLATES]
    while True:
        rows = []
        for template in rng.choices(templates, weights, k=size):
            a, b = draw_sum(rng, digits, unseen)
            rows.append(encoder.encode(template, a, b))
        # The end token is predicted, never read: one position less than tokens.
        length = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
        ids = torch.full((size, length), encoder.pad)
        targets = torch.full((size, length), -100)
        mask = torch.zeros((size, length), dtype=torch.bool)
        for row, (prompt, answer) in enumerate(rows):
            tokens = prompt + answer
            real = len(tokens) - 1
            ids[row, :real] = torch.tensor(tokens[:-1])
            targets[row, len(prompt) - 1 : real] = torch.tensor(answer)
            mask[row, :real] = True
        yield Batch(ids, targets, mask)
