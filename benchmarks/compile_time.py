"""Times `qopt compile` against onnxruntime-genai's builder, in turns, and tells the peak memory.

    python benchmarks/compile_time.py FOLDER --rounds 3

FOLDER is a transformers folder (`qopt fetch smollm2-135m --format safetensors -o FOLDER`). Each
round runs qopt without a check, the builder, and qopt with its default check, all to fp32 and all
in processes of their own; the first round is not counted. Memory is the largest VmHWM of any
process of a command (Linux).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

QOPT = [
    sys.executable,
    "-P",
    "-m",
    "qopt.cli",
    "compile",
    "{model}",
    "-r",
    "baseline",
    "-o",
    "{out}",
]
PEER = [sys.executable, "-P", "-m", "onnxruntime_genai.models.builder"]
COMMANDS = {
    "qopt, check off": [*QOPT, "-q", "--check", "off"],
    "builder": [
        *PEER,
        "-i",
        "{model}",
        "-o",
        "{out}",
        "-p",
        "fp32",
        "-e",
        "cpu",
        "-c",
        "{out}/cache",
    ],
    "qopt, default check": [*QOPT, "-q"],
}


def children(pid: int) -> list[int]:
    """The process and all below it."""
    try:
        told = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return [pid]
    return [pid, *(found for child in told.split() for found in children(int(child)))]


def peak(pid: int) -> int:
    """The largest VmHWM of the process and those below it, in bytes."""
    largest = 0
    for each in children(pid):
        try:
            lines = Path(f"/proc/{each}/status").read_text().splitlines()
        except OSError:
            continue
        found = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
        largest = max(largest, *(kib * 1024 for kib in found), 0)
    return largest


def measure(command: list[str]) -> tuple[float, int]:
    """Seconds and peak memory of a command."""
    start, largest = time.perf_counter(), 0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None:
            largest = max(largest, peak(process.pid))
            time.sleep(0.05)
        seconds = time.perf_counter() - start
        if process.returncode:
            log.seek(0)
            sys.exit(f"{' '.join(command)}\n{log.read().decode(errors='replace')[-2000:]}")
    return seconds, largest


def main() -> None:
    """Run the rounds and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    memory = dict.fromkeys(COMMANDS, 0)
    for round_ in range(given.rounds + 1):
        for name, command in list(COMMANDS.items())[:: -1 if round_ % 2 else 1]:
            with tempfile.TemporaryDirectory(dir=".") as folder:
                parts = [p.format(model=given.model, out=f"{folder}/out") for p in command]
                took, most = measure(parts)
            memory[name] = max(memory[name], most)
            if round_:
                seconds[name].append(took)
    base = statistics.median(seconds["builder"])
    print(f"{'command':20}  {'median s':>8}  {'to builder':>10}  {'peak MB':>7}")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:20}  {median:8.1f}  {median / base:10.2f}  {memory[name] / 1e6:7.0f}")


if __name__ == "__main__":
    main()
