"""Encode conversations with a model's chat template. Independent of terminals, and of models except for their files.

The text equals, byte for byte, the output of transformers' `apply_chat_template` for the same messages. The name of a special
token becomes that token in the template's text, and plain text in a message; `jinja_renderer` finds which is which.
"""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.argument_checks import JSONObject, check_choice, check_path, check_string, decode_text, shorten
from specdec.loaders import Checkpoint, optional_dependencies, read_optional_json_object
from specdec.loaders.llama2c import LLAMA2_TEMPLATE, LLAMA2_VARIABLES
from specdec.tokenizer import AnyTokenizer, StreamingDetokenizer, read_file_bytes

if TYPE_CHECKING:
    from specdec.text.jinja_renderer import Rendering

# role and content; an answer can have tokens, the ids that were generated; tool calls have the other MESSAGE_KEYS
Message = JSONObject
Tools = Sequence[JSONObject]  # functions that a model may call, as templates take them
Options = JSONObject  # template variables next to the messages, for example enable_thinking
MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")  # passed to templates
NO_OPTIONS: Options = {}
ROLES = ("system", "user", "assistant", "tool", "developer", "ipython", "function")

LLAMA2C_TEMPLATE = "llama2"  # name of LLAMA2_TEMPLATE for users
TEMPLATE_FILE, TOKENIZER_CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
SPECIAL_TOKENS_MAP_FILE = "special_tokens_map.json"
PROCESSOR_TEMPLATE_FILE = "chat_template.json"  # of older vision models
# the names are those of transformers; a model may have several templates
TOOL_TEMPLATE_NAME = "tool_use"
TOOL_TEMPLATE_FILE = f"additional_chat_templates/{TOOL_TEMPLATE_NAME}.jinja"
SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
GGUF_TOKEN_ID_KEYS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
PROBE, PROBE_KEY = "specdec-probe", "specdec-key"  # content, and key of a part, that show what a template renders
MAX_CHARACTERS = 32 << 20  # of messages and tools, and of the rendered text
REQUIRED_PACKAGES = {optional_dependencies.JINJA: "to render chat templates"}


class TemplateError(ValueError):
    """An error in a chat template, or messages that the template rejects. One line: the template's location and what is wrong."""


class PromptTooLongError(TemplateError):
    """An error for a conversation with so much text that it cannot fit the context, however it is tokenized."""


