"""Settings: four sources, one set of names, and messages that say what is wrong and where.

Covers server/setting_types.py, server/commands/list.py, server/commands/pull.py and server/commands/rm.py.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import ModelError
from server import cli
from server.commands import serve
from server.config import ServerConfig
from server.flags import SettingsError, flag, members
from server.settings import FlatSettings, load, parse, sample_yaml
from tests.server.conftest import ROOT


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*FlatSettings.model_fields, "config"):
        monkeypatch.delenv(f"MONOLOOP_{name.upper()}", raising=False)


def test_flags_before_environment_before_file_before_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("port: 1\nhost: from-file\nmax_num_seqs: 3\n")
    monkeypatch.setenv("MONOLOOP_PORT", "2")
    monkeypatch.setenv("MONOLOOP_HOST", "from-environment")
    settings = parse(["--config", str(file), "--port", "3"])
    assert (settings.server.port, settings.server.host) == (3, "from-environment")
    assert settings.engine.max_num_seqs == 3
    assert settings.engine.max_waiting == EngineConfig().max_waiting


def test_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("port: 1\n")
    monkeypatch.setenv("MONOLOOP_CONFIG", str(file))
    assert parse([]).server.port == 1


def test_every_kind_of_value_is_read_from_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOLOOP_PAGE_SIZE", "32")
    monkeypatch.setenv("MONOLOOP_UVLOOP", "true")
    monkeypatch.setenv("MONOLOOP_API_KEY", "a, b")
    monkeypatch.setenv("MONOLOOP_KV_TOKENS", "")
    settings = parse(
        ["--served-model-name", "x,y", "--served-model-name", "z", "--run-ahead", "0", "--no-uvloop"]
    )
    assert (settings.engine.page_size, settings.engine.run_ahead) == (32, 0)
    assert settings.engine.kv_tokens is None, "an empty variable counts as none"
    assert settings.server.uvloop is False
    assert [key.get_secret_value() for key in settings.server.api_key] == ["a", "b"]
    assert settings.server.served_model_name == ("x", "y", "z")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "99999"], ["--port", "65535", "99999"]),
        (["--port", "http"], ["--port", "integer"]),
        (["--page-size", "17"], ["--page-size", "1, 16, 32 or 64"]),
        (["--dtype", "int3"], ["--dtype", "bfloat16"]),
        (["--kv-tokens", "-5"], ["--kv-tokens"]),
        (["--send-timeout-seconds", "0"], ["--send-timeout-seconds"]),
        (["--model", ""], ["--model", "empty"]),
        (["--host", " "], ["--host", "empty"]),
        (["--cache-dir", ""], ["--cache-dir", "empty"]),
        (["--port", "true"], ["--port", "integer"]),
        (["--port", "-1", "--max-num-seqs", "0"], ["--port", "--max-num-seqs"]),
        (["--cors-origins", "evil"], ["--cors-origins", "evil is no origin"]),
        (["--cors-origins", "https://*.a.example"], ["--cors-origins", "is no origin"]),
        (["--cors-origins", "*,http://a/b"], ["--cors-origins", "write http://a "]),
        (["--cors-origins", "HTTPS://A.example:443"], ["--cors-origins", "write https://a.example "]),
        (["--open-paths", "/ready,health"], ["--open-paths", "write /health "]),
        (["--open-paths", "/health/"], ["--open-paths", "write /health "]),
        (["--open-paths", "/metrics?x"], ["--open-paths", "write /metrics "]),
        (["--open-paths", "none,/health"], ["--open-paths", "none is no path"]),
        (["--kv-events-endpoint", "foo"], ["--kv-events-endpoint", "tcp://*:PORT"]),
        (["--kv-events-endpoint", "tcp://*:65536"], ["--kv-events-endpoint", "tcp://HOST:PORT"]),
        (["--kv-events-endpoint", "http://a:1"], ["--kv-events-endpoint", "ipc://PATH"]),
    ],
)
def test_wrong_flag_is_named(flags: list[str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as wrong:
        parse(flags)
    assert all(word in str(wrong.value) for word in words), wrong.value


@pytest.mark.parametrize("name", ["metrics_push_url", "otlp_endpoint"])
@pytest.mark.parametrize(
    "address",
    [
        "gw:9091",
        "ftp://gw",
        "http://",
        "http://:9091",
        "http://gw:99999",
        "http://gw:0",
        "http://[gw",
        "http://g w",
        "http://gw/?a=b",
        "http://gw/#a",
        "http://u:a/b c@d@gw",
        "htp://u:a@gw",
    ],
)
def test_addresses_that_cannot_work_are_refused(name: str, address: str) -> None:
    with pytest.raises(SettingsError) as wrong:
        load({name: address})
    message = str(wrong.value)
    assert message.startswith(f"{flag(name)}: must be http://HOST:PORT")
    assert ("u:***@gw" if "@" in address else address) in message and "a@" not in message


def test_origins_and_paths_that_work_are_taken() -> None:
    origins = ("*", "null", "http://localhost:3000", "https://a.example", "http://[::1]:8080")
    origins += ("chrome-extension://abcdef", "http://a.example:443")
    server = load({"cors_origins": list(origins), "open_paths": "/,/health,/v1/models/a"}).server
    assert server.cors_origins == origins
    assert server.open_paths == ("/", "/health", "/v1/models/a")
    assert load({"open_paths": "none"}).server.open_paths == ("none",)


def kinds_of(name: str) -> set[Any]:
    """Return the types of a setting's values."""
    annotation = FlatSettings.model_fields[name].annotation
    return {kind for member in members(annotation) for kind in (member, *get_args(member))}


