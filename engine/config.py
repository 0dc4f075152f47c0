"""Every setting of the engine. The field descriptions are the documentation, `--help` and the sample YAML."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.request import Pooling


class EngineConfig(BaseModel):
    """Settings of model, memory, steps and threads. None means: chosen at start from model and machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        "SmolLM2-135M-Instruct",
        description="catalog name, folder with a Hugging Face checkpoint, .gguf file, or hub id",
    )
    cache_dir: Path | None = Field(
        None, description="folder for fetched models; default: monoloop below the user's cache folder"
    )
    chat_template: Path | None = Field(
        None,
        description="Jinja file with a chat template to use in place of the model's own",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="dtype of weights, activations and KV; auto: bfloat16 on CUDA and on CPUs "
        "that compute it in hardware (AMX, AVX512-BF16), else float32",
    )
    quantization: str | None = Field(
        None,
        description="weight format that unquantized weights are converted to while loading: int8 (half the "
        "memory of 16 bits, one scale per output feature); default: as the checkpoint stores them",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if there is one, else cpu")
    page_size: Literal[1, 16, 32, 64] = Field(16, description="tokens per KV page")
    kv_tokens: int | None = Field(
        None, ge=1, description="size of the KV pool in tokens; default: from free memory"
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="longest prompt plus output in tokens; default: the model's own context window",
    )
    max_num_seqs: int = Field(256, ge=1, le=4096, description="sequences that run at the same time at most")
    token_budget: int | None = Field(
        None,
        ge=1,
        description="tokens of one step at most; longer prompts are prefilled in chunks; "
        "default: 512 on a CPU, 8192 on CUDA",
    )
    run_ahead: Literal[0, 1] = Field(
        1, description="steps launched before the tokens of the step before them are read"
    )
    max_waiting: int = Field(
        1024,
        ge=1,
        description="requests that may wait while all places are taken; one more is refused with 429",
    )
    max_waiting_tokens: int | None = Field(
        None, ge=1, description="the same for the tokens of their prompts; default: no bound"
    )
    queue_timeout_seconds: float | None = Field(
        None, gt=0, description="a request that has not started by then is refused; default: it waits"
    )
    overcommit: float = Field(
        0.5,
        ge=0,
        le=1,
        description="how far answers are trusted to end before max_tokens when requests are let in: 0 "
        "reserves max_tokens for each and never preempts, 1 starts whatever fits now",
    )
    prefix_cache: bool = Field(True, description="compute equal beginnings of prompts once")
    priority_seconds: float = Field(
        0.0,
        ge=0,
        description="how much later a request comes for each unit of its `priority`; 0: nobody overtakes",
    )
    pooling: Pooling = Field(
        "mean",
        description="what an embedding is made of: the mean of the final hidden states of all tokens, or "
        "that of the last one",
    )
    target_step_seconds: float | None = Field(
        None,
        gt=0,
        description="time a step should take at most, and so the time between two tokens of a stream; "
        "prompts get what decoding leaves of it; default: as long as token_budget takes",
    )
    record: Path | None = Field(
        None,
        description="new file for a record of all arrivals, steps and tokens, for `monoloop replay` and "
        "`monoloop timeline`; it holds the token ids of every prompt and answer",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of the matrix products; default: the number of cores this process may use",
    )
    tokenizer_threads: int = Field(2, ge=1, le=64, description="threads that render templates and encode")
    max_chunks_per_second: int = Field(
        20_000,
        ge=1,
        description="deliveries per second over all streams; above it tokens merge into larger chunks",
    )