class ChatTemplate:
    """A model's Jinja chat template with its special-token variables, which turns a conversation into text or token ids.

    Attributes:
        source: The Jinja source.
        location: The file or name, for errors.
        variables: bos_token and so on.
        for_tools: The template of conversations with tools; the template itself if the model has only one.
    """

    def __init__(self, source: str, location: str, variables: Mapping[str, str], tool_source: str = "") -> None:
        """Store the sources and the variables; nothing is rendered yet.

        Args:
            source: The Jinja source.
            location: The file or name, for errors.
            variables: bos_token and so on.
            tool_source: The Jinja source for conversations with tools; "" for the same one.
        """
        self.source, self.location, self.variables = source, location, dict(variables)
        self.for_tools = ChatTemplate(tool_source, location, variables) if tool_source else self
        self._rendered_prefixes = dict[int, tuple[int, int]]()  # see `Rendering.find_prefix_ends`

    @property
    def supports_tools(self) -> bool:
        """Whether the template's source mentions the variables tools or xml_tools."""
        return self.has_reference_to("(xml_)?tools")

    def has_reference_to(self, name: str) -> bool:
        """Return whether the template's source contains a name, given as a regex, as a whole word."""
        return re.search(rf"\b{name}\b", self.source) is not None

    def takes_variable(self, name: str) -> bool:
        """Return whether the template reads a variable that its caller may set."""
        from specdec.text.jinja_renderer import find_variables

        return name in find_variables(self.source)

    @functools.cached_property
    def takes_parts(self) -> bool:
        """Whether the template renders a content that is a list of parts, and drops one that is a string, as SmolVLM's does."""
        from specdec.text.jinja_renderer import Rendering, RenderingError

        def render(content: object) -> str:
            return Rendering(self.source, self.variables, [{"role": "user", "content": content}]).text

        try:
            text = "" if PROBE in render(PROBE) else render([{"type": "text", "text": PROBE, PROBE_KEY: ""}])
        except RenderingError:
            return False
        return PROBE in text and PROBE_KEY not in text  # else it writes the list as Python does

    def __reduce__(self) -> tuple[object, ...]:
        """Return what pickle needs to rebuild the template from its source."""
        return ChatTemplate, (self.source, self.location, self.variables, "" if self.for_tools is self else self.for_tools.source)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation in the template's format, up to the point where the model's answer starts.

        Raises:
            TemplateError: The template cannot render the messages.
            PromptTooLongError: The messages have more than MAX_CHARACTERS characters.
        """
        return self._render_conversation(messages, [], MAX_CHARACTERS, None, NO_OPTIONS).text

    def _render_conversation(
        self, messages: Sequence[Message], prefix_lengths: list[int], max_characters: int, tools: Tools | None, options: Options
    ) -> "Rendering":
        """Render a conversation, find which parts of the text come from messages, and find where its prefixes end in the text.

        Args:
            messages: The conversation.
            prefix_lengths: The numbers of messages of the prefixes; see `Rendering.find_prefix_ends`.
            max_characters: The maximum length of the rendered text.
            tools: Functions that the model may call.
            options: Additional template variables.

        Raises:
            TemplateError: The template cannot render the messages.
            PromptTooLongError: The messages or the rendered text have too many characters.
            ValueError: The rendered text contains a lone surrogate.
        """
        from specdec.text.jinja_renderer import Rendering, RenderingError

        visible = [{key: message[key] for key in MESSAGE_KEYS if key in message} for message in messages]
        if self.has_reference_to("message.thinking"):  # of gpt-oss, which rejects it with both calls and content
            for each in visible:
                if "reasoning_content" in each and not (each.get("tool_calls") and each.get("content")):
                    each["thinking"] = each["reasoning_content"]
        if self.takes_parts:
            for each in visible:
                each["content"] = [{"type": "text", "text": each["content"]}]
        try:
            rendering = Rendering(self.source, self.variables, visible, [*tools] if tools else None, options)
            if (n := rendering.n_characters) > MAX_CHARACTERS:
                raise PromptTooLongError(
                    f"{self.location}: the messages have {n} characters; at most {MAX_CHARACTERS} are rendered"
                )
            if (n := len(rendering.text)) > max_characters:
                raise PromptTooLongError(
                    f"{self.location}: the rendered text has {n} characters; at most {max_characters} fit the context"
                )
            check_string(f"the rendered text of {self.location}", rendering.text)
            rendering.find_prefix_ends(prefix_lengths, self._rendered_prefixes)
        except RenderingError as error:
            raise TemplateError(f"{self.location}: {' '.join(str(error).split())[:300]}") from None
        return rendering

    def encode(
        self,
        tokenizer: AnyTokenizer,
        messages: Sequence[Message],
        n_positions: int | None = None,
        tools: Tools | None = None,
        options: Options = NO_OPTIONS,
    ) -> list[int]:
        """Return the token ids of a conversation in the template's format, up to the point where the model's answer starts.

        An earlier answer keeps its own `tokens` as long as they decode to its rendered text, so that the KV cache can be reused.

        Args:
            tokenizer: The tokenizer.
            messages: The conversation.
            n_positions: The context length; None for no limit.
            tools: Functions that the model may call.
            options: Additional template variables.

        Raises:
            TemplateError: The template rejects the messages.
            PromptTooLongError: The text cannot fit the context. Raised before the text is encoded.
            TypeError: The messages have a wrong type.
            ValueError: The messages are not valid.
        """
        if tools and self.for_tools is not self:
            return self.for_tools.encode(tokenizer, messages, n_positions, tools, options)
        messages = validate_messages(messages)
        with_tokens = [i for i, message in enumerate(messages) if message.get("tokens")]
        max_characters = MAX_CHARACTERS if n_positions is None else n_positions * tokenizer.max_token_length
        rendering = self._render_conversation(messages, with_tokens, max_characters, tools, options)
        stream, ids, position = StreamingDetokenizer(tokenizer), list[int](), 0
        for i, end in zip(with_tokens, rendering.prefix_ends, strict=True):
            if position <= end:
                new_ids = tokenizer.encode_rendered(rendering.get_segments(position, end))
                for token in new_ids:
                    stream.push(token)
                answer_text = "".join(stream.peek(messages[i]["tokens"]))
                ids, position = ids + new_ids, end
                if rendering.text.startswith(answer_text, position):
                    ids, position = [*ids, *messages[i]["tokens"]], position + len(answer_text)
                    for token in messages[i]["tokens"]:
                        stream.push(token)
        ids += tokenizer.encode_rendered(rendering.get_segments(position, len(rendering.text)))
        if not ids:
            raise TemplateError(f"{self.location}: the rendered text is empty")
        return ids


def validate_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages as a list if there is at least one and each has a string as role and as content.

    Raises:
        TypeError: The messages are not a list of mappings with strings, or there are none.
        ValueError: A role or content contains a lone surrogate.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise TypeError(f"messages are {shorten(messages, repr)}; expected a list of at least one object with role and content")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{i}] is {shorten(message, repr)}; expected an object with role and content")
        for key in ("role", "content"):
            check_string(f"{key} of messages[{i}]", message.get(key))
    return [*messages]


def check_roles(messages: Sequence[Message]) -> None:
    """Raise ValueError if a message has a role that is not in ROLES; also raises the errors of `validate_messages`."""
    for i, message in enumerate(validate_messages(messages)):
        check_choice(f"role of messages[{i}]", message["role"], ROLES)


def load_chat_template(
    checkpoint: Checkpoint | None, tokenizer: Path, given: str | os.PathLike[str] | None = None
) -> ChatTemplate:
    """Find the chat template of a model, or read the given one, and return it with its special-token variables.

    Args:
        checkpoint: The model, if it has files.
        tokenizer: The tokenizer file; its folder is searched if there is no checkpoint.
        given: A template file, or LLAMA2C_TEMPLATE, instead of the model's own.

    Raises:
        TemplateError: There is no template, or a package is missing.
        TokenizerError: The template file cannot be read.
    """
    if missing := optional_dependencies.format_missing_packages(REQUIRED_PACKAGES):
        raise TemplateError(missing)
    folder = checkpoint.path if checkpoint else tokenizer.parent
    source, tool_source, location, variables = None, None, folder, dict[str, str]()
    if checkpoint and checkpoint.vocabulary:
        source, tool_source = checkpoint.chat_template, checkpoint.tool_template
        variables = _parse_gguf_special_tokens(checkpoint.vocabulary)
    elif folder.is_dir():
        config = read_optional_json_object(folder / TOKENIZER_CONFIG_FILE)
        variables = _parse_special_tokens(read_optional_json_object(folder / SPECIAL_TOKENS_MAP_FILE))
        variables |= _parse_special_tokens(config)
        source, location = config.get("chat_template"), folder / TOKENIZER_CONFIG_FILE
        if isinstance(source, list):  # several named templates
            named = {str(each.get("name")): each.get("template") for each in source if isinstance(each, dict)}
            source, tool_source = named.get("default"), named.get(TOOL_TEMPLATE_NAME)
        if source is None and (folder / PROCESSOR_TEMPLATE_FILE).exists():
            source = read_optional_json_object(folder / PROCESSOR_TEMPLATE_FILE).get("chat_template")
            location = folder / PROCESSOR_TEMPLATE_FILE
        if (folder / TEMPLATE_FILE).exists():
            source, location = _read_template(folder / TEMPLATE_FILE), folder / TEMPLATE_FILE
        if (folder / TOOL_TEMPLATE_FILE).exists():
            tool_source = _read_template(folder / TOOL_TEMPLATE_FILE)
    elif checkpoint:  # a llama2.c file
        variables = LLAMA2_VARIABLES
    if given == LLAMA2C_TEMPLATE:
        source, tool_source, location = LLAMA2_TEMPLATE, None, Path(LLAMA2C_TEMPLATE)
        variables = LLAMA2_VARIABLES | variables
    elif given is not None:
        location = Path(check_path("template", given))
        if not os.path.exists(location):
            raise TemplateError(f"chat template {location} not found; expected a file, or {LLAMA2C_TEMPLATE}")
        source, tool_source = _read_template(location), None
    if not isinstance(source, str):
        others = f"a file, or {LLAMA2C_TEMPLATE} for a llama2.c export of Llama 2 chat"
        raise TemplateError(f"{folder} has no chat template; use a model that is trained for chat, or template=... ({others})")
    return ChatTemplate(source, str(location), variables, tool_source if isinstance(tool_source, str) else "")


def _read_template(path: Path) -> str:
    data = read_file_bytes(path, "a chat template")
    try:
        return decode_text(data)
    except UnicodeDecodeError as error:
        raise TemplateError(f"{path} is not valid UTF-8 at byte {error.start}; expected a chat template") from None


def _parse_special_tokens(config: JSONObject) -> dict[str, str]:
    """Return the names of special tokens by variable (bos_token and so on) from a parsed JSON file.

    A value can be a string or an object with `content`; variables with any other value are left out.
    """
    values = {name: config.get(name) for name in SPECIAL_TOKEN_KEYS}
    return _keep_strings({name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()})


def _parse_gguf_special_tokens(keys: JSONObject) -> dict[str, str]:
    tokens = keys.get("tokens")  # not validated if another tokenizer is given
    names = dict(enumerate(tokens)) if isinstance(tokens, list) else {}
    return _keep_strings({name: names.get(i) for name, key in GGUF_TOKEN_ID_KEYS.items() if type(i := keys.get(key)) is int})


def _keep_strings(values: JSONObject) -> dict[str, str]:
    return {name: value for name, value in values.items() if isinstance(value, str)}
