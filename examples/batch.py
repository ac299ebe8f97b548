"""Complete several prompts at the same time: python examples/batch.py [URL].

Needs a started server and `pip install ".[serve]"` for it. The embedded pair runs offline:

    specdec serve -m stories6M.bin
"""

import json
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

PROMPTS = ["Once upon a time", "Tom had a red ball", "The little robin", "One day, a boy named Tim"]


def complete(url: str, prompt: str) -> tuple[str, int]:
    """Return the completion of a prompt and its number of tokens; it is the same alone and in a batch."""
    body = json.dumps({"prompt": prompt, "max_tokens": 60, "temperature": 0.8, "seed": 7}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


def main(url: str = "http://127.0.0.1:8080") -> None:
    """Print all completions and the tokens per second of the batch."""
    start = time.perf_counter()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:  # the server runs the requests in shared forward passes
        completions = list(pool.map(lambda prompt: complete(url, prompt), PROMPTS))
    seconds = time.perf_counter() - start
    for prompt, (text, _) in zip(PROMPTS, completions, strict=True):
        print(f"{prompt}{text}\n")
    n_tokens = sum(n for _, n in completions)
    print(f"{n_tokens} tokens, {n_tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except urllib.error.URLError as error:
        sys.exit(f"batch.py: {error.reason}; start a server with: specdec serve -m stories6M.bin")