def test_paths_begin_in_the_home_folder_and_hold_no_nul(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = {name for name in FlatSettings.model_fields if Path in kinds_of(name)}
    assert paths >= {"uds", "record", "profile_dir", "ssl_certfile", "cache_dir", "chat_template"}
    found = load(dict.fromkeys(paths, "~/x"))
    values = found.engine.model_dump() | found.server.model_dump()
    assert {values[name] for name in paths} == {tmp_path / "x"}
    assert load({"record": "~nobody-like-this/x"}).engine.record == Path("~nobody-like-this/x")
    for name in paths | {"model", "host", "served_model_name"}:
        with pytest.raises(SettingsError, match="holds a NUL character"):
            load({name: "a\0b"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: abc", ["port", "integer"]),
        ("prot: 1", ["prot", "no such setting", "did you mean port?"]),
        ("port: [1", ["not valid YAML", "line 1"]),
        ("- port", ["name: value"]),
        ("1: 2", ["name: value"]),
        ("api_key: 5", ["api_key", "must be text", "quotes"]),
        ("api_key: [a, 5]", ["api_key", "must be text", "quotes"]),
        ("model: 2024-01-01", ["model", "must be text", "quotes"]),
        ("cache_dir: 7", ["cache_dir", "must be text"]),
        ("port: true", ["port", "must not be true or false"]),
        ("run_ahead: yes", ["run_ahead", "must not be true or false"]),
        ("ping_seconds: off", ["ping_seconds", "must not be true or false"]),
        ("kv_tokens: false", ["kv_tokens", "must not be true or false"]),
        ("host: no", ["host", "must not be true or false"]),
        ("served_model_name: [yes]", ["served_model_name", "must not be true or false"]),
        ("max_waiting: 1.5", ["max_waiting", "integer"]),
        ("port: {a: [1\nhost: x", ["not valid YAML in line 2"]),
        ("port: \0", ["not valid YAML"]),
        ("log_level: 2024-13-45", ["not valid YAML"]),
        ("? [a]\n: b", ["not valid YAML"]),
        ("port: " + "[" * 5000, ["not valid YAML"]),
    ],
)
def test_wrong_file_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as wrong:
        parse(["--config", str(file)])
    assert all(word in str(wrong.value) for word in [str(file), *words]), wrong.value
    assert "\n" not in str(wrong.value)


def test_what_the_engine_cannot_meet_is_named_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("max_model_len: 9\n")
    monkeypatch.setenv("MONOLOOP_DEVICE", "cuda")
    settings = parse(["--config", str(file), "--model", "m"])
    for error, message in (
        (ValueError("max_model_len: 9 does not fit"), f"{file}: max_model_len: 9 does not fit"),
        (ValueError("device: there is no device"), "MONOLOOP_DEVICE: there is no device"),
        (ValueError("token_budget: raise kv_tokens"), "--token-budget: raise --kv-tokens"),
        (ModelError("no config.json"), "--model: no config.json"),
        (ValueError("chat_template: a/chat_template.jinja is"), "--chat-template: a/chat_template.jinja is"),
        (ValueError("chat_template: /chat_template/x is"), "--chat-template: /chat_template/x is"),
    ):
        assert str(settings.explain(error)) == message


TEXTS = st.text(max_size=8) | st.sampled_from(
    ["none", "auto", "1e9", "-1", "0x1F", "~", "2024-01-01", "!!int a"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
FILES = st.one_of(
    st.dictionaries(st.sampled_from(sorted(FlatSettings.model_fields)) | TEXTS, VALUES, max_size=3).map(
        lambda values: yaml.safe_dump(values).encode()
    ),
    st.lists(
        st.sampled_from(
            ["port", "host", ": ", "- ", "\n", "  ", "[", "{", "&a ", "*a", "!!python/name:os ", "|"]
        )
        | TEXTS,
        max_size=12,
    ).map(lambda parts: "".join(parts).encode("utf-8", "surrogatepass")),
    st.binary(max_size=40),
)


@given(content=FILES)
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Any other exception than SettingsError fails the test."""
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(content)
    try:
        found = load({}, file)
    except SettingsError as error:
        assert str(error)  # noqa: PT017 - success is as good
    else:
        assert isinstance(found.server.port, int)


def test_missing_and_undecodable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.yaml: cannot be read"):
        parse(["--config", str(tmp_path / "nowhere.yaml")])
    file = tmp_path / "binary.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not valid YAML"):
        parse(["--config", str(file)])


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(["--dtype", "bflot16"], "bfloat16"), (["--log-level", "warn"], "warning"), (["--device", "gpu"], "")],
)
def test_a_value_near_a_known_one(arguments: list[str], meant: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(arguments[0])) as caught:
        parse(arguments)
    assert str(caught.value).partition("; did you mean ")[2].rstrip("?") == meant


def test_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOLOOP_PORT", "tcp://10.0.0.1:80")
    with pytest.raises(SettingsError, match=r"MONOLOOP_PORT.*tcp://10"):
        parse([])


@pytest.mark.parametrize("value", [" ", ",", "key,", "a,,b"])
def test_empty_key_does_not_open_the_door(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MONOLOOP_API_KEY", value)
    with pytest.raises(SettingsError, match="MONOLOOP_API_KEY: holds an empty value"):
        parse([])


def test_unknown_variables_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOLOOP_PROT", "1")
    monkeypatch.setenv("MONOLOOP_SERVICE_HOST", "10.0.0.1")
    [warning] = parse([]).warnings
    assert warning == "MONOLOOP_PROT is not a setting and is ignored; did you mean MONOLOOP_PORT?"


def test_keys_are_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOLOOP_API_KEY", "hush")
    assert "hush" not in repr(parse([]))
    file = tmp_path / "x.yaml"
    file.write_text("api_key: [[hush]]\n")
    monkeypatch.delenv("MONOLOOP_API_KEY")
    with pytest.raises(SettingsError) as wrong:
        parse(["--config", str(file)])
    assert "hush" not in str(wrong.value)


def test_help_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for config in (ServerConfig, EngineConfig):
        for name, field in config.model_fields.items():
            assert "--" + name.replace("_", "-") in shown
            assert str(field.description).split(";")[0].split("-")[0].strip() in shown, name


def test_names_of_both_floors_do_not_clash() -> None:
    assert not set(ServerConfig.model_fields) & set(EngineConfig.model_fields)


def test_sample_file_is_up_to_date() -> None:
    stored = (ROOT / "configs" / "default.yaml").read_text()
    assert stored == sample_yaml(), "run: python -m server.settings > configs/default.yaml"


def test_sample_file_holds_the_defaults(tmp_path: Path) -> None:
    lines = [line.removeprefix("# ") for line in sample_yaml().splitlines()]
    names = tuple(f"{name}: " for name in FlatSettings.model_fields)
    file = tmp_path / "all.yaml"
    file.write_text("\n".join(line for line in lines if line.startswith(names)))
    assert set(yaml.safe_load(file.read_text())) == set(FlatSettings.model_fields)
    assert parse(["--config", str(file)])[:2] == parse([])[:2]


# Other ways to give a setting


def test_the_model_may_be_given_without_its_flag() -> None:
    settings = parse(["some/model", "--port", "3"])
    assert (settings.engine.model, settings.server.port) == ("some/model", 3)
    assert str(settings.explain(ModelError("not there"))) == "MODEL: not there"


def test_flags_of_vllm_set_what_they_mean_here() -> None:
    flags = (
        "--max-num-batched-tokens 99 --gpu-memory-utilization 0.8 --max-model-len 77 --served-model-name a"
    )
    settings = parse(["m", *flags.split(), "--no-enable-prefix-caching"])
    assert (settings.engine.token_budget, settings.engine.prefix_cache) == (99, False)
    assert (settings.engine.gpu_memory_utilization, settings.engine.max_model_len) == (0.8, 77)
    assert settings.server.served_model_name == ("a",)
    assert parse(["--enable-prefix-caching"]).engine.prefix_cache
    with pytest.raises(SettingsError, match=r"--max-num-batched-tokens: .*greater than or equal to 1"):
        parse(["--max-num-batched-tokens", "0"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["a", "--model", "b"], ["MODEL (a)", "--model (b)"]),
        (["--model", "m", "--served-model-name", "a", "b"], ["MODEL (b)", "--served-model-name A,B"]),
        (["--token-budget", "1", "--max-num-batched-tokens", "2"], ["--token-budget (1)", "tokens (2)"]),
    ],
)
def test_a_setting_given_in_two_ways_is_refused(flags: list[str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as wrong:
        parse(flags)
    assert all(word in str(wrong.value) for word in words), wrong.value


# The command


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("arguments", [["serve", "--prot", "1"], ["serve", "--port", "x"], ["sevre"], []])
def test_wrong_usage_ends_with_2_and_no_traceback(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as ended:  # argparse
        code = int(ended.code or 0)
    assert code == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert not arguments or arguments[-2:][0].lstrip("-") in shown.err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--enable-prefix-cache"], "--enable-prefix-caching"),
        (["serve", "--max_num_seqs=4"], "--max-num-seqs"),
        (["chat", "--temprature=1"], "--temperature"),
        (["pull", "m", "--cache_dir", "x"], "--cache-dir"),
        (["sevre"], "serve"),
    ],
)
def test_the_closest_known_name_is_suggested(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as ended:  # argparse
        code = int(ended.code or 0)
    assert code == 2
    assert f"; did you mean {meant}?" in capsys.readouterr().err


def test_module_is_the_command_and_help_is_quick() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("serve", "chat", "bench", "pull"))
    code = "import sys; from server import cli; cli.main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0
    code = (
        "import sys; from server import settings; settings.settings_parser().format_help(); "
        "sys.exit(bool({'torch', 'transformers', 'starlette'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize("command", ["serve", "chat", "bench", "pull", "list", "rm"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"monoloop {command}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("monoloop ")


def test_foreign_kernels_package_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign:
        version = "9.9"

    serve.refuse_foreign_kernels()
    monkeypatch.setattr(serve, "distribution", lambda name: Foreign())
    with pytest.raises(SettingsError, match=r"kernels 9\.9"):
        serve.refuse_foreign_kernels()


async def test_the_engine_tells_a_failed_download_from_a_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import engine
    from engine.errors import FetchFailed, ModelError
    from models import catalog

    def fail(name: str, cache_dir: Path | None) -> None:
        raise catalog.FetchFailed("no network") if name == "far" else catalog.ModelError("no model")

    monkeypatch.setattr(catalog, "locate", fail)
    with pytest.raises(FetchFailed, match="no network"):
        await engine.pull("far")
    with pytest.raises(ModelError, match="no model") as wrong:
        await engine.pull("wrong")
    assert not isinstance(wrong.value, FetchFailed)


def test_pull_says_where_the_weights_lie(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import engine
    from engine.errors import FetchFailed, ModelError

    async def found(name: str, cache_dir: Path | None) -> str:
        return f"{cache_dir}/{name}"

    async def missing(name: str, cache_dir: Path | None) -> str:
        raise ModelError(f"no {name}")

    async def far(name: str, cache_dir: Path | None) -> str:
        raise FetchFailed("no network")

    monkeypatch.setattr(engine, "pull", found)
    assert cli.main(["pull", "m", "--cache-dir", "/c"]) == 0
    assert capsys.readouterr().out == "/c/m\n"
    monkeypatch.setattr(engine, "pull", missing)
    assert cli.main(["pull", "m"]) == 2
    assert "error: no m" in capsys.readouterr().err
    monkeypatch.setattr(engine, "pull", far)
    assert cli.main(["pull", "m"]) == 1
    assert "error: no network" in capsys.readouterr().err


def test_the_cache_of_the_commands_is_that_of_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def found(name: str, cache_dir: Path | None) -> str:
        return str(cache_dir)

    monkeypatch.setattr("engine.pull", found)
    folders = {name: tmp_path / name / "SmolLM2-135M-Instruct" for name in ("file", "variable", "flag")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    file = tmp_path / "x.yaml"
    file.write_text(f"cache_dir: {tmp_path / 'file'}\n")

    def check(name: str, *arguments: str) -> None:
        assert parse(list(arguments)).engine.cache_dir == tmp_path / name
        assert cli.main(["pull", "m", *arguments]) == 0
        assert capsys.readouterr().out == f"{tmp_path / name}\n"
        assert cli.main(["list", *arguments]) == 0
        assert str(folders[name]) in capsys.readouterr().out
        assert cli.main(["rm", "SmolLM2-135M-Instruct", *arguments]) == 0
        assert not folders.pop(name).exists()
        assert all(folder.exists() for folder in folders.values())

    check("file", "--config", str(file))
    monkeypatch.setenv("MONOLOOP_CONFIG", str(file))
    monkeypatch.setenv("MONOLOOP_CACHE_DIR", str(tmp_path / "variable"))
    check("variable")
    check("flag", "--cache-dir", str(tmp_path / "flag"))
    monkeypatch.setenv("MONOLOOP_CACHE_DIR", "~/models")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["list"]) == 0
    monkeypatch.setenv("MONOLOOP_CACHE_DIR", " ")
    assert cli.main(["rm", "m"]) == 2
    assert "MONOLOOP_CACHE_DIR: holds an empty value" in capsys.readouterr().err


def test_list_and_rm_name_the_models_of_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "SmolLM2-135M-Instruct"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"x" * 2_000_000)
    cache = ["--cache-dir", str(tmp_path)]
    assert cli.main(["list", *cache]) == 0
    assert capsys.readouterr().out == f"SmolLM2-135M-Instruct        2 MB  {folder}\n"
    assert cli.main(["rm", "SmolLM2-135M", *cache]) == 2
    assert "did you mean SmolLM2-135M-Instruct?" in capsys.readouterr().err
    assert cli.main(["rm", folder.name, *cache]) == 0
    assert "removed SmolLM2-135M-Instruct: 2 MB" in capsys.readouterr().err
    assert cli.main(["list", *cache]) == 0
    assert capsys.readouterr().out == ""
