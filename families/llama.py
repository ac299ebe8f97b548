"""Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288; Dubey et al. 2024, arXiv:2407.21783), and what is saved as one."""

from ..architectures import Config
from . import folders, ggufs
from .family import InFolder, InGguf, Keys, Template
from .values import Values


def config(values: Values) -> Config:
    """The numbers that a config.json says."""
    folders.no_window(values)
    folders.all_are(folders.FULL, values)
    return Config(**folders.numbers(values), attention=folders.attention(values), mlp_bias=values.flag("mlp_bias"))


def gguf_config(k: Keys) -> Config:
    """The numbers that a GGUF file's keys say."""
    return Config(**ggufs.numbers(k))


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
    InFolder("llama", folders.DEFAULTS, config, folders.PLACES),
    InGguf("llama", gguf_config, ggufs.PAIRS_PLACES | ggufs.EXPERTS_PLACES, does=(ggufs.EXPERTS,)),  # a Mixtral, too
    LLAMA2,
)
