"""Weight and KV formats side by side: how far their results are from float32, and how long their steps take.

    python -m benchmarks.formats accuracy                       # SmolLM2-135M on a fixed text
    python -m benchmarks.formats logits --shape llama-8b        # random weights and tokens
    python -m benchmarks.formats speed --shape llama-8b --rows 1,16,64,256 --prefill 2048

The formats are the conversions of models.formats, int8 for weights and activations (as SmoothQuant and
compressed-tensors store it, `w8a8`), and all KV dtypes, each by itself and some together. --formats names
others, such as `int4,fp8+int8`: weights, or weights+KV; `16` is bfloat16. All compute in bfloat16 but for
those that begin with `32:`, such as `32:int8+bfloat16`, which compute in float32. A format that fails has its
error in the table, and the others go on.

The text is data/alice.txt: chapters 6 and 7 of Alice's Adventures in Wonderland (Lewis Carroll, 1865; in the
public domain), without line breaks inside paragraphs.
"""

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from benchmarks.common import parser, show
from benchmarks.logit_errors import Comparison, random_model, sequence_logits
from engine.bench.steps import SHAPE_NAMES, StepsToMeasure, measure_steps
from engine.config import EngineConfig, KVDtype
from engine.device.devices import choose_device, set_up_thread
from engine.request import SamplingParams
from engine.text.tokenizer import Tokenizer
from models.catalog import locate
from models.decoder import Decoder
from models.formats import CONVERSIONS
from models.formats.base import MakeLinear, Shard
from models.formats.dense import with_dense_head
from models.formats.scaled_rows import ScaledRows, quantized_product
from models.loader import load
from models.shapes import SHAPES

TEXT = Path(__file__).parent / "data" / "alice.txt"
CHUNK_TOKENS = 1024

# Milliseconds on one H100: of decode steps by rows, from context 512 to 640, and of a prefill.
AIMS = {
    "fp8": {"1 row": 3.9, "16 rows": 4.3, "64 rows": 5.8, "256 rows": 12, "prefill 2048": 33},
    "fp8+fp8": {"1 row": 3.9, "16 rows": 4.2, "64 rows": 5.2, "256 rows": 9.5, "prefill 2048": 33},
    "int4": {"1 row": 2.9, "16 rows": 3.6, "64 rows": 6.5},
    "w8a8": {"1 row": 4.1, "16 rows": 4.4, "64 rows": 6.0, "256 rows": 12},
}

Row = dict[str, str | float]


class Int8Products(ScaledRows):
    """Rows of int8 and their scales, multiplied by tokens in int8: what checkpoints of W8A8 compute."""

    values_dtype = torch.int8

    def _product(self, x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return quantized_product(x, values, scale, bias)


def w8a8(dtype: torch.dtype, device: torch.device, shard: Shard) -> MakeLinear:
    """Return a maker of linears with products of int8; the head stays dense."""
    return with_dense_head(Int8Products, dtype, device, shard)


class Format(NamedTuple):
    """A value of the setting `quantization`, `16` for none, one of `kv_dtype`, and the model's dtype."""

    weights: str = "16"
    kv_dtype: str = "auto"
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, name: str) -> "Format":
        """Return the format with a name such as `int4`, `fp8+int8` or `32:int8`."""
        weights, _, kv_dtype = name.removeprefix("32:").partition("+")
        dtype = torch.float32 if name.startswith("32:") else torch.bfloat16
        return cls(weights, kv_dtype or "auto", dtype)

    @property
    def name(self) -> str:
        """The name that `of` reads."""
        weights = f"32:{self.weights}" if self.dtype == torch.float32 else self.weights
        return weights if self.kv_dtype == "auto" else f"{weights}+{self.kv_dtype}"

    @property
    def quantization(self) -> str | None:
        """The value of the setting."""
        return None if self.weights == "16" else self.weights


def all_formats() -> list[Format]:
    """Return bfloat16, each conversion and each KV dtype by itself, some pairs, and those of CPUs."""
    weights = [name for name in CONVERSIONS if name not in ("dense", "fp16")]
    kinds = [kind for kind in get_args(KVDtype) if kind not in ("auto", "bfloat16")]
    names = ("fp8+fp8", "int4+int8", "32:int8+int8", "32:int8+bfloat16", "32:fp16+bfloat16")
    pairs = [Format.of(name) for name in names]
    return [Format(), *map(Format, weights), *(Format(kv_dtype=kind) for kind in kinds), *pairs]


def accuracy(args: argparse.Namespace, config: EngineConfig, device: torch.device) -> list[Row]:
    """Compare the logits of the default model on a text with those in float32."""
    files = locate(config.model)
    [token_ids] = Tokenizer(files.tokenizer_dir).encode_batch([TEXT.read_text("utf-8")])
    sequences = torch.tensor(token_ids[: args.tokens], device=device).split(CHUNK_TOKENS)

    def make_model(dtype: torch.dtype, one: Format) -> Decoder:
        kv_scales = one.kv_dtype == "fp8"
        return load(files, dtype, device, quantization=one.quantization, kv_scales=kv_scales)

    model = make_model(torch.float32, Format())
    exact = [sequence_logits(model, "auto", tokens, CHUNK_TOKENS) for tokens in sequences]
    del model

    def figures(one: Format | None) -> Row:
        comparison = Comparison()
        model = one and make_model(one.dtype, one)
        for tokens, logits in zip(sequences, exact, strict=True):
            found = sequence_logits(model, one.kv_dtype, tokens, CHUNK_TOKENS) if one and model else logits
            comparison.add(found, logits, tokens)
        return {
            "error %": comparison.error_percent,
            "perplexity": comparison.perplexity,
            "same top-1 %": comparison.agreed_percent,
        }

    first: Row = {"weights": "float32", "KV": "float32"}
    return [first | figures(None), *table(args.formats, figures)]


