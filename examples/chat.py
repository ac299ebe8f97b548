"""Chat with a model: python examples/chat.py [MODEL].

MODEL is a folder, a GGUF file or a name on the Hugging Face hub, such as HuggingFaceTB/SmolLM2-135M-Instruct; that needs
`pip install ".[hub]"`. Without MODEL the embedded pair answers. It runs offline, but it only writes stories.
"""

import sys

from specdec import Proposal, Sampling, SpeculativeDecoder


def load(model: str | None) -> SpeculativeDecoder:
    """Return a decoder for the model, or for the embedded pair with a chat template that its files lack."""
    if model:
        return SpeculativeDecoder(model)
    return SpeculativeDecoder("stories6M.bin", "stories650K.bin", template="llama2")


def main(model: str | None = None) -> None:
    """Answer each line of the input until it ends."""
    decoder, messages = load(model), list[dict[str, str]]()
    while True:
        try:
            question = input(">>> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        messages.append({"role": "user", "content": question})
        answer = ""
        for event in decoder.chat(messages, 100, Sampling(temperature=0.7, seed=7)):
            if not isinstance(event, Proposal):
                print(event.text, end="", flush=True)
                answer += event.text
        print()
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main(*sys.argv[1:])
