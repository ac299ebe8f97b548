"""Render the conversations of tests/fixtures/chat: `python -m tests.tools.make_chats`. Committed with transformers 5.23.

The templates are the published ones of SmolLM2, Qwen2.5 (without its tools), Qwen3.5, Llama 3, Phi-4-mini, Gemma 3, LFM2.5 and
Llama 2.
"""

import json
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

FOLDER = Path(__file__).parents[1] / "fixtures" / "chat"
VARIABLES = {
    "smollm2": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    "qwen2": {"eos_token": "<|im_end|>"},
    "qwen35": {"eos_token": "<|im_end|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "phi4": {"eos_token": "<|endoftext|>"},
    "gemma3": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "lfm2": {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>"},
    "llama2": {"bos_token": "<s>", "eos_token": "</s>"},
}
SYSTEM = {"role": "system", "content": "You are a robin.\nSing.  "}
TURNS = [
    {"role": "user", "content": "  Hi there!\n\n"},
    {"role": "assistant", "content": ' Hello \u00e9\U0001f642, <tag> & "quotes" {{ x }} {% y %}\n'},
    {"role": "user", "content": "What is <|im_end|> and </s><|eot_id|> for?"},
    {"role": "assistant", "content": "They end a turn."},
    {"role": "user", "content": ""},
]


def main() -> None:
    chats = [TURNS[:1], TURNS[:3], TURNS, [SYSTEM, *TURNS[:1]], [SYSTEM, *TURNS]]
    cases = {
        name: {
            "variables": variables,
            "chats": [
                {
                    "messages": messages,
                    "text": render_jinja_template(
                        [messages],
                        chat_template=(FOLDER / f"{name}.jinja").read_text(),
                        add_generation_prompt=True,
                        **variables,
                    )[0][0],
                }
                for messages in chats
            ],
        }
        for name, variables in VARIABLES.items()
    }
    (FOLDER / "rendered.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
