"""Generates with transformers for benchmarks.laptop, in a process with the environment a user would have.

    python -m benchmarks.transformers_peer MODEL THREADS

The weights are random ones of the model's shape: speed does not depend on them. torch is imported before
this repository's engine, so its threads wait for work as they do by default. Prints a line when it is ready.
Then each line of standard input is `{"prompts": [[1, …], …], "output_tokens": 128}` and is answered by
`[seconds to the first token, seconds in all]`.
"""

import json
import sys
import time

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria

from benchmarks.engine_cpu import make_peer
from models.catalog import locate
from models.loader import read_spec


class FirstToken(StoppingCriteria):
    """Notes when the first token is there, and stops nothing."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Return False for each row."""
        if self.seconds is None:
            self.seconds = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def main() -> None:
    """Answer lines until standard input ends."""
    name, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    model = make_peer(read_spec(locate(name)), torch.bfloat16)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(model, **json.loads(line))), flush=True)


def generate(
    model: PreTrainedModel, prompts: list[list[int]], output_tokens: int
) -> tuple[float | None, float]:
    """Generate greedily to exactly `output_tokens`; returns the seconds to the first token, and in all."""
    input_ids, first = torch.tensor(prompts), FirstToken()
    config = GenerationConfig(
        max_new_tokens=output_tokens, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
    )
    with torch.inference_mode():
        start = time.perf_counter()
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=config,
            stopping_criteria=[first],
        )
        end = time.perf_counter()
    assert output.shape[1] == input_ids.shape[1] + output_tokens
    return None if first.seconds is None else first.seconds - start, end - start


if __name__ == "__main__":
    main()
