"""`monoloop bench static` and `monoloop bench kernel` on a CPU.

Covers server/commands/bench/device.py.
"""

import json
from pathlib import Path

import pytest

from server import cli

TINY = ["--shape", "tiny", "--device", "cpu", "--batch", "1,2", "--context", "20", "--prefill", "33"]
FLOAT32 = ["--dtype", "float32"]  # which no CPU replaces by other formats


def test_static_prints_a_table_and_writes_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "static", *TINY, *FLOAT32, "--json", str(tmp_path / "static.json")]) == 0
    shown = capsys.readouterr().out
    assert "tiny on" in shown and "floor ms" in shown
    document = json.loads((tmp_path / "static.json").read_text())
    assert [(row["step"], row["num_tokens"]) for row in document["rows"]] == [
        ("prefill", 33),
        ("decode", 1),
        ("decode", 2),
    ]
    assert document["ceilings"]["bytes_per_second"] > 0


def test_static_measures_converted_weights_and_kv(capsys: pytest.CaptureFixture[str]) -> None:
    formats = ["--quantization", "int8", "--kv-dtype", "int4"]
    assert cli.main(["bench", "static", *TINY, *FLOAT32, *formats]) == 0
    assert "tiny in int8, KV in int4 on" in capsys.readouterr().out


def test_static_chooses_formats_as_serve_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.device.formats.choose", lambda spec, timer: ("dense", "for a test"))
    assert cli.main(["bench", "static", *TINY]) == 0
    assert "tiny in dense on" in capsys.readouterr().out


def test_kernel_measures_the_ops_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--op", "rms_norm,silu_mul", "--json", str(tmp_path / "ops.json")]
    assert cli.main(["bench", "kernel", *arguments]) == 0
    assert "GB/s" in capsys.readouterr().out
    rows = json.loads((tmp_path / "ops.json").read_text())["rows"]
    assert {row["op"] for row in rows} == {"rms_norm", "silu_mul"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["static", "--shape", "giant"], "--shape: there is no shape 'giant'; there are tiny,"),
        (["static", *TINY, "--context", "500"], "--prefill: 629 tokens are the longest sequence"),
        (["static", *TINY, "--quantization", "int3"], "--quantization: quantization 'int3' is not known"),
        (["static", *TINY, "--kv-tokens", "16"], "--kv-tokens: 16 are too few"),
        (["static", "--batch", "0,4"], "--batch: Input should be greater than or equal to 1"),
        (["static", "--prefill", "a"], "--prefill: Input should be a valid integer"),
        (["static", "--page-size", "7"], "--page-size: Input should be 1, 16, 32 or 64"),
        (["kernel", "--op", "fft"], "--op: there is no op 'fft'; there are rms_norm,"),
        (["kernel", "--json", "/no/such/folder/x"], "--json /no/such/folder/x: there is no folder"),
    ],
)
def test_wrong_settings_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == cli.USAGE
    assert message in capsys.readouterr().err
