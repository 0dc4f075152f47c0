"""`monoloop bench static` and `monoloop bench kernel`: the device alone, in this process."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from engine.config import DeviceKind, Dtype, EngineConfig, KVDtype
from engine.request import SamplingParams
from server.commands.bench.command import check_writable
from server.flags import SettingsError, flag
from server.setting_types import Names, split_commas
from server.settings import to_int

Counts = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(split_commas), Field(min_length=1)
]


WIDTH = 120  # of a table in a file


class StaticSettings(BaseModel):
    """Time single steps of a model with random weights of a named shape, beside their floor.

    The floor is the step's matrix products in the same weight format, measured alone in the same run, and
    what attention cannot do without: KV bytes at the bandwidth of a copy, or FLOPs at the rate of a large
    product.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    shape: str = Field("llama-8b", description="name of the shape: tiny, smollm2-135m, llama-1b, llama-8b")
    batch: Counts = Field((1, 16, 64, 256), description="rows of the decode steps")
    context: int = Field(512, ge=1, description="tokens of each sequence before the first decode step")
    prefill: Counts = Field((512, 2048), description="tokens of the prefill steps")
    dtype: Dtype = Field("auto", description="as in serve")
    quantization: str = Field("auto", description="as in serve")
    kv_dtype: KVDtype = Field("auto", description="as in serve")
    device: DeviceKind = Field("auto", description="as in serve")
    page_size: Annotated[Literal[1, 16, 32, 64], BeforeValidator(to_int)] = Field(
        16, description="as in serve"
    )
    kv_tokens: int | None = Field(
        None, ge=1, description="size of the KV pool in tokens; default: what the steps need"
    )
    temperature: float = Field(0.0, ge=0, description="of all rows; 0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="of all rows; 1: off")
    top_k: int = Field(0, ge=0, description="of all rows; 0: off")
    json_file: Path | None = Field(None, alias="json", description="file to write all figures to")


class KernelSettings(BaseModel):
    """Time single ops beside what their bytes and FLOPs allow; without a GPU, tiny shapes of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    op: Names = Field((), description="names of ops; default: all of them")
    device: DeviceKind = Field("auto", description="as in serve")
    json_file: Path | None = Field(None, alias="json", description="file to write all figures to")


def static(settings: StaticSettings) -> int:
    """Measure steps and print them. Returns the exit status. Raises SettingsError."""
    check_writable(settings.json_file, "--json")
    from engine import bench

    if settings.shape not in bench.SHAPE_NAMES:
        names = ", ".join(bench.SHAPE_NAMES)
        raise SettingsError(f"--shape: there is no shape {settings.shape!r}; there are {names}")
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    try:
        config = EngineConfig.model_validate(
            settings.model_dump(
                include={"device", "dtype", "quantization", "kv_dtype", "page_size", "kv_tokens"}
            )
        )
        config = bench.with_formats(settings.shape, config)
        with console.status(f"making {settings.shape}"):
            ceilings, rows = bench.measure_steps(
                settings.shape,
                config,
                bench.StepsToMeasure(settings.batch, settings.context, settings.prefill),
                SamplingParams(
                    max_tokens=10**9,
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    top_k=settings.top_k,
                    ignore_eos=True,
                ),
                lambda row: None,
            )
    except ValueError as error:
        raise explain(error) from error
    title = settings.shape
    if config.quantization != "auto":
        title += f" in {config.quantization}"
    if config.kv_dtype != "auto":
        title += f", KV in {config.kv_dtype}"
    return show(console, title, settings.json_file, asdict(ceilings), [asdict(row) for row in rows])


def kernel(settings: KernelSettings) -> int:
    """Measure ops and print them. Returns the exit status. Raises SettingsError."""
    check_writable(settings.json_file, "--json")
    from engine import bench

    unknown = [name for name in settings.op if name not in bench.OP_NAMES]
    if unknown:
        raise SettingsError(f"--op: there is no op {unknown[0]!r}; there are {', '.join(bench.OP_NAMES)}")
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    try:
        with console.status("measuring") as status:
            ceilings, rows = bench.measure_ops(
                EngineConfig.model_validate({"device": settings.device}),
                settings.op or bench.OP_NAMES,
                lambda row: status.update(f"{row.op}: {row.shape}"),
            )
    except ValueError as error:
        raise explain(error) from error
    return show(console, "kernels", settings.json_file, asdict(ceilings), [asdict(row) for row in rows])


def explain(error: ValueError) -> SettingsError:
    """The engine's "kv_tokens: ..." under the name of the flag."""
    name, _, rest = str(error).partition(":")
    return SettingsError(f"{flag(name)}:{rest}")


def show(
    console: Console,
    title: str,
    json_file: Path | None,
    ceilings: dict[str, Any],
    rows: Sequence[dict[str, Any]],
) -> int:
    """Print rows as a table below the ceilings, and write the file."""
    table = Table(
        title=f"{title} on {ceilings['device']}: copy {ceilings['bytes_per_second'] / 1e12:.2f} TB/s, "
        f"matmul {ceilings['flops_per_second'] / 1e12:.1f} TFLOP/s",
        title_justify="left",
    )
    for name, value in rows[0].items():
        justify: Literal["left", "right"] = "left" if isinstance(value, str) else "right"
        table.add_column(HEADS.get(name, name), justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*(cell(name, value) for name, value in row.items()))
    console.print(table)
    if json_file is not None:
        document = {"title": title, "ceilings": ceilings, "rows": rows}
        try:
            json_file.write_text(json.dumps(document, indent=2) + "\n")
        except OSError as error:  # a disk that is full by now
            Console(stderr=True).print(f"[red]bench:[/] {error}", highlight=False)
            return 1
    return 0


HEADS = {
    "num_tokens": "tokens",
    "milliseconds": "ms",
    "device_milliseconds": "device ms",
    "matmul_milliseconds": "matmuls ms",
    "floor_milliseconds": "floor ms",
    "microseconds": "µs",
    "gb_per_second": "GB/s",
    "tflops": "TFLOP/s",
    "floor_share": "floor",
}


def cell(name: str, value: str | float) -> str:
    """A figure as a person reads it."""
    if isinstance(value, str):
        return value
    if name.endswith("share"):
        return f"{value:.0%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
