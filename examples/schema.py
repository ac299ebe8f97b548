"""Generate JSON that matches a schema: python examples/schema.py [MODEL].

Needs `pip install ".[shape]"`, which brings llguidance. Without MODEL it runs offline with the embedded pair: the JSON is valid,
but a model that only knows stories fills it with nonsense. An instruct model, such as HuggingFaceTB/SmolLM2-135M-Instruct, needs
`pip install ".[hub]"` too.
"""

import json
import sys

from specdec import SpeculativeDecoder

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 2},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}


def main(model: str | None = None) -> None:
    """Print an invented person."""
    if model:
        decoder = SpeculativeDecoder(model)
        question = {"role": "user", "content": "Invent a person. Answer with JSON."}
        output = decoder.answer([question], 200, seed=7, constraint=decoder.json_schema(PERSON)).continuation
    else:
        decoder = SpeculativeDecoder("stories6M.bin", "stories650K.bin")
        prompt = "Once upon a time, there was a girl named "
        output = decoder.generate(prompt, 200, seed=7, constraint=decoder.json_schema(PERSON)).continuation
    print(json.dumps(json.loads(output), indent=2))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:  # such as a missing package
        sys.exit(f"schema.py: {error}")
