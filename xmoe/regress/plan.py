# SPDX-License-Identifier: Apache-2.0
"""What one regression run does, validated before any rank starts."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from xmoe import arguments, env, outputs
from xmoe.errors import ConfigError
from xmoe.types import FenceMode
from xmoe.types import Path as MoePath

EP_SIZES = (2, 4, 8, 16)
# The same sum in both languages the shipped checkpoint was trained on: all answers must be one
# string.
DEFAULT_PROMPTS = ("123加456等于多少？", "What is 123 plus 456?")
_SUM = re.compile(r"(\d+)\s*(?:加|\+|plus)\s*(\d+)")


@dataclass(frozen=True)
class Plan:
    """One regression run. `requests[i]` is answered by rank i % ep in wave i // ep."""

    model_dir: str
    ep_size: int
    rounds: int
    requests: tuple[str, ...]
    max_new_tokens: int
    paths: tuple[MoePath, ...]
    fence: FenceMode
    step_timeout_s: float
    log_dir: str = ""
    device: str = "host"
    attention: str | None = None

    @property
    def waves(self) -> int:
        """Requests a rank answers one after the other; equal on all ranks, the last may be
        empty.
        """
        return -(-len(self.requests) // self.ep_size)

    def prompt(self, rank: int, wave: int) -> str | None:
        """The prompt of this rank in this wave, None for an empty shard."""
        index = wave * self.ep_size + rank
        return self.requests[index] if index < len(self.requests) else None


def expected_answer(prompt: str) -> str | None:
    """The sum a prompt asks for, None when it is not an addition."""
    match = _SUM.search(prompt)
    return str(int(match[1]) + int(match[2])) if match else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `xmoe regress`."""
    sizes = arguments.of(env.whole(*EP_SIZES))
    parser.add_argument("--ep", type=sizes, default=8, metavar="N", help="EP size (default 8)")
    parser.add_argument(
        "--model", metavar="DIR", help="Qwen3.5-MoE checkpoint directory (default: the shipped one)"
    )
    count = arguments.of(env.integer(1, 100_000))
    parser.add_argument("--rounds", type=count, default=3, help="repetitions (default 3)")
    parser.add_argument(
        "--requests", type=count, default=8, help="requests a round; fewer than ranks is fine"
    )
    parser.add_argument("--max-new-tokens", type=count, default=8, help="per request (default 8)")
    parser.add_argument(
        "--path", choices=("mega_moe", "fused_moe", "both"), default="both", help="default both"
    )
    parser.add_argument(
        "--fence",
        choices=[mode.value for mode in FenceMode],
        help="mega_moe: order of launches sharing a window; off shows the race (default stream)",
    )
    parser.add_argument(
        "--device",
        choices=("host", "npu"),
        default="host",
        help="where tensors live: host memory, or torch_npu's (default host)",
    )
    parser.add_argument(
        "--attention",
        choices=("eager", "sdpa"),
        help="transformers' attention function (default: its own choice)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="repeatable; requests cycle through the prompts (default: one sum in two languages)",
    )
    parser.add_argument(
        "--timeout",
        type=arguments.of(env.seconds()),
        default=120.0,
        metavar="SECONDS",
        help="longest silence of a rank before the run is ended (default 120)",
    )
    outputs.add_json(parser)


def plan_from_args(args: argparse.Namespace) -> Plan:
    """Validate the options. Local, opens no device."""
    prompts = tuple(args.prompt or DEFAULT_PROMPTS)
    if any(not prompt.strip() for prompt in prompts):
        raise ConfigError("--prompt is empty; allowed: any text; next: pass a question")
    arguments.need("--fence", args.fence, args.path != "fused_moe", "with --path mega_moe or both")
    paths = tuple(MoePath) if args.path == "both" else (MoePath(args.path),)
    return Plan(
        model_dir=str(_model_dir(args.model)),
        ep_size=args.ep,
        rounds=args.rounds,
        requests=tuple(prompts[i % len(prompts)] for i in range(args.requests)),
        max_new_tokens=args.max_new_tokens,
        paths=paths,
        fence=FenceMode(args.fence or FenceMode.STREAM),
        step_timeout_s=args.timeout,
        device=args.device,
        attention=args.attention,
    )


def _model_dir(given: str | None) -> Path:
    from xmoe.models.checkpoints import shipped_checkpoint

    folder = Path(given) if given else shipped_checkpoint()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--model {folder}: no config.json there; allowed: a Hugging Face checkpoint directory "
            "of Qwen3.5-MoE; next: check the path"
        )
    return folder.resolve()
