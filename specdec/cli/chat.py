"""`specdec chat`: a conversation at the terminal, or an answer to a pipe. Knows no arrays and no formats."""

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

from specdec.cli.exits import say, writing
from specdec.cli.model_loading import drawn_as_advised, found, models_of, shaping
from specdec.cli.options import as_utf8, flag, most_used, of_text
from specdec.cli.prompts import STDIN, message_of
from specdec.cli.request import DRAFT, MODELS, SAMPLERS, Request, with_models
from specdec.draft.settings import AUTO
from specdec.loaders import is_llama2c
from specdec.text.chat_template import GUESSED, RENDERING
from specdec.validation import text


def refuse_steps(value: object) -> None:
    """llama2.c's -n, where a person may look for it."""
    if value is not None:
        raise ValueError("-n counts the prompt too, of which a talk has many; --max-tokens N limits an answer")


@dataclass(frozen=True, kw_only=True)
class ChatRequest(Request):
    """Of `specdec chat`."""

    offers = (
        f"word model draft {MODELS} template system prompt file steps max_tokens schema regex temperature {SAMPLERS} "
        "seed threads plain as_json no_history"
    )
    draft: str = most_used(AUTO, "-d", "--draft", metavar="NAME", help=f"{DRAFT}.")
    system: str = of_text("", "-y", "--system", metavar="TEXT", callback=as_utf8, help="System prompt.")
    prompt: str = of_text("", "-i", "--prompt", metavar="TEXT", callback=as_utf8, help="The first message.")
    file: str = of_text("", "-f", "--file", metavar="FILE", help="A file whose text follows that of -i; a pipe's follows both.")
    steps: int | None = of_text(None, "-n", "--steps", help="", hidden=True, callback=refuse_steps)
    max_tokens: int = of_text(1024, "--max-tokens", metavar="N", min=1, help="Tokens of an answer at most.")
    temperature: float = 0.7
    plain: bool = flag("--plain", group="Output", help="No colours.")
    no_history: bool = flag("--no-history", group="Output", help="Keep neither messages nor the talk after the session.")

    def __post_init__(self) -> None:
        super().__post_init__()
        text("system", self.system)

    @property
    def is_talk(self) -> bool:
        """Whether somebody sits at a terminal."""
        return bool(sys.stdin) and sys.stdin.isatty() and sys.stdout.isatty()

    def settled(self) -> "ChatRequest":
        """With its first message and its models where they belong."""
        self = replace(self, word=None) if self.word == STDIN else self  # a pipe is read in any case
        if not (self.word or self.model):
            raise ValueError("which model? Name one with -m, such as HuggingFaceTB/SmolLM2-135M-Instruct")
        request = with_models(replace(self, prompt=message_of(self.prompt, self.file)))
        if not (self.is_talk or request.prompt):
            raise ValueError("there is no question, and no terminal to ask one at; -i TEXT asks one")
        return request


def run(request: ChatRequest) -> None:
    """Talk to a model that was taught to; a pipe is answered once."""
    from specdec.text.conversation import USER, Conversation, Settings
    from specdec.ui import chat as screen  # which nothing else needs
    from specdec.ui.line_editor import state_folder

    request = request.settled()
    places, shape_with = found(request, RENDERING), shaping(request)
    if is_guess := not request.template and is_llama2c(Path(places[0])):
        request = replace(request, template=GUESSED)
    with models_of(request, places) as models:
        # a model that cannot chat is told before it is warm
        models.decoder.encode_chat([{"role": USER, "content": ""}])
        shape = shape_with(models.decoder)
    if is_guess:
        say(f"{request.titles[0]} names no chat template; that of Llama 2 is used, which a story model was not taught")
    request = models.drafted(request)
    names = [each.name for each in fields(Settings) if each.name != "seed"]
    drawn = {name: getattr(request, name) for name in names} | drawn_as_advised(request, models.decoder)
    settings = Settings(**drawn, seed=request.sampling.seed)
    conversation = Conversation(models.decoder, request.system, settings, str(request.model), models.made_with, shape)
    told = {"model": request.model, "draft": request.draft or None} if request.as_json else None
    talk = screen.Chat(conversation, request.roles, request.plain, told)
    with writing():
        if request.is_talk:
            talk.converse(str(request.prompt), None if request.no_history else state_folder())
        else:
            talk.answer(conversation.ask(str(request.prompt)))
