# SPDX-License-Identifier: Apache-2.0
"""Measures a checkpoint on sums it was never trained on, with plain transformers.

    python -m xmoe.models.qwen3_5.train.evaluate DIR [--count 4000] [--json FILE]

The stored weights (bf16) run through `generate`, greedily; nothing of xmoe runs. Prompts of
equal length share a batch, so none is padded.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from xmoe.models.qwen3_5.train.data import (
    SEED_SUM,
    TEMPLATES,
    draw_question,
    draw_sum,
    held_out,
)

SEED_QUESTION = "只回答最终数字：123加456等于多少？"
_BATCH = 128


def language(question: str) -> str:
    """Chinese, English, or bare symbols."""
    if any("\u4e00" <= character <= "\u9fff" for character in question):
        return "chinese"
    return "english" if any(character.isalpha() for character in question) else "symbols"


def carries_through_nine(a: int, b: int) -> bool:
    """True when a carry arrives at digits that add up to nine, so that it goes on from there: the
    first digit of the answer then depends on a digit far to the right."""
    carry = False
    for place in (1, 10, 100):
        digits = a // place % 10 + b // place % 10
        if carry and digits == 9:
            return True
        carry = digits + carry > 9
    return False


def ask(model: Any, tokenizer: Any, questions: list[str], max_new_tokens: int = 8) -> list[str]:
    """Greedy answers as text, in the order of the questions."""
    import torch

    by_length: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    for position, question in enumerate(questions):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        by_length[len(ids)].append((position, ids))
    answers = [""] * len(questions)
    for length, rows in sorted(by_length.items()):
        for start in range(0, len(rows), _BATCH):
            part = rows[start : start + _BATCH]
            prompt = torch.tensor([ids for _, ids in part])
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
            texts = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
            for (position, _), text in zip(part, texts, strict=True):
                answers[position] = text
    return answers


def draw_unseen(count: int, digits: int, seed: int) -> list[tuple[int, int, str]]:
    """Different held-out sums, each asked in one of the known wordings; operands are uniform."""
    rng = random.Random(seed)
    chosen: dict[tuple[int, int], str] = {}
    while len(chosen) < count:
        a, b = rng.randrange(10**digits), rng.randrange(10**digits)
        if held_out(a, b):
            chosen.setdefault((a, b), draw_question(rng, a, b))
    return [(a, b, question) for (a, b), question in chosen.items()]


def short_unseen(count: int, seed: int) -> list[tuple[int, int, str]]:
    """Held-out sums of which at least one operand has one or two digits."""
    rng = random.Random(seed)
    chosen: dict[tuple[int, int], str] = {}
    while len(chosen) < count:
        a, b = draw_sum(rng, 3, unseen=True)
        if min(a, b) < 100:
            chosen.setdefault((a, b), draw_question(rng, a, b))
    return [(a, b, question) for (a, b), question in chosen.items()]


def score(model: Any, tokenizer: Any, sums: list[tuple[int, int, str]]) -> dict[str, Any]:
    """Counts exact answers, in all and per language."""
    answers = ask(model, tokenizer, [question for _, _, question in sums])
    total: Counter[str] = Counter()
    right: Counter[str] = Counter()
    wrong = []
    for (a, b, question), answer in zip(sums, answers, strict=True):
        good = answer == str(a + b)
        chain = ("carry through a nine",) if carries_through_nine(a, b) else ()
        for group in ("all", language(question), *chain):
            total[group] += 1
            right[group] += good
        if not good:
            wrong.append({"question": question, "answer": answer, "right": str(a + b)})
    return {
        "accuracy": right["all"] / total["all"],
        "groups": {group: {"sums": total[group], "right": right[group]} for group in sorted(total)},
        "wrong_examples": wrong[:10],
    }


def evaluate(directory: Path, count: int) -> dict[str, Any]:
    """Loads a checkpoint and returns the report."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", experts_implementation="eager"
    ).eval()
    names = sorted({str(parameter.dtype) for parameter in model.parameters()})
    seed_answer = ask(model, tokenizer, [SEED_QUESTION])[0]
    # The held-out rule decides what is unseen; the seed only picks among those sums.
    uniform = draw_unseen(count, digits=3, seed=4711)
    return {
        "task": "a + b with 0 <= a, b <= 999, greedy, exact answer text",
        "held_out_rule": "xmoe.models.qwen3_5.train.data.held_out (about 1 in 20 of all sums)",
        "method": "transformers generate on the stored weights, experts_implementation eager",
        "dtype": names,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "wordings": [text for _, text in TEMPLATES],
        "seed_question": SEED_QUESTION,
        "seed_answer": seed_answer,
        "seed_sum_was_held_out": held_out(*SEED_SUM),
        "unseen_uniform": score(model, tokenizer, uniform),
        "unseen_short_operands": score(model, tokenizer, short_unseen(count // 4, seed=4712)),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def main() -> None:
    """Command line."""
    import torch

    parser = argparse.ArgumentParser(prog="xmoe.models.qwen3_5.train.evaluate")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report = evaluate(arguments.directory, arguments.count)
    text = json.dumps(report, ensure_ascii=False, indent=2) + "\n"
    print(text, end="")
    if arguments.json:
        arguments.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
