"""guidellm: one short benchmark run, in which no request fails."""

import json
import subprocess
import sys
from pathlib import Path

NUM_REQUESTS = 3


def test_guidellm(url: str, tmp_path: Path) -> None:
    data, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    rows = [{"prompt": f"Count to {count}.", "output_tokens_count": 8} for count in range(1, 6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={url}"]
    command += ["--profile", "kind=synchronous"]
    command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--data", f"kind=json_file,path={data}"]
    command += ["--output", f"kind=json,path={report}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    # It may leave the last one out of its report.
    assert totals["successful"] >= NUM_REQUESTS - 1, totals
    assert totals["errored"] == totals["incomplete"] == 0, totals
