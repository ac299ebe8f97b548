"""Tool-call formats, one file each. A model's format is recognized by its chat template."""

from specdec.server.tool_parsers.base import ToolParser
from specdec.server.tool_parsers.gemma import FunctionGemmaParser, GemmaParser
from specdec.server.tool_parsers.glm import GLMParser
from specdec.server.tool_parsers.harmony import HarmonyParser
from specdec.server.tool_parsers.hermes import HermesParser
from specdec.server.tool_parsers.lfm2 import LFM2Parser
from specdec.server.tool_parsers.llama3 import Llama3Parser
from specdec.server.tool_parsers.mistral import MistralListParser, MistralParser
from specdec.server.tool_parsers.muse_glimmer import MuseGlimmerParser
from specdec.server.tool_parsers.qwen3_coder import Qwen3CoderParser

# in order of priority, if a template has the signs of several
TOOL_PARSERS: tuple[type[ToolParser], ...] = (
    HarmonyParser,
    MuseGlimmerParser,
    GemmaParser,
    FunctionGemmaParser,
    LFM2Parser,
    MistralParser,
    MistralListParser,
    GLMParser,
    Qwen3CoderParser,
    HermesParser,
    Llama3Parser,
)


def find_tool_parser(template: str) -> type[ToolParser] | None:
    """Return the first parser whose signs are in the source of a chat template; None if the format of its calls is unknown."""
    for parser in TOOL_PARSERS:
        if any(all(sign in template for sign in signs) for signs in parser.template_signs):
            return parser
    return None
