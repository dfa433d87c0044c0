"""What HTTP costs: 32 clients at once over `qforge serve`, whole and streamed, beside `LLM.generate` of the same prompts, in turn.

    python benchmarks/serve_load.py ARTIFACT [--activations int8] [--rounds 3] [--save NAME]

Greedy, 128 tokens each behind 32 random ones, others in each round. Clients are one process over bare sockets, which shares the cores; texts have to be those of `generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from saved import machine, place, rounds_said, save, spread, told
from vs_llama_cpp import weights_of

from qforge.runtime import LLM, SamplingParams

CLIENTS, PROMPT, NEW = 32, 32, 128
KINDS = ("whole", "streamed")


async def ask(port: int, prompt: list[int], stream: bool) -> str:
    """The text of one completion."""
    body = json.dumps({"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    head, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
    writer.close()
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the server answers {head.splitlines()[0]!r}: {rest[:200]!r}")
    if not stream:
        return str(json.loads(rest)["choices"][0]["text"])
    text = b"".join(rest.split(b"\r\n")[1::2]).decode()  # chunks, each behind its length
    events = [json.loads(e.removeprefix("data: ")) for e in text.split("\n\n") if e.startswith("data: {")]
    return "".join(e["choices"][0]["text"] for e in events if e["choices"])


def clients(port: int, prompts: list[list[int]], stream: bool) -> tuple[float, list[str]]:
    """Seconds of all, and their texts."""

    async def run() -> list[str]:
        return list(await asyncio.gather(*(ask(port, p, stream) for p in prompts)))

    start = time.perf_counter()
    texts = asyncio.run(run())
    return time.perf_counter() - start, texts


def main() -> int:
    """Run all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a qforge artifact")
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/serve_load-NAME.json and .md")
    args = parser.parse_args()
    llm = LLM(str(args.model), activations=args.activations, prefix_cache=False)
    vocabulary, params = llm.runner.spec.vocab_size, SamplingParams(max_tokens=NEW, ignore_eos=True)
    command = [sys.executable, "-m", "qforge", "serve", str(args.model), "--port", "0", "--activations", args.activations]
    rounds: list[dict[str, float]] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            port = int(server.stderr.readline().rpartition(":")[2].partition("/")[0])
            for number in range(args.rounds + 1):  # the first one pays for what is touched for the first time
                rng = random.Random(number)
                took: dict[str, float] = {}
                for kind in KINDS:
                    prompts = [rng.choices(range(100, vocabulary), k=PROMPT) for _ in range(CLIENTS)]
                    start = time.perf_counter()
                    want = [o.text for o in llm.generate(prompts, params)]
                    took[f"generate, {kind}"] = time.perf_counter() - start
                    took[kind], texts = clients(port, prompts, kind == "streamed")
                    if texts != want:
                        raise SystemExit(f"{kind}: texts are not those of generate")
                rounds += [took] if number else []
        finally:
            server.kill()
    content = {"command": told("serve_load"), "weights": weights_of(args.model), "activations": args.activations, "environment": machine(), "rounds": rounds}
    head = [
        "# A server beside the engine that it runs", "", f"`{content['command']}`", "",
        f"qforge {content['environment']['qforge']}, {content['weights']}, {args.activations} activations; {place(content['environment'])}. "
        f"{rounds_said(args.rounds)}, both in turn; {CLIENTS} clients at once, {PROMPT} + {NEW} tokens each, texts compared.", "",
        "| | `LLM.generate`, tokens/s | over HTTP | share |", "|---|---|---|---|",
    ]  # fmt: skip
    text = "\n".join(head + [line(kind, rounds) for kind in KINDS])
    print(text)
    if args.save:
        save("serve_load", args.save, content, text)
    return 0


def line(kind: str, rounds: list[dict[str, float]]) -> str:
    """One kind of answer."""
    alone, served = (statistics.median(CLIENTS * NEW / r[name] for r in rounds) for name in (f"generate, {kind}", kind))
    return f"| {kind} | {alone:,.0f} | {served:,.0f} | {spread(r[f'generate, {kind}'] / r[kind] for r in rounds)} |"


if __name__ == "__main__":
    raise SystemExit(main())
