"""Stream a story and colour the accepted draft tokens: python examples/stream.py [PROMPT].

Runs offline with the embedded pair.
"""

import sys

from specdec import Proposal, Sampling, SpeculativeDecoder, Statistics, Step

GREEN, RESET = "\033[32m", "\033[0m"


def main(prompt: str = "Once upon a time") -> None:
    """Print the story as it is generated, then the statistics."""
    green, reset = (GREEN, RESET) if sys.stdout.isatty() else ("", "")
    decoder = SpeculativeDecoder("stories6M.bin", "stories650K.bin")
    statistics = Statistics()
    for event in decoder.stream(prompt, 100, Sampling(temperature=0.8, seed=7)):
        statistics.add(event)
        if isinstance(event, Proposal):  # the draft's guess, before the target has verified it
            continue
        if isinstance(event, Step):
            n = event.n_accepted
            print(green + "".join(event.pieces[:n]) + reset + "".join(event.pieces[n:]), end="", flush=True)
        else:
            print(event.text, end="", flush=True)
    print(f"\n\n{statistics.n_generated} tokens in {statistics.target_passes} passes of the target")


if __name__ == "__main__":
    main(*sys.argv[1:])
