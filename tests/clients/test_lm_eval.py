"""lm-eval through its local-completions model: the log-likelihoods are transformers'."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from .conftest import MODEL

HERE = Path(__file__).parent
COUNTRIES = ("France", "Spain", "Italy")
CAPITALS = (" Paris", " Madrid", " Rome")


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    """A folder with the task, its data beside it."""
    data = tmp_path / "capitals.jsonl"
    rows = [{"country": country, "label": index} for index, country in enumerate(COUNTRIES)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = (HERE / "capitals.yaml").read_text().replace("CAPITALS_FILE", str(data))
    tmp_path.joinpath("capitals.yaml").write_text(task)
    return tmp_path


def expected(command: str) -> list[list[Any]]:
    """What transformers says, in the server's Python."""
    pairs = [[f"The capital of {country} is", capital] for country in COUNTRIES for capital in CAPITALS]
    done = subprocess.run(
        [str(Path(command).with_name("python")), "-m", "tests.clients.expected"],
        input=json.dumps(pairs),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=HERE.parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = json.loads(done.stdout)
    return found


def test_log_likelihoods(
    command: str, url: str, task_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(os.environ, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": MODEL,
            "base_url": f"{url}/v1/completions",
            "tokenizer_backend": "remote",
            "num_concurrent": 2,
            "max_retries": 1,
        },
        tasks=["capitals"],
        task_manager=TaskManager(include_path=str(task_folder), include_defaults=False),
        log_samples=True,
    )
    samples = sorted(results["samples"]["capitals"], key=lambda sample: sample["doc_id"])
    found = [value for sample in samples for value, _ in sample["filtered_resps"]]
    wanted = [value for value, _ in expected(command)]
    assert [float(value) for value in found] == pytest.approx(wanted, abs=1e-3)
    assert results["results"]["capitals"]["acc,none"] == pytest.approx(1.0)
