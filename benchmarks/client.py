"""The load generator beside its peers, against a server whose timetable and record are known.

    python benchmarks/client.py --sglang ENV --vllm ENV --guidellm ENV --tokenizer DIR

Each peer is named by the virtual environment that holds it; what is not named is left out. docs/benchmarks.md says what
to install. Everybody sends 2 C requests (at least 20) of 128 tokens, all C at once, to the null server: 20 ms steps,
chunks of 1, 3 and 2 tokens. The sides alternate, round after round; medians are printed. CPU is user + system of the
whole process with its children, start-up included. `bare` is an epoll loop that sends, reads and stamps, and nothing
else: what a client can see at best from user space.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from breakeven.engines.null import NullServer, TruthRow, null_server

TOKENS = 128
TIMETABLE = ("--step-us", "20000", "--tokens", "1,3,2", "--prefill-us", "20000", "--model", "truth")


class Seen(NamedTuple):
    """What a client says it saw; latencies in ms, throughput in tokens a second. None where it does not say."""

    ttft_p50: float
    ttft_p99: float
    tpot: float | None
    itl: float | None
    throughput: float


class Tool(NamedTuple):
    """A client: its command for (url, concurrency, requests, output file), and how to read its output file."""

    command: Callable[[str, int, int, Path], list[str]]
    read: Callable[[Path], Seen]


def breakeven(url: str, concurrency: int, requests: int, out: Path) -> list[str]:
    command = [sys.executable, "-m", "breakeven", "bench", "--server-url", url, "--concurrency", str(concurrency)]
    command += ["--requests", str(requests), "--max-tokens", str(TOKENS), "--no-ramp", "--warmup", "0"]
    return [*command, "--output", str(out)]


def read_breakeven(out: Path) -> Seen:
    level = json.loads((out / "summary.json").read_text())["levels"][0]
    ttft = level["ttft_ms"]
    throughput = level["output_throughput"]["value"]
    return Seen(ttft["p50"], ttft["p99"], level["tpot_ms"]["mean"], level["itl_ms"]["mean"], throughput)


def bare(url: str, concurrency: int, requests: int, out: Path) -> list[str]:
    return [sys.executable, __file__, "--bare", url, str(concurrency), str(requests), str(out)]


def read_bare(out: Path) -> Seen:
    return Seen(*json.loads(out.read_text()))


def sglang(env: Path, tokenizer: Path, *, whole: bool) -> Tool:
    """SGLang's compiled client; `whole` starts it as its users do, else its library is loaded alone."""
    start = [str(env / "bin/python"), *(("-m", "sglang.benchmark.rust_client") if whole else ("-c", LOAD_SGLANG))]

    def command(url: str, concurrency: int, requests: int, out: Path) -> list[str]:
        return [
            *start, "--backend", "vllm-chat", "--base-url", url, "--dataset-name", "random-ids", "--model", "truth",
            "--tokenizer", str(tokenizer), "--num-prompts", str(requests), "--max-concurrency", str(concurrency),
            "--random-input-len", "32", "--random-output-len", str(TOKENS), "--random-range-ratio", "1",
            "--warmup-requests", "0", "--disable-tqdm", "--output-file", str(out),
        ]  # fmt: skip

    return Tool(command, read_flat)


LOAD_SGLANG = """
import glob, sys, sysconfig
from importlib.util import module_from_spec, spec_from_file_location
[path] = glob.glob(sysconfig.get_paths()["purelib"] + "/sglang/srt/rust_extensions/_bench*.so")
spec = spec_from_file_location("sglang.srt.rust_extensions._bench", path)
client = module_from_spec(spec)
spec.loader.exec_module(client)
client.run_argv(["sglang-bench", *sys.argv[1:]])
"""


def vllm(env: Path, tokenizer: Path) -> Tool:
    def command(url: str, concurrency: int, requests: int, out: Path) -> list[str]:
        return [
            str(env / "bin/vllm"), "bench", "serve", "--backend", "openai-chat", "--base-url", url, "--endpoint",
            "/v1/chat/completions", "--model", "truth", "--tokenizer", str(tokenizer), "--dataset-name", "random",
            "--random-input-len", "32", "--random-output-len", str(TOKENS), "--ignore-eos", "--num-prompts",
            str(requests), "--max-concurrency", str(concurrency), "--request-rate", "inf", "--percentile-metrics",
            "ttft,tpot,itl,e2el", "--disable-tqdm", "--save-result", "--result-dir", str(out.parent),
            "--result-filename", out.name,
        ]  # fmt: skip

    return Tool(command, read_flat)


def read_flat(out: Path) -> Seen:
    """The result file that vLLM and SGLang share, in JSON or JSON lines."""
    result = json.loads(out.read_text().splitlines()[-1])
    names = ("median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "output_throughput")
    return Seen(*(result[name] for name in names))


def guidellm(env: Path, tokenizer: Path) -> Tool:
    def command(url: str, concurrency: int, requests: int, out: Path) -> list[str]:
        return [
            str(env / "bin/guidellm"), "run", "--backend", f"kind=openai_http,target={url},model=truth", "--tokenizer",
            f"kind=huggingface_auto,model={tokenizer}", "--profile", f"kind=concurrent,streams={concurrency}",
            "--constraint", f"kind=max_requests,count={requests}", "--data",
            f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}", "--output", f"kind=json,path={out}",
            "--disable-console-interactive",
        ]  # fmt: skip

    return Tool(command, read_guidellm)


