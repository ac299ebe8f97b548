"""`specdec chat`: a conversation at the terminal, or an answer to a pipe. Knows no arrays and no formats."""

import sys
from pathlib import Path

import typer

from ..drafting.settings import AUTO
from ..drafting.team import NGRAM
from ..readers import is_llama2c
from ..screens.progress import TIMING, loading
from ..text.templates import LLAMA2_NAME, RENDERING
from .asking import draft_name, tell_if_nothing_comes
from .options import (
    AnswerTokens,
    AsJson,
    DraftFile,
    FirstMessage,
    FirstMessageFile,
    KVOption,
    ModelFile,
    ModelWord,
    NoHistory,
    PlainChat,
    Seed,
    StageName,
    StepsOfATalk,
    SystemPrompt,
    Temperature,
    TemplateFile,
    Threads,
    TokenizerFile,
    TopK,
    TopP,
    WhatToQuantize,
)
from .wiring import NONE, check_arguments, decoder_of, found, made_with, roles_of, say, seed_of, titles_of, writing


def talk(
    word: ModelWord = None,
    model: ModelFile = None,
    draft: DraftFile = NGRAM,
    stage: StageName = "",
    quantize: WhatToQuantize = "draft",
    kv: KVOption = AUTO,
    tokenizer: TokenizerFile = "",
    template: TemplateFile = "",
    system: SystemPrompt = "",
    first: FirstMessage = "",
    file: FirstMessageFile = "",
    steps: StepsOfATalk = None,
    max_tokens: AnswerTokens = 1024,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    seed: Seed = 0,
    threads: Threads = 0,
    plain: PlainChat = False,
    as_json: AsJson = False,
    no_history: NoHistory = False,
) -> None:
    """Talk to a model that was taught to; a pipe is answered once."""
    from ..screens import chat as chat_screen
    from ..screens import chat_lines  # which nothing else needs
    from ..text import conversation as chat  # which nothing else needs

    check_arguments(first + system, top_p, seed, threads, verify="coupled", quantize=quantize, tree="off", kv=kv)
    if word and model:
        raise typer.BadParameter(f"{word!r} and -m {model!r} are two targets; name a draft with -d")
    model = word or model
    if not model:
        raise typer.BadParameter("name a model, such as HuggingFaceTB/SmolLM2-135M-Instruct.", param_hint="'-m' / '--model'")
    is_talk = bool(sys.stdin) and sys.stdin.isatty() and sys.stdout.isatty()
    if file:
        first = _below(first, _text_of(file))
    if sys.stdin and not sys.stdin.isatty():
        tell_if_nothing_comes("what it says goes behind the first message")
        first = _below(first, chat_screen.question_of(sys.stdin.buffer, "stdin"))
    if not is_talk and not first.strip():
        raise typer.BadParameter("there is no question, and no terminal to ask one at.", param_hint="'-i' / '--prompt'")
    draft, stage = draft_name(draft), draft_name(stage)
    draft, stage = "" if draft == NONE else draft, "" if stage == NONE else stage
    seed = seed_of(seed)
    sources = found(model, draft, stage, tokenizer=tokenizer, more=RENDERING)
    with loading() as show:
        is_guess = not template and is_llama2c(Path(sources[0]))
        template = LLAMA2_NAME if is_guess else template
        decoder = decoder_of(sources, tokenizer, quantize, kv, threads, show, template=template or None)
        decoder.encode_chat([{"role": chat.USER, "content": ""}])  # a model that cannot chat is told before it is warm
        show(TIMING)
        decoder.warm_up()
    if is_guess:
        say(f"{titles_of(model)[0]} names no chat template; that of Llama 2 is used, which a story model was not taught")
    settings = chat.Settings(temperature, top_p, top_k, seed, max_tokens)
    conversation = chat.Conversation(decoder, system, settings, model, made_with(decoder))
    told = {"model": model, "draft": draft or None}
    showing = chat_screen.Showing(roles_of(titles_of(model, draft), draft), plain, as_json, told)
    talking = chat_screen.Chat(decoder, conversation, showing)
    with writing():
        if is_talk:
            talking.converse(first, None if no_history else chat_lines.state_folder())
        else:
            talking.answer(conversation.ask(first))


def _below(first: str, more: str) -> str:
    """Two parts of a message, either of which may be empty."""
    return "\n\n".join(filter(None, [first, more]))


def _text_of(file: str) -> str:
    """What stands in a file. Raises ValueError."""
    from ..screens.chat import question_of

    try:
        with Path(file).open("rb") as stream:
            return question_of(stream, file)
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror or error}") from None