def logits(args: argparse.Namespace, config: EngineConfig, device: torch.device) -> list[Row]:
    """Compare the logits of a model with random weights with those in float32, by the tokens of a step."""
    spec = SHAPES[args.shape]
    drawn = torch.randint(spec.vocab_size, (args.tokens,), generator=torch.Generator().manual_seed(0))
    tokens = drawn.to(device)
    exact = sequence_logits(random_model(spec, device, torch.float32, None), "auto", tokens, args.tokens)

    def figures(one: Format) -> Row:
        model = random_model(spec, device, one.dtype, one.quantization)
        row: Row = {}
        for num_rows in args.rows:
            comparison = Comparison()
            comparison.add(sequence_logits(model, one.kv_dtype, tokens, num_rows), exact, tokens)
            row[f"error %, {counted(num_rows)}"] = comparison.error_percent
        return row | {"same top-1 %": comparison.agreed_percent}

    return table(args.formats, figures)


def speed(args: argparse.Namespace, config: EngineConfig, device: torch.device) -> list[Row]:
    """Time decode and prefill steps of a model with random weights, in milliseconds."""
    steps = StepsToMeasure(args.rows, args.context, args.prefill)
    greedy = SamplingParams(max_tokens=10**9, temperature=0.0, ignore_eos=True)

    def figures(one: Format) -> Row:
        changes = {"quantization": one.quantization or "dense", "kv_dtype": one.kv_dtype}
        dtype = str(one.dtype).removeprefix("torch.")
        measured = config.model_copy(update=changes | {"dtype": dtype})
        _, times = measure_steps(args.shape, measured, steps, greedy, lambda row: None)
        row: Row = {
            counted(time.num_tokens) if time.step == "decode" else f"prefill {time.num_tokens}": (
                time.milliseconds
            )
            for time in times
        }
        aims = AIMS.get(one.name, {}) if args.shape == "llama-8b" else {}
        return row | {"aims": " / ".join(str(aims.get(name, "-")) for name in row) if aims else ""}

    return table(args.formats, figures)


def counted(num_rows: int) -> str:
    """Return `1 row`, `16 rows`."""
    return f"{num_rows} row{'' if num_rows == 1 else 's'}"


def table(formats: list[Format], figures: Callable[[Format], Row]) -> list[Row]:
    """Return a row for each format, with its figures or its error; print each as soon as it is known."""
    rows: list[Row] = []
    for one in formats:
        row: Row = {"weights": one.name.partition("+")[0], "KV": one.kv_dtype}
        try:
            row |= figures(one)
        except Exception as error:
            row["failed"] = (str(error).splitlines() or [type(error).__name__])[0]
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        rows.append(row)
        print(*(f"{value:.2f}" if isinstance(value, float) else value for value in row.values()), flush=True)
    return rows


def with_all_columns(rows: list[Row]) -> list[Row]:
    """Return rows that have the columns of all of them, in one order."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name, "") for name in columns} for row in rows]


def numbers(text: str) -> tuple[int, ...]:
    """Read `1,16`; no text is no number."""
    return tuple(int(part) for part in text.split(",") if part)


def formats_of(text: str) -> list[Format]:
    """Read `int4,fp8+int8`. Raises ArgumentTypeError for a format that does not exist."""
    formats = [Format.of(name) for name in text.split(",")]
    for one in formats:
        if one.weights not in ("16", *CONVERSIONS) or one.kv_dtype not in get_args(KVDtype):
            weights, kinds = ", ".join(("16", *CONVERSIONS)), ", ".join(get_args(KVDtype))
            raise argparse.ArgumentTypeError(f"no format is {one.name}: weights are {weights}; KV {kinds}")
    return formats


def arguments() -> argparse.Namespace:
    """Return the command's arguments."""
    program = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = program.add_subparsers(dest="command", required=True)
    flags = parser(None)
    flags.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    flags.add_argument("--formats", type=formats_of, default=all_formats())
    for call in (accuracy, logits, speed):
        command = commands.add_parser(
            call.__name__, description=call.__doc__, parents=[flags], add_help=False
        )
        command.set_defaults(call=call)
        if call is not accuracy:
            command.add_argument("--shape", default="llama-8b", choices=SHAPE_NAMES)
            command.add_argument("--rows", type=numbers, default=(1, 16, 64, 256), help="tokens of a step")
        if call is speed:
            command.add_argument("--context", type=int, default=512)
            command.add_argument("--prefill", type=numbers, default=(2048,))
        else:
            command.add_argument("--tokens", type=int, default=4096 if call is accuracy else 256)
    return program.parse_args()


def main() -> None:
    """Measure, and print one table."""
    CONVERSIONS["w8a8"] = "benchmarks.formats:w8a8"
    args = arguments()
    config = EngineConfig(device=args.device, dtype="bfloat16")
    device = choose_device(config)
    set_up_thread(config, device)
    rows = with_all_columns(args.call(args, config, device))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    show(f"{args.command}: {getattr(args, 'shape', config.model)} on {where}", rows, args.json)


if __name__ == "__main__":
    main()
