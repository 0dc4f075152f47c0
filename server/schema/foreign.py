"""Fields of other servers' APIs: those that are refused, and those that have no effect anywhere."""

from collections.abc import Mapping
from typing import Any

from server.schema.refused_fields import Refused

OFF = Refused((False,))
ZERO = Refused((0,))
ONE = Refused((1,))
EMPTY = Refused(([],))

LOGPROBS = "logprobs and top_logprobs of chat and completions return logprobs"
ADAPTERS = Refused((), "the model is served as it is, without adapters")
THINKING = "use reasoning_effort, or what the template knows in chat_template_kwargs"
SAMPLERS = "filters apply as top-k, top-p, min-p, after temperature"
SHORTEN = "chat and completions have truncate_prompt_tokens"
TURNS = Refused((True,), "the turns decide")
SEPARATE = Refused((True,), "reasoning is always separate")


def prompt_field(neutral: tuple[Any, ...] = (), hint: str = "") -> Refused:
    """Return the row of a field that could change the tokens of a prompt."""
    return Refused(neutral, hint, shapes_prompt=True)


# Fields of other servers, and hints for some that a request here has. Of a sampler with a switch and further
# settings, the latter may have their usual default.
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
    "options": Refused(({},), "its fields belong beside the prompt, under their OpenAI names"),
    "parameters": Refused(({},), "its fields belong beside the prompt, under their OpenAI names"),
    "sampling_params": Refused(({},), "its fields belong beside the prompt, under their OpenAI names"),
    "extra_body": Refused(({},), "clients merge it into the body; its fields belong beside the prompt"),
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
    "samplers": Refused((), SAMPLERS),
    "sampler_order": Refused((), SAMPLERS),
    "sampler_priority": Refused((), SAMPLERS),
    "logits_processors": EMPTY,
    "custom_logit_processor": Refused(("",)),
    "custom_params": Refused(({},)),
    "watermark": OFF,
    # which tokens and words may appear
    "banned_tokens": Refused(([], ""), "use bad_words_ids"),
    "banned_strings": Refused(([], ""), "use bad_words"),
    "spaces_between_special_tokens": Refused((True,)),
    # reasoning
    "think": prompt_field(hint=THINKING),
    "thinking": prompt_field(hint=THINKING),
    "enable_thinking": prompt_field(hint=THINKING),
    "thinking_budget": Refused((), THINKING),
    "thinking_token_budget": Refused((), THINKING),
    # prompts
    "return_full_text": Refused((False,), "/v1/completions has echo"),
    "input": prompt_field((), "send messages, or a prompt; /v1/responses takes input"),
    "inputs": prompt_field((), "send messages, or a prompt"),
    "instructions": prompt_field(("",), "send a message with the role system"),
    "system": prompt_field(("",), "send a message with the role system"),
    "input_ids": prompt_field((), "send token ids as prompt of /v1/completions"),
    "prompt_embeds": prompt_field(),
    "chat_template": prompt_field(
        (), "the template is the server's (--chat-template); chat_template_kwargs sets its variables"
    ),
    "truncate": prompt_field(hint=SHORTEN),
    "transforms": prompt_field(([],), SHORTEN),
    "context_management": prompt_field(
        ([], {}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "shorten the conversation before sending it",
    ),
    # tools
    "functions": prompt_field(([],), "use tools"),
    "function_call": prompt_field(("none", "auto"), "use tool_choice"),
    # output that is not text, tools of the server
    "modalities": Refused((["text"],), "the model writes text only"),
    "web_search_options": Refused((), "nothing is searched for; tools can be called by the client"),
    # serving
    "adapter_id": ADAPTERS,
    "lora": Refused(([],), ADAPTERS.hint),
    "lora_path": ADAPTERS,
    "lora_request": ADAPTERS,
    "kv_transfer_params": Refused(),
}

# Accepted without effect.
NO_OPS = frozenset(
    (
        "audio",
        "cache_control",
        "group_request_id",
        "guided_decoding_backend",
        "inference_geo",
        "metadata",
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
        "speed",
        "store",
        "suggested_dp_index",
        "user",
        "verbosity",
    )
)


def unknown_fields(extra: Mapping[str, Any] | None, table: Mapping[str, Refused]) -> list[str]:
    """Return the names among undeclared fields that are not known at all."""
    return [name for name in extra or () if name not in table and name not in NO_OPS]
