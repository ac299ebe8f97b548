"""`specdec race`: the target alone and the pair generate the same output, one after the other."""

from dataclasses import dataclass, replace

import typer
from rich.console import Console

from specdec.cli.common_options import AS_JSON, PromptRequest, with_models
from specdec.cli.model_loading import load_models, resolve_max_tokens
from specdec.cli.output_errors import guard_output
from specdec.cli.prompt_sources import read_prompt
from specdec.draft.settings import AUTO
from specdec.ui.progress import READING, make_progress_callback, show_status
from specdec.ui.signals import signals
from specdec.ui.terminal_window import Window, find_obstacle


@dataclass(frozen=True, kw_only=True)
class RaceRequest(PromptRequest):
    """The options of `specdec race`."""

    as_json: bool = AS_JSON

    def resolve(self) -> "RaceRequest":
        """Return a copy of the request with the prompt's text and the names of target and draft filled in.

        Raises:
            ValueError: The draft is "none", or the options contradict each other.
        """
        request = with_models(self, AUTO)
        if not request.draft:
            raise ValueError("race needs a draft; name another one with -d, or leave out -d")
        return replace(request, prompt=read_prompt(self.prompt))


def run(request: RaceRequest) -> None:
    """Show the target alone and the pair generating the same output, side by side.

    Each runs on its own a few times first. Then the fastest run of each is
    replayed in slow motion.
    """
    from specdec.bench.race import measure, to_json  # imported here, since no other command needs it
    from specdec.ui.race import RaceView

    request = request.resolve()
    with load_models(request) as models:
        decoder = models.decoder
        prompt = decoder.encode(str(request.prompt))
    max_tokens = resolve_max_tokens(request, decoder, len(prompt))
    with show_status(READING) as show:
        on_progress = make_progress_callback(show, READING)
        for share in decoder.read(prompt):
            on_progress(share)
        race = measure(decoder, prompt, max_tokens, request.sampling, make_progress_callback(show, "running both"))
    out, labels, seed = Console(), models.request.labels, request.sampling.seed
    signals.begin_output()
    with guard_output():
        if request.as_json:
            text = decoder.tokenizer.decode(prompt + race.pair.tokens)
            print(to_json(race, text, **models.request.model_names, seed=seed, **models.metadata))
        else:
            if not find_obstacle(out):
                RaceView(race, labels, Window(out)).play()
            results = race.format_lines(f"{labels.target} alone", labels.pair, out.width if out.is_terminal else None)
            lines = [*results, f"{race.summary}; seed {seed}"]
            out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=not out.is_terminal)
    if not race.is_same_text:
        raise typer.Exit(1)
