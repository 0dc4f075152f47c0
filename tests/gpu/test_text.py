"""Greedy text of the real SmolLM2 weights: the GPU's against the CPU's."""

import pytest
import torch

from engine.request import SamplingParams
from engine.text.tokenizer import Tokenizer
from models.catalog import default_cache_dir, locate
from models.loader import load
from tests.gpu.driver import Driver
from tests.models.harness import CPU, forward_logits

pytestmark = pytest.mark.gpu

MODEL = "SmolLM2-135M-Instruct"
NUM_NEW_TOKENS = 32
GREEDY = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rivers.",
    "Explain why the sky is blue in one sentence.",
    "List three prime numbers.",
    "Translate 'good morning' into Spanish.",
    "What do bees make?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "How many legs does a spider have?",
    "Give me a recipe for pancakes.",
    "What is 12 times 12?",
    "Summarize the plot of Romeo and Juliet.",
    "Who wrote 'On the Origin of Species'?",
    "Name a programming language and say what it is good for.",
    "What is the difference between a list and a tuple in Python?",
    "Why do leaves change colour in autumn?",
    "Write a polite email that declines a meeting.",
    "What is photosynthesis?",
    "Describe the taste of a lemon.",
    "How does a bicycle stay upright?",
    "Tell me a joke about computers.",
    "What is the largest ocean on Earth?",
    "Give three tips for sleeping well.",
    "What happened in 1969?",
    "Write the first line of a detective novel.",
]


@pytest.fixture(scope="module")
def files():
    """The model's files, if they have been fetched; nothing is fetched here."""
    if not any((default_cache_dir() / MODEL).glob("*.gguf")):
        pytest.skip(f"{MODEL} is not in {default_cache_dir()}: run monoloop pull {MODEL}")
    return locate(MODEL, progress=False)


@pytest.fixture(scope="module")
def prompts(files) -> list[list[int]]:
    tokenizer = Tokenizer(files.tokenizer_dir)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.encode_rendered(tokenizer.render_chat(chat, max_chars=1000)) for chat in chats]


@pytest.fixture(scope="module")
def reference(files):
    """The CPU's model in float32."""
    return load(files, torch.float32, CPU)


def generate(files, dtype: torch.dtype, device: torch.device, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations, all prompts in one batch."""
    with torch.inference_mode():
        driver = Driver(load(files, dtype, device), len(prompts), max(map(len, prompts)) + NUM_NEW_TOKENS)
    outputs = [[driver.start(slot, ids, GREEDY)] for slot, ids in enumerate(prompts)]
    for _ in range(NUM_NEW_TOKENS - 1):
        for output, token in zip(outputs, driver.decode(range(len(prompts))), strict=True):
            output.append(token)
    return outputs


def first_difference(reference, prompt: list[int], output: list[int]) -> tuple[int, float] | None:
    """Where greedy search on the CPU takes another token, and by how much it prefers its own.

    One pass over prompt and output: up to there every output token is the CPU's argmax after the tokens
    before it, so the CPU generates exactly these.
    """
    logits = forward_logits(reference, prompt + output[:-1])[len(prompt) - 1 :]
    gaps = logits.amax(-1) - logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    differs = (gaps > 0).nonzero()
    return (int(differs[0]), gaps[differs[0]].item()) if len(differs) else None


@pytest.mark.parametrize(
    ("dtype", "largest_gap", "fewest_equal"),
    [(torch.float32, 0.02, 22), (torch.bfloat16, 0.3, 12)],
    ids=["float32", "bfloat16"],
)
def test_greedy_text_equals_the_cpus(dtype, largest_gap, fewest_equal, files, prompts, reference, device):
    """Of 24 prompts; where the CPU's two best tokens are closer than rounding, either is right."""
    outputs = generate(files, dtype, device, prompts)
    num_equal = 0
    for question, prompt, output in zip(QUESTIONS, prompts, outputs, strict=True):
        found = first_difference(reference, prompt, output)
        num_equal += found is None
        if found is not None:
            print(f"{question!r}: token {found[0]} differs, logit gap {found[1]:.3f}")
            assert found[1] < largest_gap
    print(f"{dtype}: {num_equal} of {len(QUESTIONS)} texts are equal")
    assert num_equal >= fewest_equal
