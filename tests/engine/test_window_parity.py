"""Models with sliding windows through scheduler and runner: greedy text equals transformers', whatever is
chunked, preempted, found in the prefix cache or shared between samples.
"""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from engine.config import EngineConfig
from engine.device.runner import ModelRunner
from models.loader import load
from tests.engine.driver import Driver, output_of
from tests.gpu_thread import gpu_thread
from tests.models.harness import files_of

VOCAB_SIZE = 131
PAGE_SIZE = 16
# Where transformers' two best logits are closer than this, rounding decides, and either token is right.
LOGIT_GAP = 1e-3
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # so that the answers wander
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def mistral() -> PreTrainedModel:
    """All layers have a window of 19 tokens."""
    return MistralForCausalLM(MistralConfig(**SIZES, num_hidden_layers=3, sliding_window=19))


def mixed() -> PreTrainedModel:
    """One full layer and three with a window of 21: three KV groups of a layer each, and a full one."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            **SIZES,
            num_hidden_layers=4,
            use_sliding_window=True,
            sliding_window=21,
            layer_types=[SLIDING, SLIDING, FULL, SLIDING],
        )
    )


def alternating() -> PreTrainedModel:
    """Full layers and layers with a window by turns: two KV groups of two layers."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            **SIZES,
            num_hidden_layers=4,
            use_sliding_window=True,
            sliding_window=16,
            layer_types=[FULL, SLIDING] * 2,
        )
    )


MODELS = {
    "mistral": (mistral, (19,)),
    "mixed": (mixed, (21, 21, 21, 0)),
    "alternating": (alternating, (0, 16)),
}


class Windowed:
    """A model of transformers, ours with the same weights on one device, and a scheduler around it."""

    def __init__(self, reference: PreTrainedModel, folder, device: torch.device) -> None:
        self.reference = reference.eval()
        reference.save_pretrained(folder)
        with torch.inference_mode():
            self.model = load(files_of(folder), torch.float32, device)

    def driver(self, run_ahead: int, *, num_tokens: int, token_budget: int = 24, **options) -> Driver:
        """`num_tokens` of room, with a page in every group."""
        settings = EngineConfig(
            device=self.model.device.type,
            kv_tokens=num_tokens,
            max_num_seqs=6,
            page_size=PAGE_SIZE,
            run_ahead=run_ahead,
        )
        runner = ModelRunner.around(self.model, settings, token_budget, ())
        driver = Driver.of(
            num_pages=runner.num_pages,
            page_size=PAGE_SIZE,
            run_ahead=run_ahead,
            kv_windows=runner.kv_windows,
            token_budget=token_budget,
            max_num_seqs=6,
            max_model_len=runner.max_model_len,
            **options,
        )
        driver.runner = runner
        return driver

    @torch.inference_mode()
    def check(self, sequence) -> None:
        """Every token is the best one after those before it, but for rounding."""
        prompt, output = list(sequence.request.prompt_token_ids), output_of(sequence)
        assert len(output) == sequence.request.sampling.max_tokens
        logits = self.reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert gaps.max() < LOGIT_GAP, f"at token {int(gaps.argmax())} of {len(output)}"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    device = torch.device(request.param)
    with gpu_thread(device):
        yield device


@pytest.fixture(scope="module", params=MODELS)
def windowed(request, device, tmp_path_factory) -> Windowed:
    make, _ = MODELS[request.param]
    torch.manual_seed(3)
    return Windowed(make(), tmp_path_factory.mktemp(request.param), device)


GREEDY = {"temperature": 0.0, "ignore_eos": True}


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


def test_groups_of_the_models(windowed):
    windows = tuple(group.window for group in windowed.model.spec.kv_groups)
    assert windows in [windows for _, windows in MODELS.values()]


def test_prompts_in_chunks_and_long_outputs(windowed, run_ahead):
    driver = windowed.driver(run_ahead, num_tokens=1024)
    lengths = (1, 15, 16, 17, 19, 33, 70, 131)
    sequences = [driver.add(prompt_of(n, n), max_tokens=40, **GREEDY) for n in lengths]
    driver.run()
    for sequence in sequences:
        windowed.check(sequence)


def test_preempted_sequences_resume(windowed, run_ahead):
    driver = windowed.driver(run_ahead, num_tokens=96, overcommit=1.0)
    sequences = [driver.add(prompt_of(n, n), max_tokens=50, **GREEDY) for n in (10, 20, 30, 40, 12, 17)]
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    for sequence in sequences:
        windowed.check(sequence)


def test_prefixes_are_found_behind_and_inside_of_answers(windowed, run_ahead):
    driver = windowed.driver(run_ahead, num_tokens=1024)
    first = driver.add(prompt_of(70, 1), max_tokens=50, **GREEDY)
    driver.run()
    tokens = first.token_ids.tolist()
    others = [
        driver.add(tokens + prompt_of(5, 2), max_tokens=30, **GREEDY),
        driver.add(tokens[:50] + prompt_of(30, 3), max_tokens=30, **GREEDY),
    ]
    driver.run()
    assert [other.num_cached_tokens for other in others] == [112, 48]
    for sequence in (first, *others):
        windowed.check(sequence)


@pytest.mark.parametrize("length", [9, 33, 70])
def test_samples_share_a_prompt(windowed, run_ahead, length):
    driver = windowed.driver(run_ahead, num_tokens=1024)
    samples = driver.add_group(prompt_of(length, length), 3, max_tokens=30, **GREEDY)
    driver.run()
    assert driver.num_prefilled == length + 2, "the followers compute one token each"
    for sample in samples:
        windowed.check(sample)


def test_pages_used_stop_growing(windowed, run_ahead):
    """At least those of layers with a window."""
    driver = windowed.driver(run_ahead, num_tokens=160)
    num_windows = sum(group.window > 0 for group in windowed.model.spec.kv_groups)
    num_full = len(windowed.model.spec.kv_groups) - num_windows
    sequence = driver.add(prompt_of(20, 5), max_tokens=130, **GREEDY)
    most = 0
    while driver.step():
        most = max(most, driver.scheduler.pool.num_used)
    windowed.check(sequence)
    assert most <= num_full * 10 + num_windows * 4
    assert driver.scheduler.num_preemptions == 0