def read_guidellm(out: Path) -> Seen:
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]

    def of(name: str) -> dict[str, Any]:
        values: dict[str, Any] = metrics[name]["successful"]
        return values

    ttft = of("time_to_first_token_ms")
    # Its ITL is what others call TPOT; its TPOT includes the TTFT.
    itl, throughput = of("inter_token_latency_ms")["mean"], of("output_tokens_per_second")["mean"]
    return Seen(ttft["median"], ttft["percentiles"]["p99"], itl, None, throughput)


def run_bare(url: str, concurrency: int, requests: int, out: Path) -> None:
    """The bare loop: C sockets, a closed loop, a stamp for each read. TTFT from the first read with an event."""
    host, port = url.removeprefix("http://").split(":")
    body = b'{"model":"truth","messages":[{"role":"user","content":"x"}],"stream":true,"max_tokens":%d}' % TOKENS
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    epoll, sockets, sent, first = select.epoll(), {}, {}, {}
    for _ in range(concurrency):
        sock = socket.create_connection((host, int(port)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets[sock.fileno()] = sock
        epoll.register(sock, select.EPOLLIN)
    ttft_ms, last, began, left = [], 0, time.perf_counter_ns(), requests - concurrency
    for fd, sock in sockets.items():
        sent[fd] = time.perf_counter_ns()
        sock.sendall(request)
    running = concurrency
    while running:
        for fd, _ in epoll.poll():
            data = sockets[fd].recv(65536)
            last = time.perf_counter_ns()
            if fd not in first and b"data: " in data:
                first[fd] = last
            if data.endswith(b"\r\n0\r\n\r\n"):
                ttft_ms.append((first.pop(fd) - sent[fd]) / 1e6)
                running -= left <= 0
                if left > 0:
                    left -= 1
                    sent[fd] = time.perf_counter_ns()
                    sockets[fd].sendall(request)
    p50, p99 = percentiles(ttft_ms)
    out.write_text(json.dumps(Seen(p50, p99, None, None, requests * TOKENS / ((last - began) / 1e9))))


def percentiles(values: list[float]) -> tuple[float, float]:
    ranked = sorted(values)
    return statistics.median(ranked), ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))]


def true(rows: list[TruthRow]) -> Seen:
    """What the server itself saw of the requests that were asked for (a client's probe is shorter)."""
    rows = [row for row in rows if row.tokens == TOKENS]
    p50, p99 = percentiles([(row.first_ns - row.arrival_ns) / 1e6 for row in rows])
    tpot = statistics.mean((row.last_ns - row.first_ns) / 1e6 / (row.tokens - 1) for row in rows)
    seconds = (max(row.last_ns for row in rows) - min(row.arrival_ns for row in rows)) / 1e9
    return Seen(p50, p99, tpot, tpot, sum(row.tokens for row in rows) / seconds)


def measure(tool: Tool, server: NullServer, concurrency: int) -> tuple[float, Seen, Seen]:
    """One run: CPU seconds, what the client saw, what was true."""
    server.reset()
    requests = max(20, 2 * concurrency)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "result.json"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = tool.command(server.url, concurrency, requests, out)
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if result.returncode:
            raise SystemExit(f"{command[:4]} failed:\n{result.stderr[-2000:]}")
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return cpu_s, tool.read(out), true(server.truth())


def tools_of(args: argparse.Namespace) -> dict[str, Tool]:
    tools = {"breakeven": Tool(breakeven, read_breakeven), "bare": Tool(bare, read_bare)}
    if args.sglang:
        tools["sglang"] = sglang(args.sglang, args.tokenizer, whole=True)
    if args.sglang_library:
        tools["sglang (library alone)"] = sglang(args.sglang_library, args.tokenizer, whole=False)
    if args.vllm:
        tools["vllm"] = vllm(args.vllm, args.tokenizer)
    if args.guidellm:
        tools["guidellm"] = guidellm(args.guidellm, args.tokenizer)
    return tools


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 100, 500, 1000])
    parser.add_argument("--rounds", type=int, default=3)
    for name in ("--sglang", "--sglang-library", "--vllm", "--guidellm", "--tokenizer"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    tools = tools_of(args)
    print("| C | client | CPU s | TTFT p50 ms | off | TTFT p99 ms | off | TPOT off | ITL mean ms | throughput off |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for concurrency in args.concurrency:
        with null_server(*TIMETABLE) as server:
            runs: defaultdict[str, list[tuple[float, Seen, Seen]]] = defaultdict(list)
            for turn in range(args.rounds):
                names = list(tools)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    runs[name].append(measure(tools[name], server, concurrency))
        for name, measured in runs.items():
            print(row(concurrency, name, measured), flush=True)


def row(concurrency: int, name: str, measured: list[tuple[float, Seen, Seen]]) -> str:
    def middle(value: Callable[[float, Seen, Seen], float | None], form: str) -> str:
        values = [v for run in measured if (v := value(*run)) is not None]
        return format(statistics.median(values), form) if values else "-"

    cells = [
        middle(lambda cpu, *_: cpu, ".2f"),
        middle(lambda _, seen, __: seen.ttft_p50, ".1f"),
        middle(lambda _, seen, truth: seen.ttft_p50 - truth.ttft_p50, "+.2f"),
        middle(lambda _, seen, __: seen.ttft_p99, ".1f"),
        middle(lambda _, seen, truth: seen.ttft_p99 - truth.ttft_p99, "+.2f"),
        middle(lambda _, seen, truth: seen.tpot / truth.tpot - 1 if seen.tpot and truth.tpot else None, "+.2%"),
        middle(lambda _, seen, __: seen.itl, ".2f"),
        middle(lambda _, seen, truth: seen.throughput / truth.throughput - 1, "+.2%"),
    ]
    return f"| {concurrency} | {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bare"]:
        run_bare(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
