"""Fields other servers know and this one does not declare: refused by name, or accepted and without effect.

What would change or constrain the output is refused unless it has its neutral value; ignoring it would
return something else than what was asked for. Everything that is in neither table is an unknown field: it is
tolerated, since clients send fields of their own, and logged once.
"""

from typing import Any, NamedTuple

from server.errors import UnsupportedField


class Refused(NamedTuple):
    """A known field: the values that mean "off" (null always does), and what to say about any other."""

    neutral: tuple[Any, ...] = ()
    hint: str = ""


OFF = Refused((False,))
STRUCTURED = Refused(hint="structured output is not available yet")
LOGPROBS = "log-probabilities are not available yet"

BOTH: dict[str, Refused] = {
    "top_logprobs": Refused((0,), LOGPROBS),
    "prompt_logprobs": Refused(hint=LOGPROBS),
    "logprob_token_ids": Refused(([],), LOGPROBS),
    "token_ids_logprob": Refused(([],), LOGPROBS),
    "return_logprob": OFF,
    "return_tokens_as_token_ids": OFF,
    "return_token_ids": OFF,
    "response_format": Refused(({"type": "text"},), "only the type text is available yet"),
    "structured_outputs": STRUCTURED,
    "guided_json": STRUCTURED,
    "guided_regex": STRUCTURED,
    "guided_choice": STRUCTURED,
    "guided_grammar": STRUCTURED,
    "regex": STRUCTURED,
    "ebnf": STRUCTURED,
    "json_schema": STRUCTURED,
    "structural_tag": STRUCTURED,
    "grammar": STRUCTURED,
    "echo": OFF,
    "best_of": Refused(hint="it must be left out or equal n"),
    "use_beam_search": OFF,
    "length_penalty": Refused((1, 0)),
    "typical_p": Refused((1,)),
    "bad_words": Refused(([],)),
    "allowed_token_ids": Refused(hint="use logit_bias for up to 1024 tokens"),
    "logits_processors": Refused(([],)),
    "truncate_prompt_tokens": Refused(hint="shorten the prompt before sending it"),
    "spaces_between_special_tokens": Refused((True,)),
    "no_stop_trim": Refused((False,), "use include_stop_str_in_output"),
    "min_new_tokens": Refused((0,), "use min_tokens"),
    "max_new_tokens": Refused(hint="use max_tokens"),
    "mirostat": Refused((0,)),
    "dry_multiplier": Refused((0,)),
    "xtc_probability": Refused((0,)),
    "dynatemp_range": Refused((0,)),
    "top_n_sigma": Refused((0, -1)),
    "input_ids": Refused(hint="send token ids as prompt of /v1/completions"),
    "prompt_embeds": Refused(),
    "cache_salt": Refused(hint="the prefix cache cannot be divided yet"),
    "extra_key": Refused(hint="the prefix cache cannot be divided yet"),
    "priority": Refused((0,), "requests are served first come, first served"),
    "adapter_id": Refused(hint="adapters are not available yet"),
    "lora_path": Refused(hint="adapters are not available yet"),
    "kv_transfer_params": Refused(),
}

TOOLS = "tool calls are not available yet"

CHAT: dict[str, Refused] = BOTH | {
    "logprobs": Refused((False,), LOGPROBS),
    "tools": Refused(([],), TOOLS),
    "tool_choice": Refused(("none", "auto"), TOOLS),
    "functions": Refused(([],), TOOLS),
    "function_call": Refused(("none", "auto"), TOOLS),
    "prompt": Refused(hint="chat takes messages; /v1/completions takes a prompt"),
    "chat_template": Refused(hint="templates come with the model; chat_template_kwargs sets their variables"),
    "add_special_tokens": Refused((False,), "the chat template writes the special tokens"),
    "include_reasoning": Refused((True,), "reasoning is not separated from the answer yet"),
    "separate_reasoning": Refused((True,), "reasoning is not separated from the answer yet"),
    "thinking_token_budget": Refused(hint="reasoning is not separated from the answer yet"),
}

COMPLETION: dict[str, Refused] = BOTH | {
    "logprobs": Refused((False,), LOGPROBS),
    "suffix": Refused(("",), "filling in the middle is not available yet"),
    "max_completion_tokens": Refused(hint="use max_tokens"),
    "messages": Refused(hint="/v1/completions takes a prompt; chat takes messages"),
}

NO_OPS = frozenset(
    (
        "audio",
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
        "truncation_side",
        "user",
        "verbosity",
        "web_search_options",
    )
)


def refuse_unsupported(extra: dict[str, Any], table: dict[str, Refused], *, n: int) -> list[str]:
    """Raise UnsupportedField for the first field that asks for something not built; return the unknown names.

    `extra` holds the fields the schema does not declare. best_of may repeat n.
    """
    unknown = []
    for name, value in extra.items():
        if name == "best_of" and value == n and type(value) is int:
            continue
        refused = table.get(name)
        if refused is None:
            if name not in NO_OPS:
                unknown.append(name)
        elif not is_neutral(value, refused):
            hint = f": {refused.hint}" if refused.hint else ""
            raise UnsupportedField(f"{name} is not supported{hint}.", name)
    return unknown


def is_neutral(value: Any, refused: Refused) -> bool:
    """Whether a value leaves the output as it is. True is not 1 and False is not 0 here."""
    if value is None:
        return True
    is_bool = isinstance(value, bool)
    return any(isinstance(neutral, bool) == is_bool and neutral == value for neutral in refused.neutral)
