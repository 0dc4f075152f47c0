"""A request of TGI or LightLLM -> the completion request with its text and sampling."""

from dataclasses import dataclass

from engine.errors import InvalidRequest
from server.limits import Limits
from server.schema.completions import CompletionRequest
from server.schema.generate_parameters import GenerateParameters
from server.schema.native import GenerateRequest
from server.schema.sampling import INT64, Sampling
from server.schema.wire import wire_of

# Our fields as these APIs call them, for errors.
NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "parameters.min_new_tokens",
    "guided_json": "parameters.guided_json",
    "guided_grammar": "parameters.guided_grammar",
    "grammar": "parameters.grammar",
    "regex": "parameters.regular_constraint",
}

# Every sampling parameter set to a value that leaves it off.
NEUTRAL = {name: wire.neutral[0] for name, wire in wire_of(Sampling).items() if wire.neutral}


@dataclass(frozen=True)
class Defaults:
    """Defaults of the two servers.

    In TGI any setting of sampling turns it on, in LightLLM only `do_sample`, or the model's own generation
    config, from which other values come, too. Otherwise decoding is greedy. With `best_of_is_n` all texts are
    answers.
    """

    max_new_tokens: int
    samples_if_set: bool
    uses_generation_config: bool
    best_of_is_n: bool


def completion_request(wire: GenerateRequest, defaults: Defaults, limits: Limits) -> CompletionRequest:
    """Return the completion request with this text and sampling. Raises InvalidRequest."""
    parameters = wire.parameters
    has_details = parameters.details or parameters.return_details
    fields = parameters.model_dump(include=set(Sampling.model_fields))
    fields |= {
        "prompt": wire.inputs,
        "max_tokens": parameters.max_new_tokens,
        "min_tokens": parameters.min_new_tokens,
        "stop": list(parameters.stop or parameters.stop_sequences or ()) or None,
        "include_stop_str_in_output": True,
        "logprobs": (parameters.top_n_tokens or 0) if has_details else None,
        "n": parameters.n or (parameters.best_of if defaults.best_of_is_n else None),
        "best_of": None if defaults.best_of_is_n else parameters.best_of,
        "prompt_logprobs": 0 if parameters.decoder_input_details else None,
        "grammar": parameters.grammar and parameters.grammar.model_dump(),
        "guided_json": parameters.guided_json,
        "guided_grammar": parameters.guided_grammar,
        "regex": parameters.regular_constraint,
    }
    if parameters.seed is not None and parameters.seed >= INT64:  # the upper half of u64
        fields["seed"] = parameters.seed - 2 * INT64
    if not defaults.uses_generation_config:
        fields |= {name: value for name, value in NEUTRAL.items() if fields[name] is None}
    if not samples(parameters, defaults, limits):
        fields["temperature"] = 0.0
        if (parameters.best_of or 1) > 1 and not defaults.best_of_is_n:
            raise InvalidRequest(
                "parameters.best_of needs sampling: without it all texts are the same.", "parameters.best_of"
            )
    return CompletionRequest.model_validate(fields)


def samples(parameters: GenerateParameters, defaults: Defaults, limits: Limits) -> bool:
    """Return True if tokens are sampled, False if decoding is greedy."""
    if parameters.do_sample:
        return True
    if defaults.samples_if_set:
        return (
            parameters.temperature not in (None, 1.0)
            or (parameters.top_p or 1.0) < 1.0
            or (parameters.top_k or 0) > 0
        )
    # The catalog leaves these out where the model's generation config does not sample.
    by_model = limits.generation_defaults.keys() & {"temperature", "top_p", "top_k"}
    return parameters.do_sample is None and bool(by_model)
