"""`specdec race`: the target alone and the pair write one text, each by itself. Knows no arrays and no formats."""

from dataclasses import dataclass, replace

import typer
from rich.console import Console

from specdec.cli.exits import writing
from specdec.cli.model_loading import models_of, room_of
from specdec.cli.options import most_used
from specdec.cli.prompts import prompt_of
from specdec.cli.request import DRAFT, Request, with_models, with_steps
from specdec.draft.settings import AUTO
from specdec.ui.progress import READING, loading, telling
from specdec.ui.signals import signals
from specdec.ui.terminal_window import Window, obstacle


@dataclass(frozen=True, kw_only=True)
class RaceRequest(Request):
    """Of `specdec race`."""

    offers = (
        "model draft stage quantize kv pack tokenizer prompt steps max_tokens temperature top_p top_k seed gamma tree "
        "threads as_json"
    )
    draft: str = most_used("", "-d", "--draft", metavar="NAME", help=f"{DRAFT}.")

    def settled(self) -> "RaceRequest":
        """With its prompt and its models where they belong."""
        request = with_models(with_steps(self), AUTO)
        if not request.draft:
            raise ValueError("a race needs a draft; name another one with -d, or leave it out")
        return replace(request, prompt=prompt_of(self.prompt))


def run(request: RaceRequest) -> None:
    """Watch the target alone and the pair write one text, side by side.

    Both run by themselves first, a few times each; then their fastest runs are
    shown together, in slow motion.
    """
    from specdec.bench.race import measure, to_json  # which nothing else needs
    from specdec.ui.race import RaceView

    request = request.settled()
    with models_of(request) as models:
        decoder = models.decoder
        prompt = decoder.encode(str(request.prompt))
    request = models.drafted(request)
    max_tokens = room_of(request, decoder, len(prompt))
    with loading(READING) as show:
        tell = telling(show, READING)
        for share in decoder.read(prompt):
            tell(share)
        race = measure(decoder, prompt, max_tokens, request.sampling, telling(show, "running both"))
    out, roles, seed = Console(), request.roles, request.sampling.seed
    signals.text_begins()
    with writing():
        if request.as_json:
            text = decoder.tokenizer.decode(prompt + race.pair.tokens)
            print(to_json(race, text, **request.named, seed=seed, **models.made_with))
        else:
            if not obstacle(out):
                RaceView(race, roles, Window(out)).play()
            figures = race.report(f"{roles.target} alone", roles.pair, out.width if out.is_terminal else None)
            lines = [*figures, f"{race.sentence}; seed {seed}"]
            out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=not out.is_terminal)
    if not race.is_same_text:
        raise typer.Exit(1)
