"""Load test of a server against offline translation: throughput, latency, memory, mixed-up responses.

    python benchmarks/serve_load.py RUN [--clients 64] [--seconds 120] [--sentences 1] [--rounds 2]

Three measurements alternate, so that other load on the machine affects all: `qkv.load(RUN, workers=…).translate` in
processes that are already warm; `--clients` clients of a server, each sending one request after another with
`--sentences` texts; and `qkv translate` of a file with as many sentences as the server translated, including its start.
Every response is compared with the offline translation. The clients run on the same machine and their cost is part of
the result; one loop over plain sockets sends prepared requests. A long `--seconds` with `--rounds 1` is a soak test:
memory is printed every minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

MAX_SENTENCES = 200_000  # in that file


class Client:
    """A keep-alive connection that sends prepared requests one after another."""

    def __init__(self, port: int, begin: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.next, self.sent, self.began, self.received = begin, -1, 0.0, b""

    def send(self, requests: list[bytes]) -> None:
        self.sent, self.next, self.received = self.next, (self.next + 1) % len(requests), b""
        self.began = time.perf_counter()
        self.socket.sendall(requests[self.sent])

    def receive(self) -> tuple[int, bytes] | None:
        """Return status and body once the response is complete, otherwise None."""
        more = self.socket.recv(1 << 20)
        if not more:
            raise ConnectionError("the server closed the connection")
        self.received += more
        head, separator, body = self.received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.I)
        if not separator or length is None or len(body) < int(length[1]):
            return None
        return int(head.split(None, 2)[1]), body


class Load:
    """The clients and their measurements."""

    def __init__(self, port: int, expected: dict[str, str], languages: tuple[str, str], size: int) -> None:
        self.port, self.size = port, size
        self.latencies: list[float] = []
        self.errors: list[str] = []
        self.mixed = 0
        self.requests: list[bytes] = []
        self.expected: list[list[str]] = []  # expected translations of each request
        sentences = list(expected)
        for first in range(0, len(sentences), size):
            texts = [sentences[(first + i) % len(sentences)] for i in range(size)]
            body = {"q": texts if size > 1 else texts[0], "source": languages[0], "target": languages[1]}
            self.requests.append(request("/translate", body))
            self.expected.append([expected[text] for text in texts])

    def run(self, clients: int, seconds: float, pids: list[int]) -> float:
        """Run clients for some seconds and return sentences per second; prints the server's memory every minute."""
        began, minute = time.monotonic(), 1
        waiting = selectors.DefaultSelector()
        for number in range(clients):
            client = Client(self.port, number * 131 % len(self.requests))
            waiting.register(client.socket, selectors.EVENT_READ, client)
            client.send(self.requests)
        while waiting.get_map():
            for key, _ in waiting.select():
                client = key.data
                if (answer := client.receive()) is None:
                    continue
                self.check(client, *answer)
                if time.monotonic() < began + seconds:
                    client.send(self.requests)
                else:
                    waiting.unregister(client.socket)
                    client.socket.close()
            if time.monotonic() > began + 60 * minute:
                print(f"  minute {minute}: {memory(pids):.1f} MB", flush=True)
                minute += 1
        return len(self.latencies) * self.size / (time.monotonic() - began)

    def check(self, client: Client, status: int, body: bytes) -> None:
        if status != 200:
            self.errors.append(f"{status} {body!r}")
            return
        self.latencies.append(time.perf_counter() - client.began)
        text = json.loads(body)["translatedText"]
        texts = text if self.size > 1 else [text]
        self.mixed += sum(a != b for a, b in zip(texts, self.expected[client.sent], strict=True))


def request(path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: load\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def memory(pids: list[int]) -> float:
    """Resident memory of some processes, in MB."""
    sizes = [re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()) for pid in pids]
    return sum(int(size[1]) for size in sizes if size) / 1024


