"""The state slots by themselves."""

import numpy as np
import torch

from engine.device.slots import StateSlots
from engine.device.staging import upload
from engine.outputs import SlotInit
from engine.request import SamplingParams

CPU = torch.device("cpu")


def start(slots: StateSlots, **sampling: SamplingParams) -> None:
    """Start slot n with the parameters called `slot_n`, all in one step."""
    inits = {
        int(name.removeprefix("slot_")): SlotInit(given, 2**40, (5,), ()) for name, given in sampling.items()
    }
    numbers = (np.array(list(inits)), *slots.parameters(list(inits.values())))
    slots.start(inits, *upload(CPU, numbers))


def test_each_slot_holds_its_own_parameters():
    slots = StateSlots(4, max_pages=2, padding_page=9, vocab_size=50, eos_token_ids=(1,), device=CPU)
    default = SamplingParams(max_tokens=1, temperature=0.0)
    filtered = SamplingParams(max_tokens=1, temperature=0.7, top_p=0.9, top_k=2**31 - 1, min_p=0.1)
    penalized = SamplingParams(
        max_tokens=1, presence_penalty=-1.5, frequency_penalty=0.3, repetition_penalty=1.1, top_k=1
    )
    start(slots, slot_1=penalized, slot_3=penalized)
    start(slots, slot_3=filtered, slot_0=default)
    expected = {0: default, 1: penalized, 2: default, 3: filtered, 4: default}
    names = {
        "presence": "presence_penalty",
        "frequency": "frequency_penalty",
        "repetition": "repetition_penalty",
    }
    for name in ("temperature", "top_p", "min_p", "top_k", "presence", "frequency", "repetition"):
        values = getattr(slots, name)
        told = [getattr(expected[slot], names.get(name, name)) for slot in range(5)]
        assert torch.equal(values, torch.tensor(told, dtype=values.dtype)), name
        assert values.is_contiguous(), f"the sampler reads {name} by slot"
    assert slots.seed.tolist() == [2**40, 2**40, 0, 2**40, 0]
