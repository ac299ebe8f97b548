"""`specdec chat`: a conversation at the terminal, or an answer to a pipe. Knows no arrays and no formats."""

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ..checks import text
from ..drafting.settings import AUTO
from ..readers import is_llama2c
from ..text.templates import LLAMA2_NAME, RENDERING
from . import options
from .endings import say, writing
from .loading import drawn_as_advised, found, models_of, shaping
from .prompts import message_of
from .request import Request, with_models


@dataclass(frozen=True, kw_only=True)
class ChatRequest(Request):
    """Of `specdec chat`."""

    word: options.ModelWord = None
    model: options.ModelFile = None
    draft: options.DraftName = AUTO
    stage: options.StageName = ""
    quantize: options.WhatToQuantize = "draft"
    kv: options.KVOption = AUTO
    pack: options.PackOption = AUTO
    prompt_cache: options.PromptCacheFolder = ""
    prompt_cache_size: options.PromptCacheSize = 10_000
    tokenizer: options.TokenizerFile = ""
    template: options.TemplateFile = ""
    system: options.SystemPrompt = ""
    prompt: options.FirstMessage = ""
    file: options.FirstMessageFile = ""
    steps: options.StepsOfATalk = None
    max_tokens: options.AnswerTokens = 1024
    schema: options.SchemaFile = ""
    regex: options.Regex = ""
    temperature: options.Temperature = 0.7
    top_p: options.TopP = 0.9
    top_k: options.TopK = 0
    min_p: options.MinP = 0.0
    repetition_penalty: options.RepeatPenalty = 1.0
    presence_penalty: options.PresencePenalty = 0.0
    frequency_penalty: options.FrequencyPenalty = 0.0
    seed: options.Seed = 0
    threads: options.Threads = 0
    plain: options.PlainChat = False
    as_json: options.AsJson = False
    no_history: options.NoHistory = False

    def __post_init__(self) -> None:
        super().__post_init__()
        text("system", self.system)

    @property
    def is_talk(self) -> bool:
        """Whether somebody sits at a terminal."""
        return bool(sys.stdin) and sys.stdin.isatty() and sys.stdout.isatty()

    def settled(self) -> "ChatRequest":
        """With its first message and its models where they belong."""
        if self.word and self.model:
            raise ValueError(f"{self.word!r} and -m {self.model!r} are two targets; name a draft with -d")
        model = self.word or self.model
        if not model:
            raise ValueError("which model? Name one with -m, such as HuggingFaceTB/SmolLM2-135M-Instruct")
        request = with_models(replace(self, model=model, prompt=message_of(self.prompt, self.file)))
        if not (self.is_talk or request.prompt):
            raise ValueError("there is no question, and no terminal to ask one at; -i TEXT asks one")
        return request


def run(request: ChatRequest) -> None:
    """Talk to a model that was taught to; a pipe is answered once."""
    from ..screens import chat as screen  # which nothing else needs
    from ..screens.chat_lines import state_folder
    from ..text.conversation import USER, Conversation, Settings

    request = request.settled()
    places, shape_with = found(request, RENDERING), shaping(request)
    if is_guess := not request.template and is_llama2c(Path(places[0])):
        request = replace(request, template=LLAMA2_NAME)
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
    told = {"model": request.model, "draft": request.draft or None}
    talk = screen.Chat(models.decoder, conversation, screen.Showing(request.roles, request.plain, request.as_json, told))
    with writing():
        if request.is_talk:
            talk.converse(str(request.prompt), None if request.no_history else state_folder())
        else:
            talk.answer(conversation.ask(str(request.prompt)))
