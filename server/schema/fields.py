"""Fields other servers know and this one does not declare: refused by name, or accepted and without effect.

What would change or constrain the output is refused unless it has its neutral value; ignoring it would
return something else than what was asked for. Everything that is in neither table is an unknown field: it is
tolerated, since clients send fields of their own, and logged once.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from server.errors import UnsupportedField
from server.schema.names import OTHER_NAMES


class Refused(NamedTuple):
    """A known field: the values that mean "off" (null always does), and what to say about any other."""

    neutral: tuple[Any, ...] = ()
    hint: str = ""


OFF = Refused((False,))
ZERO = Refused((0,))
ONE = Refused((1,))
EMPTY = Refused(([],))

LOGPROBS = "logprobs and top_logprobs of chat and completions tell log-probabilities"
STRUCTURED = Refused((), "structured output is not available yet")
ADAPTERS = Refused((), "adapters are not available yet")
THINKING = Refused((), "use reasoning_effort, or what the template knows in chat_template_kwargs")
SHORTEN = Refused((), "chat and completions have truncate_prompt_tokens")
CHAT_ONLY = Refused((), "only chat has a template")
USE_MAX_TOKENS = Refused((), "use max_tokens")

# Of a sampler with a switch and further settings, the latter may have the value that is their usual default.
BOTH: dict[str, Refused] = {
    # log-probabilities and token ids in the answer
    "logprob_token_ids": Refused(([],), LOGPROBS),
    "token_ids_logprob": Refused(([],), LOGPROBS),
    "return_logprob": Refused((False,), LOGPROBS),
    "n_probs": Refused((0,), LOGPROBS),
    "top_n_tokens": Refused((0,), LOGPROBS),
    "details": Refused((False,), LOGPROBS),
    "decoder_input_details": Refused((False,), LOGPROBS),
    "return_hidden_states": OFF,
    # structured output
    "structural_tag": STRUCTURED,
    # other names of what is there
    "options": Refused(({},), "its fields stand beside the prompt, under their OpenAI names"),
    "parameters": Refused(({},), "its fields stand beside the prompt, under their OpenAI names"),
    "sampling_params": Refused(({},), "its fields stand beside the prompt, under their OpenAI names"),
    "extra_body": Refused(({},), "clients merge it into the body; its fields stand beside the prompt"),
    "max_length": USE_MAX_TOKENS,
    "min_length": Refused((0,), "use min_tokens"),
    "do_sample": Refused((True,), "use temperature 0 for greedy decoding"),
    "ban_eos_token": Refused((False,), "use ignore_eos"),
    "stop_regex": Refused(([], ""), "stop takes strings"),
    # sampling
    "best_of": Refused((), "it must be left out or equal n"),
    "use_beam_search": OFF,
    "num_beams": Refused((1,), "use_beam_search searches with max(n, best_of) beams"),
    "early_stopping": OFF,
    "length_penalty": Refused((1, 0)),
    "penalty_alpha": ZERO,
    "guidance_scale": ONE,
    "cfg_scale": ONE,
    "negative_prompt": Refused(("",)),
    "typical": ONE,
    "typical_p": ONE,
    "tfs": ONE,
    "tfs_z": ONE,
    "top_a": ZERO,
    "top_n_sigma": Refused((0, -1)),
    "epsilon_cutoff": ZERO,
    "eta_cutoff": ZERO,
    "smoothing_factor": ZERO,
    "smoothing_curve": ONE,
    "dynamic_temperature": OFF,
    "dynatemp_range": ZERO,
    "dynatemp_low": ONE,
    "dynatemp_high": ONE,
    "dynatemp_exponent": ONE,
    "temperature_last": OFF,
    "mirostat": ZERO,
    "mirostat_mode": ZERO,
    "mirostat_tau": Refused((5,)),
    "mirostat_eta": Refused((0.1,)),
    "xtc_probability": ZERO,
    "xtc_threshold": Refused((0.1,)),
    "dry_multiplier": ZERO,
    "dry_base": Refused((1.75,)),
    "dry_allowed_length": Refused((2,)),
    "dry_penalty_last_n": Refused((0, -1)),
    "dry_sequence_breakers": Refused(([], ["\n", ":", '"', "*"])),
    "no_repeat_ngram_size": ZERO,
    "encoder_repetition_penalty": ONE,
    "repetition_penalty_range": Refused((0, -1), "penalties count all tokens"),
    "repeat_last_n": Refused((-1,), "penalties count all tokens"),
    "samplers": Refused((), "filters apply as top-k, top-p, min-p, after temperature"),
    "sampler_order": Refused((), "filters apply as top-k, top-p, min-p, after temperature"),
    "sampler_priority": Refused((), "filters apply as top-k, top-p, min-p, after temperature"),
    "logits_processors": EMPTY,
    "custom_logit_processor": Refused(("",)),
    "custom_params": Refused(({},)),
    "watermark": OFF,
    # which tokens and words may appear
    "banned_tokens": Refused(([], ""), "use bad_words_ids"),
    "banned_strings": Refused(([], ""), "use bad_words"),
    "spaces_between_special_tokens": Refused((True,)),
    "token_healing": Refused((False,), "/v1/completions has it"),
    # reasoning
    "think": THINKING,
    "thinking": THINKING,
    "enable_thinking": THINKING,
    "thinking_budget": THINKING,
    "thinking_token_budget": THINKING,
    # prompts
    "echo": OFF,
    "return_full_text": OFF,
    "input": Refused((), "the responses API is not available"),
    "inputs": Refused((), "send messages, or a prompt"),
    "instructions": Refused(("",), "send a message with the role system"),
    "system": Refused(("",), "send a message with the role system"),
    "input_ids": Refused((), "send token ids as prompt of /v1/completions"),
    "prompt_embeds": Refused(),
    "truncate": SHORTEN,
    "transforms": Refused(([],), SHORTEN.hint),
    # tools
    "functions": Refused(([],), "use tools"),
    "function_call": Refused(("none", "auto"), "use tool_choice"),
    # serving
    "adapter_id": ADAPTERS,
    "lora": Refused(([],), ADAPTERS.hint),
    "lora_path": ADAPTERS,
    "lora_request": ADAPTERS,
    "kv_transfer_params": Refused(),
}

# Values of other names of what is there that leave it as it is, for the dialects that do not take them.
SILENT: dict[str, tuple[Any, ...]] = {
    "n_predict": (-1,),
    "num_predict": (-1,),
    "min_new_tokens": (0,),
    "repeat_penalty": (1,),
    "stop_sequences": ([],),
    "stopping_strings": ([],),
    "no_stop_trim": (False,),
}

# Chat and completions have these; other dialects refuse them.
BEAMS = ("use_beam_search", "length_penalty", "early_stopping", "best_of")

CHAT: dict[str, Refused] = {name: refused for name, refused in BOTH.items() if name not in BEAMS} | {
    "prompt": Refused((), "chat takes messages; /v1/completions takes a prompt"),
    "suffix": Refused(("",), "chat takes messages"),
    "chat_template": Refused((), "templates come with the model; chat_template_kwargs sets their variables"),
    "add_special_tokens": Refused((False,), "the chat template writes the special tokens"),
}

COMPLETION: dict[str, Refused] = {
    name: refused for name, refused in BOTH.items() if name not in (*BEAMS, "echo", "token_healing")
} | {
    "top_logprobs": Refused((0,), "logprobs says how many"),
    "messages": Refused((), "/v1/completions takes a prompt; chat takes messages"),
    "documents": CHAT_ONLY,
    "chat_template": CHAT_ONLY,
    "chat_template_kwargs": Refused(({},), CHAT_ONLY.hint),
    "add_generation_prompt": Refused((False,), CHAT_ONLY.hint),
    "continue_final_message": Refused((False,), CHAT_ONLY.hint),
    "reasoning": CHAT_ONLY,
    "reasoning_effort": CHAT_ONLY,
    "include_reasoning": Refused((True,), CHAT_ONLY.hint),
    "separate_reasoning": Refused((False,), CHAT_ONLY.hint),
    "tools": Refused(([],), CHAT_ONLY.hint),
    "tool_choice": Refused(("none", "auto"), CHAT_ONLY.hint),
}

NO_OPS = frozenset(
    (
        "audio",
        "guided_decoding_backend",
        "metadata",
        "modalities",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
        "verbosity",
        "web_search_options",
    )
)


def strangers(request: type[BaseModel], chat: type[BaseModel]) -> dict[str, Refused]:
    """The fields of chat, and those refused there, that `request`, of another dialect, does not have."""
    fields = {name: Refused((False, 0, [], {}), "it is a field of chat") for name in chat.model_fields} | BOTH
    fields |= {name: Refused(SILENT.get(name, ()), f"use {field}") for name, field in OTHER_NAMES.items()}
    fields["add_generation_prompt"] = Refused((True,), "the turns decide")
    return {name: refused for name, refused in fields.items() if name not in request.model_fields}


def described(table: Mapping[str, Refused]) -> dict[str, Any]:
    """JSON schemas of fields that are only accepted with the values that leave them off."""
    return {
        name: {"enum": [None, *refused.neutral], "description": f"not supported yet. {refused.hint}".strip()}
        for name, refused in table.items()
    }


def refuse_unsupported(fields: Mapping[str, Any], table: Mapping[str, Refused]) -> None:
    """Raise UnsupportedField for the first field of a body that asks for something not built."""
    for name, value in fields.items():
        refused = table.get(name)
        if refused is None or is_neutral(value, refused):
            continue
        if name == "best_of" and type(value) is int and value == (fields.get("n") or 1):
            continue
        hint = f": {refused.hint}" if refused.hint else ""
        raise UnsupportedField(f"{name} is not supported{hint}.", name)


def unknown_fields(extra: Mapping[str, Any] | None, table: dict[str, Refused]) -> list[str]:
    """Names among the fields the schema does not declare that nobody here has heard of."""
    return [name for name in extra or () if name not in table and name not in NO_OPS]


def is_neutral(value: Any, refused: Refused) -> bool:
    """Whether a value leaves the output as it is. True is not 1 and False is not 0 here."""
    if value is None:
        return True
    is_bool = isinstance(value, bool)
    return any(isinstance(neutral, bool) == is_bool and neutral == value for neutral in refused.neutral)
