# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of this checkpoint is what tokenizer.json says, nothing else."""

from transformers import PreTrainedTokenizerFast


class SumsTokenizer(PreTrainedTokenizerFast):
    """No code of its own: it only keeps AutoTokenizer from replacing tokenizer.json's rules with
    the ones it holds for the model type."""
