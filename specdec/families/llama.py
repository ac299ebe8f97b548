"""Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288; Dubey et al. 2024, arXiv:2407.21783), and what is saved as one."""

from specdec.config import Config
from specdec.families import gguf_common as gguf
from specdec.families import hf_common as hf
from specdec.families.config_values import Values
from specdec.families.family import InFolder, InGguf, Keys, Template


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    hf.no_window(values)
    hf.all_are(hf.FULL, values)
    return Config(**hf.numbers(values), attention=hf.attention(values), mlp_bias=values.flag("mlp_bias"))


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say."""
    return Config(**gguf.numbers(k))


# which llama2.c exports were trained with: such files name none
LLAMA2 = Template(
    "llama2",
    """{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}\
{% else %}{% set turns = messages %}{% set system = false %}{% endif %}\
{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('user and assistant have to take turns, user first') }}{% endif %}\
{% if loop.index0 == 0 and system is not false %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    {"bos_token": "<s>", "eos_token": "</s>"},
    "a llama2.c export of Llama 2 chat",
)
FAMILY = (
    InFolder("llama", hf.DEFAULTS, config, hf.PLACES),
    InGguf("llama", gguf_config, gguf.PAIRS_PLACES | gguf.EXPERTS_PLACES, does=(gguf.EXPERTS,)),  # a Mixtral, too
    LLAMA2,
)
