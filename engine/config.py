"""The settings of the engine. Their descriptions make `--help`, the documentation and the sample YAML."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
KVDtype = Literal["auto", "bfloat16", "fp8", "int8", "int4"]
DeviceKind = Literal["auto", "cpu", "cuda"]


def check_endpoint(endpoint: str) -> str:
    """Return a ZeroMQ endpoint that other processes can reach. Raises ValueError for anything else."""
    found = re.fullmatch(r"(?:bind:)?(?:tcp://\S+:(\d{1,5})|ipc://.+)", endpoint)
    if not found or not 0 < int(found[1] or 1) < 2**16:  # ZeroMQ takes the port modulo 2**16
        raise ValueError("must be tcp://*:PORT, bind:tcp://ADDRESS:PORT, tcp://HOST:PORT or ipc://PATH")
    return endpoint


class EngineConfig(BaseModel):
    """Settings of model, memory, steps and threads. None: chosen at start from the model and the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        "SmolLM2-135M-Instruct",
        description="catalog name, folder with a Hugging Face checkpoint, .gguf file, or hub id",
    )
    cache_dir: Path | None = Field(
        None, description="folder for downloaded models; default: monoloop in the user's cache folder"
    )
    chat_template: Path | None = Field(
        None,
        description="Jinja file with a chat template that replaces the model's own",
    )
    dtype: Dtype = Field(
        "auto",
        description="dtype of weights, activations and KV where quantization and kv_dtype set no other; "
        "auto: bfloat16 on CUDA; on a CPU float32, or bfloat16 if it computes that in hardware (AMX, "
        "AVX512-BF16) and weights are neither int8 nor fp16",
    )
    quantization: str = Field(
        "auto",
        description="weight format that unquantized weights are converted to while loading: fp8 (half the "
        "memory of 16 bits, one scale per output feature, and one per token for activations), int8 (one "
        "scale per output feature; activations stay as they are, but on a CPU they are rounded to 14 bits), "
        "int4 (a quarter of the memory, one scale per 128 inputs), fp16 (float16 weights for CPUs without "
        "fast products of 16 bits) or dense (none); auto: as the checkpoint stores them, but on a CPU int8 "
        "if dtype is auto, too (with experts dense; without AVX2 or numba the fastest of fp16 and dense)",
    )
    device: DeviceKind = Field("auto", description="device to run on; auto: cuda if available, otherwise cpu")
    kv_dtype: KVDtype = Field(
        "auto",
        description="how keys and values are stored; auto: in the model's dtype, but on a CPU whose dtype is "
        "auto in int8 beside weights of int8, and in bfloat16 beside those of fp16 or if keys have a bias; "
        "bfloat16 (on a CPU beside a dtype of float32); fp8 (e4m3, with the checkpoint's k_scale and v_scale "
        "if it has them) and int8 (a scale for each token and head) take half the memory of 16 bits, int4 (a "
        "scale and a minimum for 32 values) less than a third",
    )
    page_size: Literal[1, 16, 32, 64] = Field(16, description="tokens per KV page")
    kv_tokens: int | None = Field(
        None, ge=1, description="size of the KV pool in tokens; default: from free memory"
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the GPU's memory for weights, steps and KV pool together, as in vLLM; default: "
        "the KV pool takes 0.92 of what weights and steps leave free",
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="most tokens of prompt plus output; default: the model's context window",
    )
    max_num_seqs: int = Field(256, ge=1, le=4096, description="most sequences that run at the same time")
    token_budget: int | None = Field(
        None,
        ge=1,
        description="most tokens computed in one step; longer prompts are prefilled in chunks; "
        "default: 512 on a CPU, 8192 on CUDA",
    )
    run_ahead: Literal[0, 1] = Field(
        1,
        description="start the next step before the previous one's tokens are read (1) or wait for them (0)",
    )
    max_waiting: int = Field(
        1024,
        ge=1,
        description="most requests that may wait in the queue; beyond it, 429",
    )
    max_waiting_tokens: int | None = Field(
        None,
        ge=1,
        description="most prompt tokens that may wait in the queue; beyond it, 429; default: no limit",
    )
    queue_timeout_seconds: float | None = Field(
        None,
        gt=0,
        description="seconds a request may wait before it starts; beyond it, 503; default: no limit",
    )
    overcommit: float = Field(
        0.5,
        ge=0,
        le=1,
        description="how optimistic to be about answer length when admitting requests: 0 reserves the full "
        "max_tokens and never preempts, 1 admits whatever fits now",
    )
    prefix_cache: bool = Field(
        True, description="reuse the KV pages of prompts that begin with the same tokens"
    )
    priority_seconds: float = Field(
        0.0,
        ge=0,
        description="seconds of queue position per unit of a request's `priority`; 0 disables priorities",
    )
    open_objects: bool = Field(
        False,
        description="let an object of a JSON schema that lists properties have others if the schema does not "
        "mention additionalProperties, as JSON Schema has it; false: it has no others, since small models "
        "would add some until max_tokens",
    )
    pooling: Literal["auto", "mean", "last"] = Field(
        "auto",
        description="how an embedding is computed: the mean of the final hidden states of all tokens, or "
        "that of the last token; auto: as an embedding model's files say, else mean",
    )
    target_step_seconds: float | None = Field(
        None,
        gt=0,
        description="target in seconds for the longest step, and so for the time between two tokens of a "
        "stream; prefill uses what decoding leaves of it; default: none, token_budget alone bounds a step",
    )
    record: Path | None = Field(
        None,
        description="new file to record all arrivals, steps and tokens in, for `monoloop replay` and "
        "`monoloop timeline`; it contains the token ids of every prompt and answer",
    )
    kv_events_endpoint: Annotated[str, AfterValidator(check_endpoint)] | None = Field(
        None,
        description="ZeroMQ endpoint that announces which blocks of tokens the prefix cache has, as vLLM "
        "does, for routers that read it: tcp://*:5557 to listen, bind:tcp://127.0.0.1:5557 to do so at one "
        "address, tcp://host:5557 to connect; needs the extra kv-events. Whoever connects reads the token "
        "ids of prompts and answers",
    )
    kv_events_topic: str | None = Field(
        None,
        description="topic of these messages; llm-d expects kv@<pod>@<model>; default: the empty one",
    )
    watchdog_timeout_seconds: float = Field(
        120.0,
        ge=1,
        description="seconds without any progress after which the device or a tokenizer thread is stuck: the "
        "server then says so at /health, ends all requests with an error and exits with 1. Progress is each "
        "operation of a step, so slow steps and kernels that are compiled do not count",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads for matrix products, at most the number of cores; default: the number of "
        "cores this process may use, by its affinity and the CPU quota of its container",
    )
    tokenizer_threads: int = Field(
        2, ge=1, le=64, description="threads that render chat templates and encode text"
    )
    max_chunks_per_second: int = Field(
        20_000,
        ge=1,
        description="most chunks per second over all streams; beyond it, tokens merge into larger chunks",
    )

    @property
    def conversion(self) -> str | None:
        """The format that weights are converted to; None: as the checkpoint stores them."""
        return None if self.quantization == "auto" else self.quantization
