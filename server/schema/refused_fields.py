"""Fields that a dialect knows and does not declare: refused by name, or accepted and without effect.

What would change or constrain the output is refused unless it has a value that leaves it as it is, which the
field's name decides; ignoring it would return something else than what was asked for. Each dialect's table is
made in `dialects`. Everything that is in none is an unknown field: it is tolerated, since clients send fields
of their own, and logged once.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.errors import InvalidRequest


class UnsupportedField(InvalidRequest):
    """A field that is known and would change the output, but does not act here."""


class Refused(NamedTuple):
    """A known field: the values that mean "off" (null always does), and what to say about any other."""

    neutral: tuple[Any, ...] = ()
    hint: str = ""


OFF = Refused((False,))
ZERO = Refused((0,))
ONE = Refused((1,))
EMPTY = Refused(([],))

LOGPROBS = "logprobs and top_logprobs of chat and completions tell log-probabilities"
ADAPTERS = Refused((), "the model is served as it is, without adapters")
THINKING = Refused((), "use reasoning_effort, or what the template knows in chat_template_kwargs")
SHORTEN = Refused((), "chat and completions have truncate_prompt_tokens")
TURNS = Refused((True,), "the turns decide")
SEPARATE = Refused((True,), "what the model thinks stands for itself")

# Fields of other servers, and words about some that a dialect here has. Of a sampler with a switch and
# further settings, the latter may have the value that is their usual default.
FOREIGN: dict[str, Refused] = {
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
    "structural_tag": Refused((), "tools are enforced by tool_choice, everything else by response_format"),
    # other names of what is there
    "options": Refused(({},), "its fields stand beside the prompt, under their OpenAI names"),
    "parameters": Refused(({},), "its fields stand beside the prompt, under their OpenAI names"),
    "sampling_params": Refused(({},), "its fields stand beside the prompt, under their OpenAI names"),
    "extra_body": Refused(({},), "clients merge it into the body; its fields stand beside the prompt"),
    "do_sample": Refused((True,), "use temperature 0 for greedy decoding"),
    "ban_eos_token": Refused((False,), "use ignore_eos"),
    "stop_regex": Refused(([], ""), "stop takes strings"),
    # sampling
    "num_beams": Refused((1,), "use_beam_search searches with max(n, best_of) beams"),
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
    # reasoning
    "think": THINKING,
    "thinking": THINKING,
    "enable_thinking": THINKING,
    "thinking_budget": THINKING,
    "thinking_token_budget": THINKING,
    # prompts
    "return_full_text": Refused((False,), "/v1/completions has echo"),
    "input": Refused((), "send messages, or a prompt; /v1/responses takes input"),
    "inputs": Refused((), "send messages, or a prompt"),
    "instructions": Refused(("",), "send a message with the role system"),
    "system": Refused(("",), "send a message with the role system"),
    "input_ids": Refused((), "send token ids as prompt of /v1/completions"),
    "prompt_embeds": Refused(),
    "chat_template": Refused(
        (), "the template is the server's (--chat-template); chat_template_kwargs sets its variables"
    ),
    "truncate": SHORTEN,
    "transforms": Refused(([],), SHORTEN.hint),
    "context_management": Refused(
        ([], {}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "shorten the conversation before sending it",
    ),
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

# Declared fields with values that leave an answer as it is where a dialect does not have them; of all other
# fields only null does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "stream_options": ({},),
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "bad_words_ids": ([],),
    "min_tokens": (0,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "cache_prompt": (True,),
    "priority": (0,),
    # structured output
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json_object": (False,),
    "json_object": (False,),
    "format": ("", {}),
    "grammar": ("",),
    "text": ({}, {"format": {"type": "text"}}),
    "output_config": ({},),
    # beam search
    "use_beam_search": (False,),
    "length_penalty": (1, 0),
    "early_stopping": (False,),
    # prompts
    "truncation": ("disabled",),
    "suffix": ("",),
    "echo": (False,),
    "token_healing": (False,),
    "truncation_side": ("left",),
    "add_generation_prompt": (False,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    # reasoning and tools
    "reasoning": ({},),
    "include_reasoning": (True,),
    "separate_reasoning": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    # log-probabilities
    "logprobs": (False,),
    "top_logprobs": (0,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_token_strs": (False,),
    "return_details": (False,),
    "include": ([],),
    # embeddings
    "encoding_format": ("float",),
}

# What shapes a prompt: where prompts are only counted, nothing else can be missed.
PROMPT_FIELDS = frozenset(
    (
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "container",
        "context_management",
        "continue_final_message",
        "conversation",
        "documents",
        "enable_thinking",
        "function_call",
        "functions",
        "input",
        "input_ids",
        "inputs",
        "instructions",
        "mcp_servers",
        "messages",
        "mm_processor_kwargs",
        "multimodal_params",
        "output_config",
        "previous_response_id",
        "prompt",
        "prompt_embeds",
        "reasoning",
        "reasoning_effort",
        "suffix",
        "system",
        "think",
        "thinking",
        "token_healing",
        "tool_choice",
        "tools",
        "transforms",
        "truncate",
        "truncate_prompt_tokens",
        "truncation",
        "truncation_side",
    )
)

NO_OPS = frozenset(
    (
        "audio",
        "group_request_id",
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
        "suggested_dp_index",
        "user",
        "verbosity",
        "web_search_options",
    )
)


def described(table: Mapping[str, Refused]) -> dict[str, Any]:
    """JSON schemas of fields that are only accepted with the values that leave them off."""
    return {
        name: {"enum": [None, *refused.neutral], "description": refusal("not supported", refused)}
        for name, refused in table.items()
    }


def refuse_unsupported(fields: Mapping[str, Any], table: Mapping[str, Refused]) -> None:
    """Raise UnsupportedField for the first field of a body that asks for something that does not act."""
    for name, value in fields.items():
        refused = table.get(name)
        if refused is None or is_neutral(value, refused):
            continue
        if name == "best_of" and type(value) is int and value == (fields.get("n") or 1):
            continue
        raise UnsupportedField(f"{refusal(f'{name} is not supported', refused)}.", name)


def refusal(what: str, refused: Refused) -> str:
    """`what` is the matter, and what to do about it."""
    return f"{what}: {refused.hint}" if refused.hint else what


def unknown_fields(extra: Mapping[str, Any] | None, table: dict[str, Refused]) -> list[str]:
    """Names among the fields the schema does not declare that nobody here has heard of."""
    return [name for name in extra or () if name not in table and name not in NO_OPS]


def is_neutral(value: Any, refused: Refused) -> bool:
    """Whether a value leaves the output as it is. True is not 1 and False is not 0 here."""
    if value is None:
        return True
    is_bool = isinstance(value, bool)
    return any(isinstance(neutral, bool) == is_bool and neutral == value for neutral in refused.neutral)
