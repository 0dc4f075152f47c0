"""What transformers makes of the default model: python -m tests.clients.expected < pairs.json

Run in the Python of the server. Reads a list of [context, continuation], prints the log-likelihood of each
continuation and whether greedy decoding would produce it.
"""

import json
import sys
from typing import Any

import torch

from models.catalog import locate
from tests.models.harness import transformers_llama, transformers_logits

from .conftest import MODEL


def main() -> None:
    """Read pairs, print [log-likelihood, is greedy] for each."""
    from transformers import AutoTokenizer

    files = locate(MODEL, progress=False)
    model = transformers_llama(files.weights)
    tokenizer: Any = AutoTokenizer.from_pretrained(files.tokenizer_dir)
    found = []
    for context, continuation in json.load(sys.stdin):
        prefix = tokenizer.encode(context, add_special_tokens=False)
        whole = tokenizer.encode(context + continuation, add_special_tokens=False)
        logits = transformers_logits(model, whole)[len(prefix) - 1 : -1]
        targets = torch.tensor(whole[len(prefix) :])
        logprobs = logits.log_softmax(-1).gather(1, targets.unsqueeze(1))
        found.append([logprobs.sum().item(), bool((logits.argmax(-1) == targets).all())])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
