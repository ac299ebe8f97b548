"""Time to the first token of `specdec`, and the memory of its processes, each start in a new process.

    python -m tests.tools.start_times MODEL [--starts 5] [OPTION...]

runs `specdec -m MODEL OPTION... "Once upon a time"` several times, then twice at once, and prints for each start the seconds from
the command to the first new text, and the peak of the memory that the process has for itself (RssAnon); for the two at once their
PSS, in which a page that both map counts half in each. Linux only. The first start of a model packs it, so leave that one out.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.tools.checkpoint_files import ROOT

PROMPT = "Once upon a time"
POLL_S = 0.003


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start a generation, with stdout as a pipe that does not block."""
    command = [sys.executable, "specdec.py", *arguments, PROMPT]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout
    os.set_blocking(process.stdout.fileno(), False)
    return process


def read_megabytes(process: subprocess.Popen[bytes], file: str, key: str) -> float:
    """Return a value of a process in /proc, 0 if the process has ended."""
    try:
        text = Path(f"/proc/{process.pid}/{file}").read_text()
    except OSError:
        return 0.0
    match = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) / 1000 if match else 0.0


def wait_for_token(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Wait for the first text after the prompt, and return the seconds since the call and the peak of private megabytes."""
    begin, text, peak = time.perf_counter(), b"", 0.0
    assert process.stdout
    while len(text) <= len(PROMPT):
        text += process.stdout.read() or b""
        peak = max(peak, read_megabytes(process, "status", "RssAnon"))
        if process.poll() is not None:
            sys.exit("it ended without a token")
        time.sleep(POLL_S)
    return time.perf_counter() - begin, peak


def main() -> None:
    """Parse the arguments, run the starts and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--starts", type=int, default=5)
    arguments, options = parser.parse_known_args()
    command = ["-m", arguments.model, "-t", "0", "-n", "64", *options]
    for _ in range(arguments.starts):
        process = start(command)
        seconds, peak = wait_for_token(process)
        process.kill()
        process.wait()
        print(f"first token after {seconds:.2f} s, {peak:.0f} MB private")
    both = [start(command) for _ in range(2)]
    for process in both:
        wait_for_token(process)
    sizes = [(read_megabytes(each, "smaps_rollup", "Pss"), read_megabytes(each, "smaps_rollup", "Rss")) for each in both]
    print("two at once: " + ", ".join(f"PSS {pss:.0f} MB of {rss:.0f} MB" for pss, rss in sizes))
    for process in both:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
