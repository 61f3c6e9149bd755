"""guidellm: loads on chats and completions, streamed and not; none of their requests fails."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import scenarios
from scenarios import MODEL, URL, check, scenario

REQUESTS = 16
# A process for each stream would be ten that import transformers first.
FEW_PROCESSES = {**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "2"}
COMMAND = str(Path(sys.executable).with_name("guidellm"))


def load(profile: str, **backend: str) -> None:
    """Run one, and read its report: what failed, and what was answered short of what was asked."""
    about = {"kind": "openai_http", "target": URL.removesuffix("/v1"), "model": MODEL, **backend}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        flags = {
            "backend": ",".join(f"{name}={value}" for name, value in about.items()),
            "profile": profile,
            "constraint": f"kind=max_requests,count={REQUESTS}",
            "tokenizer": f"kind=huggingface_auto,model={os.environ['SSD_TOKENIZER']}",
            "data": "kind=synthetic_text,prompt_tokens=40,output_tokens=24",
            "output": f"kind=json,path={report}",
        }
        command = [COMMAND, "run", "--disable-console"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        done = subprocess.run(command, env=FEW_PROCESSES, capture_output=True, text=True)
        check(done.returncode == 0, (done.stdout + done.stderr)[-2000:])
        for benchmark in json.loads(report.read_text())["benchmarks"]:
            check_benchmark(benchmark)


def check_benchmark(benchmark: Any) -> None:
    totals = benchmark["metrics"]["request_totals"]
    check(totals["errored"] == 0, benchmark["requests"]["errored"][:1])
    check(totals["successful"] == REQUESTS, totals)
    short = [
        each["output_tokens"]
        for each in benchmark["requests"]["successful"]
        if each["output_tokens"] != 24
    ]
    check(not short, short)


@scenario("chats, streamed")
def chats() -> None:
    load("kind=concurrent,streams=8")


@scenario("chats, not streamed")
def whole_chats() -> None:
    load("kind=concurrent,streams=8", stream="false")


@scenario("completions, streamed")
def completions() -> None:
    load("kind=concurrent,streams=8", request_format="/v1/completions")


@scenario("as much as there is room for")
def throughput() -> None:
    load("kind=throughput,max_concurrency=16")


if __name__ == "__main__":
    scenarios.main()