def cpu_seconds(pids: list[int]) -> float:
    """Processor time of some processes, in seconds."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def processes(pid: int) -> list[int]:
    """A process and its children."""
    children = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *map(int, " ".join(children).split())]


def start(run: str, workers: int, options: list[str]) -> tuple[subprocess.Popen[str], int]:
    """Start a server at a free port and wait until it is ready."""
    import urllib.error
    import urllib.request

    command = [sys.executable, "-m", "qkv", "serve", run, "--port", "0", "--workers", str(workers), *options]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    port = int(server.stderr.readline().split(":")[2].split("/")[0])
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                if json.load(answer)["workers"] == workers:
                    return server, port
        except urllib.error.URLError:
            pass
        time.sleep(0.2)


def translate_command(run: str, lines: list[str], count: int) -> float:
    """Sentences per second of `qkv translate` with a file of `count` sentences, including its start."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.write_text("".join(f"{line}\n" for line in islice(cycle(lines), count)), encoding="utf-8")
        began = time.monotonic()
        command = [sys.executable, "-m", "qkv", "translate", run, str(source), "-o", f"{folder}/out", "--device", "cpu"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        return count / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--sentences", type=int, default=1, help="texts in each request")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--file", default="demo:test.en")
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments, options = parser.parse_known_args()
    import qkv
    from qkv.data.formats import read_lines

    lines = list(dict.fromkeys(list(read_lines(arguments.file))[: arguments.lines]))
    offline = qkv.load(arguments.run, device="cpu", workers=arguments.workers)
    assert isinstance(offline, qkv.Translator)
    expected = dict(zip(lines, (result.text for result in offline.translate(lines)), strict=True))
    server, port = start(arguments.run, arguments.workers, options)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {len(lines)} sentences")
    try:
        for number in range(1, arguments.rounds + 1):
            measure_round(number, arguments, offline, expected, server.pid, port)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def measure_round(
    number: int, arguments: argparse.Namespace, offline: Any, expected: dict[str, str], server: int, port: int
) -> None:
    """Measure the three ways one after another and print a line for each kind of figure."""
    lines, began, repetitions = list(expected), time.monotonic(), 0
    offline_processes = [pid for pid in processes(os.getpid()) if pid != server]
    offline_cpu = cpu_seconds(offline_processes)
    while time.monotonic() - began < min(20, arguments.seconds):
        offline.translate(lines)
        repetitions += 1
    offline_cpu = (cpu_seconds(offline_processes) - offline_cpu) / (repetitions * len(lines))
    offline_rate = repetitions * len(lines) / (time.monotonic() - began)

    listening, *models = processes(server)
    before = cpu_seconds([listening]), cpu_seconds(models), time.process_time()
    load = Load(port, expected, (offline.config.data.src_lang, offline.config.data.tgt_lang), arguments.sentences)
    served_rate = load.run(arguments.clients, arguments.seconds, processes(server))
    after = cpu_seconds([listening]), cpu_seconds(models), time.process_time()
    sentences = len(load.latencies) * arguments.sentences
    listening_ms, models_ms, clients_ms = (1000 * (b - a) / sentences for a, b in zip(before, after, strict=True))

    command_rate = translate_command(arguments.run, lines, min(MAX_SENTENCES, sentences))
    latencies = sorted(load.latencies)
    p50, p95, p99 = (1000 * latencies[int(len(latencies) * q)] for q in (0.5, 0.95, 0.99))
    print(
        f"round {number}: served {served_rate:.0f}/s; "
        f"qkv translate {command_rate:.0f}/s = {served_rate / command_rate:.2f}; "
        f"in warm processes {offline_rate:.0f}/s = {served_rate / offline_rate:.2f}; "
        f"p50 {p50:.0f} ms, p95 {p95:.0f} ms, p99 {p99:.0f} ms; {len(latencies):,} requests, "
        f"{len(load.errors)} errors, {load.mixed} mixed up; {memory(processes(server)):.1f} MB",
        flush=True,
    )
    print(
        f"  processor time a sentence: offline {1000 * offline_cpu:.2f} ms, "
        f"served {listening_ms:.2f} (listening) + {models_ms:.2f} (models) + {clients_ms:.2f} (clients) ms",
        flush=True,
    )
    for error in load.errors[:3]:
        print(error)


if __name__ == "__main__":
    main()
