"""`specdec chat`: a conversation at the terminal, or one answer to a pipe."""

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

from specdec.argument_checks import check_string
from specdec.cli.common_options import (
    AS_JSON,
    TEMPLATE,
    ConstraintOptions,
    PromptCacheOptions,
    SamplingOptions,
    SpeculationOptions,
    with_models,
)
from specdec.cli.model_loading import get_recommended_sampling, load_models, make_constraint_factory, resolve_model_paths
from specdec.cli.option_fields import argument, option
from specdec.cli.output_errors import guard_output, print_message
from specdec.cli.prompt_sources import STDIN, read_first_message
from specdec.draft.settings import AUTO
from specdec.loaders import is_llama2c_file
from specdec.text.chat_template import LLAMA2C_TEMPLATE, REQUIRED_PACKAGES


@dataclass(frozen=True, kw_only=True)
class ChatRequest(SpeculationOptions, SamplingOptions, ConstraintOptions, PromptCacheOptions):
    """The options of `specdec chat`."""

    word: str | None = argument("MODEL", "The target, as for -m.")
    template: str = TEMPLATE
    system: str = option("", "-y, --system TEXT", "Generation", "System prompt.")
    prompt: str = option("", "-i, --prompt TEXT", "Generation", "The first message.")
    file: str = option("", "-f, --file FILE", "Generation", "Append this file to the first message; piped input follows both.")
    max_tokens: int = option(1024, "--max-tokens N", "Generation", "Maximum number of tokens in an answer.", min=1)
    temperature: float = option(0.7, "-t, --temperature X", "Most used", "Sampling temperature. 0: greedy.", min=0.0)
    plain: bool = option(False, "--plain", "Output", "Disable colors.")
    as_json: bool = AS_JSON
    no_history: bool = option(False, "--no-history", "Output", "Do not keep the messages and the conversation after the session.")

    def __post_init__(self) -> None:
        """Check the options; raise ValueError if one is not valid."""
        super().__post_init__()
        self.check_word(self.word)
        check_string("system", self.system)

    @property
    def is_interactive(self) -> bool:
        """Whether both stdin and stdout are terminals."""
        return bool(sys.stdin) and sys.stdin.isatty() and sys.stdout.isatty()

    def resolve(self) -> "ChatRequest":
        """Return a copy of the request with the first message's text and the names of the models filled in.

        Raises:
            ValueError: No model is given, or no message although stdin is not a terminal.
        """
        model = self.model if self.word in (None, STDIN) else self.word  # stdin is read in any case
        if not model:
            raise ValueError("no model is given; name one, such as -m HuggingFaceTB/SmolLM2-135M-Instruct")
        request = with_models(replace(self, word=None, model=model, prompt=read_first_message(self.prompt, self.file)), AUTO)
        if not (self.is_interactive or request.prompt):
            raise ValueError("no message is given, and stdin is not a terminal; give one with -i TEXT")
        return request


def run(request: ChatRequest) -> None:
    """Chat with a model in the terminal; piped input gets one answer."""
    from specdec.text.conversation import USER, ChatSettings, Conversation
    from specdec.ui import chat as chat_ui  # imported here, since no other command needs it
    from specdec.ui.line_editor import get_state_folder

    request = request.resolve()
    paths, make_constraint = resolve_model_paths(request, REQUIRED_PACKAGES), make_constraint_factory(request)
    if is_default_template := not request.template and is_llama2c_file(Path(paths[0])):
        request = replace(request, template=LLAMA2C_TEMPLATE)
    with load_models(request, paths) as models:
        # A model without a chat template fails here, before the warm-up.
        models.decoder.encode_chat([{"role": USER, "content": ""}])
        constraint = make_constraint(models.decoder)
    if is_default_template:
        print_message(f"{request.labels.target} has no chat template; using Llama 2's, which a story model was not trained on")
    names = [each.name for each in fields(ChatSettings) if each.name != "seed"]
    sampling = {name: getattr(request, name) for name in names} | get_recommended_sampling(request, models.decoder)
    settings = ChatSettings(**sampling, seed=request.sampling.seed)
    conversation = Conversation(models.decoder, request.system, settings, str(request.model), models.metadata, constraint)
    json_extra = {"model": request.model, "draft": models.request.draft or None} if request.as_json else None
    session = chat_ui.ChatSession(conversation, models.request.labels, request.plain, json_extra)
    with guard_output():
        if request.is_interactive:
            session.run(str(request.prompt), None if request.no_history else get_state_folder())
        else:
            session.show_answer(conversation.ask(str(request.prompt)))
