"""`monoloop config`.

Covers server/commands/config.py.
"""

from pathlib import Path

import pytest
import yaml

from server import cli
from server.settings import FlatSettings, load


def lines_of(text: str) -> dict[str, tuple[str, str]]:
    """Return the value and the origin of each printed setting."""
    rows = [line.removeprefix("# ").partition("  # ") for line in text.splitlines() if "---" not in line]
    found = [(*setting.partition(": ")[::2], origin) for setting, _, origin in rows]
    return {name: (value.strip(), origin) for name, value, origin in found}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A YAML file with settings."""
    file = tmp_path / "settings.yaml"
    file.write_text("port: 9000\nmax_num_seqs: 7\ncors_origins: ['https://a.example', '*']\n", "utf-8")
    return file


def test_each_setting_has_its_origin(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MONOLOOP_PORT", "9001")
    monkeypatch.setenv("monoloop_page_size", "32")
    assert cli.main(["config", "a/b", "--config", str(file), "--dtype", "float32"]) == 0
    found = lines_of(capsys.readouterr().out)
    assert set(found) == set(FlatSettings.model_fields)
    assert found["port"] == ("9001", "MONOLOOP_PORT")
    assert found["page_size"] == ("32", "MONOLOOP_PAGE_SIZE")
    assert found["max_num_seqs"] == ("7", f"{file}: max_num_seqs")
    assert found["model"] == ("a/b", "MODEL")
    assert found["dtype"] == ("float32", "--dtype")
    assert found["host"] == ("127.0.0.1", "default")


def test_what_is_printed_is_a_settings_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--config", str(file), "--chat-template", "a: b #c.jinja", "--served-model-name", "null,1"]
    assert cli.main(["config", *given]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out, "utf-8")
    assert cli.main(["config", "--config", str(printed)]) == 0
    again = lines_of(capsys.readouterr().out)
    values = yaml.safe_load(printed.read_text("utf-8"))
    assert {name: value for name, (value, _) in again.items() if name != "api_key"} == {
        name: value for name, (value, _) in lines_of(printed.read_text("utf-8")).items() if name != "api_key"
    }
    assert values["served_model_name"] == ["null", "1"]
    assert load({}, printed).server.cors_origins == ("https://a.example", "*")


def test_keys_are_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MONOLOOP_API_KEY", "sesame-1,sesame-2")
    assert cli.main(["config"]) == 0
    out = capsys.readouterr().out
    assert "sesame" not in out
    assert lines_of(out)["api_key"] == ("2 given, not shown", "MONOLOOP_API_KEY")


def test_passwords_of_addresses_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    addresses = ["--metrics-push-url", "http://u:sesame@gw:9091", "--otlp-endpoint", "http://sesame@c:4318/x"]
    assert cli.main(["config", *addresses]) == 0
    out = capsys.readouterr().out
    assert "sesame" not in out
    assert "\n# metrics_push_url: http://u:***@gw:9091 " in out
    assert "\n# otlp_endpoint: http://***@c:4318/x " in out


def test_wrong_settings_and_unknown_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", "--port", "x"]) == 2
    assert "error: --port: " in capsys.readouterr().err
    monkeypatch.setenv("MONOLOOP_PROT", "1")
    assert cli.main(["config"]) == 0
    assert "warning: MONOLOOP_PROT is not a setting" in capsys.readouterr().err
