# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of the small checkpoint: bytes, whole phrases, and digits that know their place.

Any text round-trips, since every byte has a token. Three things keep a sum short and learnable:

* a phrase such as "等于多少？" is one token;
* a digit is one token, and the tens, hundreds and thousands digit of a number have tokens of their
  own. The user types and reads plain digits: the normaliser maps such a digit to one of the 30
  code points U+FDD0..U+FDED, which Unicode reserves as noncharacters and which therefore never
  occur in text that is exchanged, and the decoder maps them back;
* the chat template adds one token before and one after the question.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAD = "<|pad|>"
END = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SYSTEM = "<|system|>"
SPECIAL = (PAD, END, USER, ASSISTANT, SYSTEM)

PHRASES = (
    "只回答最终数字：",
    "请问",
    "计算",
    "加上",
    "加",
    "等于多少？",
    "等于多少?",
    "是多少？",
    "是多少?",
    "等于几？",
    "等于",
    "Answer with the final number only: ",
    "Calculate ",
    "What is ",
    "what is ",
    "How much is ",
    " plus ",
    " + ",
    " equals",
)

# One request of one or several turns; a question is closed by the assistant mark, an answer by END.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% else %}<|{{ message.role }}|>{{ message.content }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_PLACES = ((3, "thousands"), (2, "hundreds"), (1, "tens"))
_FIRST_NONCHARACTER = 0xFDD0


def place_characters() -> dict[str, tuple[str, int]]:
    """Maps each reserved code point to its digit and the number of digits that follow it."""
    table: dict[str, tuple[str, int]] = {}
    for row, (following, _) in enumerate(_PLACES):
        for digit in range(10):
            table[chr(_FIRST_NONCHARACTER + 10 * row + digit)] = (str(digit), following)
    return table


def build_tokenizer() -> Any:
    """Builds the tokenizer from nothing but this file.

    Returns:
        A `transformers.PreTrainedTokenizerFast` with a chat template.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    places = place_characters()
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(f"{digit}(?=[0-9]{{{following}}}(?![0-9]))"), character)
            for character, (digit, following) in places.items()
        ]
    )
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(character, digit) for character, (digit, _) in places.items()]
        + [decoders.ByteLevel()]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PHRASES])
    tokenizer.add_tokens([AddedToken(text, normalized=True) for text in places])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


_CLASS_FILE = "tokenization_sums.py"
_CLASS = '''# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of this checkpoint is what tokenizer.json says, nothing else."""

from transformers import PreTrainedTokenizerFast


class SumsTokenizer(PreTrainedTokenizerFast):
    """No code of its own: it only keeps AutoTokenizer from replacing tokenizer.json's rules with
    the ones it holds for the model type."""
'''


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Writes the tokenizer so that AutoTokenizer uses it unchanged, trusting remote code or not.

    For the model type of Qwen3.5-MoE, transformers (5.24) builds its own normaliser and decoder and
    takes only the vocabulary from the file, which reads our digits wrongly without an error. A
    class named under `auto_map` turns that off; without trust in remote code it is not loaded, and
    `tokenizer_class` (the plain fast tokenizer) is used.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    value = json.loads(file.read_text(encoding="utf-8"))
    value["auto_map"] = {"AutoTokenizer": [None, f"{Path(_CLASS_FILE).stem}.SumsTokenizer"]}
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    (directory / _CLASS_FILE).write_text(_CLASS, encoding="utf-8")
