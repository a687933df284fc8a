# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5-MoE: configuration, checkpoint, exact widening, and the transformers engine."""
