"""Accuracy of weight and KV formats on a small task of lm-eval, each through a server of its own.

    python -m benchmarks.lm_eval_scores --lm-eval PATH/lm_eval [--task arc_easy --limit 200]

The default task is benchmarks/next_sentence, which downloads nothing: 100 questions, which of four sentences
of data/alice.txt follows the six before it. lm_eval is installed by `pip install "lm_eval[api]"`, best into
an environment of its own.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from benchmarks.common import parser, serve, show
from benchmarks.formats import Format, Row, all_formats, formats_of, table, with_all_columns

TASKS = Path(__file__).parent


def scores(args: argparse.Namespace, one: Format) -> Row:
    """Return a format's accuracy in percent, as lm-eval has it with `acc` and `acc_norm`."""
    flags = [
        "--dtype",
        str(one.dtype).removeprefix("torch."),
        "--kv-dtype",
        one.kv_dtype,
        "--device",
        args.device,
    ]
    if one.quantization:
        flags += ["--quantization", one.quantization]
    with serve(*flags) as server, tempfile.TemporaryDirectory() as folder:
        model = {
            "model": server.model,
            "base_url": f"{server.url}/v1/completions",
            "tokenizer_backend": "remote",
            "num_concurrent": 4,
        }
        command = [args.lm_eval, "run", "--model", "local-completions", "--tasks", args.task]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
        command += ["--include_path", str(TASKS / "next_sentence"), "--output_path", folder]
        command += ["--limit", str(args.limit)] if args.limit else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"lm_eval: {done.stderr.strip().splitlines()[-1]}")
        [results] = Path(folder).rglob("results*.json")
        found = json.loads(results.read_text())["results"][args.task]
    return {
        f"{name} %": 100 * value
        for metric, value in found.items()
        if (name := metric.removesuffix(",none")) in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")
    }


def main() -> None:
    """Measure, and print one table."""
    flags = parser(__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--lm-eval", default="lm_eval", help="the command")
    flags.add_argument("--task", default="next_sentence")
    flags.add_argument("--limit", type=int, help="questions; default: all")
    flags.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    flags.add_argument("--formats", type=formats_of, default=all_formats())
    args = flags.parse_args()
    show(
        f"lm-eval: {args.task}",
        with_all_columns(table(args.formats, lambda one: scores(args, one))),
        args.json,
    )


if __name__ == "__main__":
    main()
