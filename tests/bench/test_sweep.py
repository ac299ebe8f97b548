"""`specdec sweep`: its arithmetic with fake clocks, its reports, and the command on a tiny pair."""

import dataclasses
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len
from rich.console import Console

import specdec
from specdec import Sampling, SpeculativeDecoder
from specdec.bench import sweep
from specdec.bench.measure import RecordedRun
from specdec.bench.sweep import Setting, SettingResult, SweepCase, SweepRuns
from specdec.cli.sweep import SweepRequest
from specdec.events import Event, Prompt, Proposal, Step
from specdec.ui import sweep_report as sweep_chart
from tests.conftest import Pair
from tests.fakes.terminal import ShellJob
from tests.tools.command_runs import Run, assert_rejected, from_json, run  # noqa: F401  (a fixture)

GREEDY, SAMPLED = Sampling(0.0), Sampling(1.0, seed=1)
STORY = list(range(100, 160))


class FakeDecoder:
    """A decoder that generates STORY and accepts `stands` of every `gamma` proposals, at that many seconds a pass.

    wrong: a position with another token.
    """

    def __init__(self, gamma: int = 0, stands: int = 0, seconds: float = 1.0, wrong: int | None = None) -> None:
        self.gamma: Any = gamma
        self.stands, self.seconds, self.wrong = stands, seconds, wrong
        self.cases: list[SweepCase] = []

    def stream(self, prompt: str, max_tokens: int, sampling: Sampling) -> Iterator[Event]:
        self.cases.append(SweepCase(prompt, max_tokens, sampling))
        text = STORY[:max_tokens]
        if self.wrong is not None and self.wrong < len(text):
            text[self.wrong] = -1
        yield Prompt([1], 1000.0)
        while text:
            n = min(self.gamma, len(text) - 1)
            accepted = min(self.stands, n)
            yield Proposal(text[:n])
            new, text = text[: accepted + 1], text[accepted + 1 :]
            yield Step(new, [*new[:accepted], *[0] * (n - accepted)], accepted, self.seconds, 0.0, None if text else "max_tokens")


def make_fake_settings(**pair: Any) -> list[Setting]:
    return [
        Setting("target alone", "", FakeDecoder(), "alone"),
        Setting("draft alone", "", FakeDecoder(seconds=0.1, wrong=3), "draft"),
        Setting("γ 4", "-g 4", FakeDecoder(4, **{"stands": 3, "seconds": 2.0} | pair), "pair", 4),
    ]


def test_speedup_compares_neighbours_and_excludes_prefill() -> None:
    """Four tokens take two seconds; the target alone takes four."""
    measured = sweep.measure(make_fake_settings(), [SweepCase("a", 40, GREEDY)], n_rounds=2)
    alone, draft, pair = measured.compute_cells()
    assert measured.is_complete
    assert (alone.speedup_mean, alone.tokens_per_second, alone.tokens_per_pass) == (1.0, 1.0, 1.0)
    assert (alone.n_drafted, alone.acceptance_by_position) == (0, [])
    assert draft.speedup_mean == pytest.approx(10)
    assert (pair.speedup_min, pair.speedup_mean, pair.speedup_max, pair.tokens_per_second) == (2.0, 2.0, 2.0, 2.0)
    assert pair.tokens_per_pass == 4
    assert pair.n_accepted == 2 * 30


def test_acceptance_by_position_counts_only_drafted_tokens() -> None:
    """Ten passes of four tokens; the last one has room for only three proposals."""
    measured = sweep.measure(make_fake_settings(), [SweepCase("a", 40, GREEDY)], n_rounds=1)
    pair = measured.compute_cells()[-1]
    assert pair.acceptance_by_position == [1.0, 1.0, 1.0, 0.0]
    assert pair.n_drafted == 9 * 4 + 3
    assert pair.acceptance_rate == 30 / 39
    run = RecordedRun()
    for drafted, accepted in ((3, 1), (1, 1), (0, 0), (2, 0)):
        run.add(Step([7] * (accepted + 1), [7] * drafted, accepted, 0.5, 0.1))
    assert (run.statistics.acceptance_by_position, run.statistics.decode_seconds) == ([2 / 3, 0, 0], 2.0)


def make_run(tokens: list[int], stop_reason: str, seconds: float) -> RecordedRun:
    """Return a run of one step."""
    run = RecordedRun()
    run.add(Step(tokens, [], 0, seconds, 0.0, stop_reason))
    return run


def make_runs(table: dict[str, list[tuple[float, float]]]) -> SweepRuns:
    """Return runs from the seconds of the target alone and of the pair, by case and round; ten tokens each."""
    settings = [setting for setting in make_fake_settings() if setting.kind != "draft"]
    runs = {
        SweepCase(prompt, 10, GREEDY): [
            {s.name: make_run(STORY[:10], "max_tokens", t) for s, t in zip(settings, times, strict=True)} for times in rounds
        ]
        for prompt, rounds in table.items()
    }
    return SweepRuns(settings, runs)


def test_case_counts_once_with_median_of_rounds() -> None:
    """A round in which the machine was five times slower for both, or for one of them, changes nothing."""
    measured = make_runs({"a": [(4.0, 2.0), (20.0, 10.0), (4.0, 10.0)], "b": [(9.0, 3.0)] * 3, "c": [(4.0, 4.0)] * 3})
    pair = measured.compute_cells()[1]
    assert (pair.speedup_min, pair.speedup_mean, pair.speedup_max) == (1.0, 2.0, 3.0)
    assert pair.tokens_per_second == 2.5
    assert pair.n_texts == 3
    assert measured.compute_totals()[1] == dataclasses.replace(pair, max_tokens=None)


def test_empty_output_has_no_speed() -> None:
    settings = make_fake_settings()[:1]
    empty, ten = make_run([], "eos", 1.0), make_run(STORY[:10], "max_tokens", 5.0)
    runs = {SweepCase("a", 10, GREEDY): [{"target alone": empty}], SweepCase("b", 10, GREEDY): [{"target alone": ten}]}
    assert [f.n_texts for f in SweepRuns(settings, runs).compute_cells()] == [1]
    assert SweepRuns(settings, {SweepCase("a", 10, GREEDY): [{"target alone": empty}]}).compute_cells() == []


def test_settings_take_turns_in_rotated_order() -> None:
    names: list[str] = []
    settings = make_fake_settings()
    for setting in settings:
        stream, name = setting.decoder.stream, setting.name
        setting.decoder.stream = lambda *text, stream=stream, name=name: names.append(name) or stream(*text)  # type: ignore[method-assign, misc, assignment]
    texts = [SweepCase(prompt, 5, sampling) for prompt in "ab" for sampling in (GREEDY, SAMPLED)]
    shares: list[float] = []
    sweep.measure(settings, texts, 3, shares.append)
    warm, rounds = names[: 2 * 3], [names[i : i + 3] for i in range(6, len(names), 3)]
    assert warm == [setting.name for setting in settings] * 2
    assert len(rounds) == 3 * 4
    assert all(sorted(round_runs) == sorted(rounds[0]) for round_runs in rounds)
    assert {round_runs[0] for round_runs in rounds} == {setting.name for setting in settings}
    assert len({round_runs[0] for round_runs in rounds[::4]}) == 3  # of one text, round by round
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] < 1


def test_setting_applies_its_gamma_on_shared_decoder() -> None:
    shared = FakeDecoder(9, stands=9)
    settings = [*make_fake_settings()[:1], *(Setting(f"γ {g}", f"-g {g}", shared, "pair", g) for g in (1, 3))]
    by_setting = {f.setting: f for f in sweep.measure(settings, [SweepCase("a", 40, GREEDY)], 2).compute_cells()}
    assert {name: f.tokens_per_pass for name, f in by_setting.items()} == {"target alone": 1, "γ 1": 2, "γ 3": 4}


@pytest.mark.parametrize("wrong", [0, 17, 39])
def test_mismatch_error_gives_position_and_case(wrong: int) -> None:
    texts = [SweepCase("Once", 40, Sampling(0.5, seed=7))]
    with pytest.raises(
        sweep.OutputMismatchError, match=rf"γ 4 .* token {wrong + 1} on: prompt 'Once', seed 7, temperature 0\.5, 40"
    ):
        sweep.measure(make_fake_settings(wrong=wrong), texts, 1)


def test_target_that_changes_its_output_raises() -> None:
    settings = make_fake_settings()
    alone = settings[0].decoder

    def stream(*text: Any, write: Any = alone.stream) -> Iterator[Event]:
        alone.wrong = 5 if len(alone.cases) > 1 else None  # type: ignore[attr-defined]
        return write(*text)  # type: ignore[no-any-return]

    alone.stream = stream  # type: ignore[method-assign]
    with pytest.raises(sweep.OutputMismatchError, match="target alone"):
        sweep.measure(settings, [SweepCase("a", 40, GREEDY)], 2)


def test_stopping_keeps_cases_finished_by_all_settings() -> None:
    """At any event."""
    texts, cases = [SweepCase(prompt, 5, GREEDY) for prompt in "abc"], list[int]()
    assert sweep.measure(make_fake_settings(), texts, 1, should_stop=lambda: cases.append(0)).is_complete
    found = []
    for n in range(len(cases)):
        events = iter(range(len(cases)))
        measured = sweep.measure(make_fake_settings(), texts, 1, should_stop=lambda events=events, n=n: next(events, n) >= n)  # type: ignore[misc]
        assert not measured.is_complete
        rounds = [round_runs for rounds in measured.runs.values() for round_runs in rounds]
        assert all(len(round_runs) == 3 and all(run.tokens for run in round_runs.values()) for round_runs in rounds)
        found.append(len(measured.runs))
    assert set(found) == {0, 1, 2}


# Conclusions


def make_result(
    options: str, temperature: float, speed: float, kind: sweep.SettingKind = "pair", n: int | None = None
) -> SettingResult:
    name = options.replace("-g", "γ") or "target alone"
    return SettingResult(
        name, options, kind, temperature, n, 12, speed * 0.8, speed, speed * 1.2, 1000 * speed, 8, 6, 0.75, 3.0, [0.75], 0, 0.0
    )


def totals(table: dict[str, tuple[float, ...]], temperatures: tuple[float, ...] = (0.0, 1.0)) -> list[SettingResult]:
    alone = [make_result("", t, 1.0, "alone") for t in temperatures]
    return alone + [
        make_result(options, t, speed, "lookup" if "lookup" in options else "pair")
        for options, speeds in table.items()
        for t, speed in zip(temperatures, speeds, strict=True)
    ]


SENTENCES = {
    "one for all": (
        {"-g 4": (2.7, 2.1), "-g 5": (2.9, 2.1), "-g 8": (2.5, 1.8)},
        "Best here: -g 5, 2.90 times the target alone (greedy), 2.10 (sampled).",
    ),
    "nearly the best of both": (
        {"-g 4": (2.88, 2.1), "-g 5": (2.9, 1.9)},
        "Best here: -g 4, 2.88 times the target alone (greedy), 2.10 (sampled).",
    ),
    "one each": (
        {"-g 2": (1.5, 2.1), "-g 8": (2.9, 1.2)},
        "Best here: -g 8, 2.90 times the target alone (greedy); -g 2, 2.10 (sampled).",
    ),
    "lookup": (
        {"-d lookup -g 8": (1.5, 1.2), "-g 4": (1.1, 1.0)},
        "Best here: -d lookup -g 8, 1.50 times the target alone (greedy), 1.20 (sampled).",
    ),
    "nothing pays": (
        {"-g 1": (0.8, 0.7), "-g 4": (0.5, 0.4)},
        "Leave out -d here: the target alone is as fast or faster (at best -g 1, 0.80 times the target alone (greedy), 0.70 "
        "(sampled)).",
    ),
    "noise is no gain": (
        {"-g 1": (1.02, 1.01)},
        "Leave out -d here: the target alone is as fast or faster (at best -g 1, 1.02 times the target alone (greedy), 1.01 "
        "(sampled)).",
    ),
    "greedy alone pays": (
        {"-g 1": (1.1, 0.7), "-g 4": (1.4, 0.4)},
        "Best here: -g 4, 1.40 times the target alone (greedy); leave out -d for sampled (at best -g 1, 0.70 (sampled)).",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_conclusion_names_options_and_speedup(name: str) -> None:
    table, sentence = SENTENCES[name]
    assert sweep.format_conclusion(totals(table)) == sentence


def test_several_temperatures_are_named_by_number() -> None:
    sentence = sweep.format_conclusion(totals({"-g 3": (3.0, 2.0, 1.5)}, (0.0, 0.7, 1.3)))
    assert sentence == "Best here: -g 3, 3.00 times the target alone (greedy), 2.00 (temperature 0.7), 1.50 (temperature 1.3)."
    assert sweep.format_conclusion([]) == sweep.format_conclusion([make_result("", 0, 1, "alone")]) == "Nothing was measured."


# Reports


def report(
    temperatures: tuple[float, ...] = (0.0, 1.0), speed: float = 2.0, title: str = "big + little"
) -> sweep_chart.SweepReport:
    table = {f"-g {g}": (speed,) * len(temperatures) for g in (1, 8)}
    of = totals(table, temperatures)
    cells = [dataclasses.replace(f, max_tokens=n, acceptance_by_position=[0.9] * 20) for n in (50, 200) for f in of]
    of += [make_result("draft alone", t, 30.0, "draft") for t in temperatures]
    return sweep_chart.SweepReport(title, cells, of, sweep.format_conclusion(of), ["a note"], True)


def test_experts_read_are_reported_by_setting() -> None:
    assert report().format_experts() == ""
    one, *_ = (dataclasses.replace(f, experts_alone=8, experts_per_token=5.25) for f in report().totals)
    of = dataclasses.replace(report(), totals=[one])
    assert of.format_experts() == "Experts that a layer reads for a token: 5.2 (target alone, greedy)."
    out = io.StringIO()
    sweep_chart.print_report(of, Console(file=out, width=80))
    assert of.format_experts() in " ".join(out.getvalue().split())


@pytest.mark.parametrize("width", [40, 80, 120])
def test_table_and_bars_fit_console_and_are_plain_without_terminal(width: int) -> None:
    out = io.StringIO()
    sweep_chart.print_report(report(), Console(file=out, width=width))
    text = out.getvalue()
    assert "\x1b" not in text
    assert max(map(cell_len, text.splitlines())) <= width
    assert ("by position" in text) == (width >= 80)
    assert report().conclusion.split()[0] in text
    for word in ("greedy, 50 tokens", "sampled, 200 tokens", "big + little", "a note", "30.0"):
        assert word in text
    bars = [line for line in text.splitlines() if "█" in line]
    assert len(bars) == 2 * 3  # of the target alone and two settings; the draft alone would dwarf them
    assert bars[2].count("█") == pytest.approx(2 * bars[0].count("█"), abs=1)


def test_bars_and_table_work_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    sweep_chart.print_report(report(), Console(file=out, width=80, force_terminal=True))
    assert not {int(n) for codes in re.findall(r"\x1b\[([0-9;]*)m", out.getvalue()) for n in codes.split(";")} - {0, 1, 2}


def test_bar_length_is_proportional_to_share() -> None:
    assert [sweep_chart.make_bar(share, 4) for share in (0, 1 / 32, 0.5, 0.53, 1)] == ["", "▏", "██", "██▏", "████"]
    assert sweep_chart.make_bar(0.5, 4, is_utf=False) == "##"


def test_nothing_measured_is_reported_in_one_line() -> None:
    out = io.StringIO()
    empty = sweep_chart.SweepReport.from_runs(SweepRuns(make_fake_settings()), "big", [])
    sweep_chart.print_report(empty, Console(file=out, width=80))
    assert out.getvalue().splitlines() == ["interrupted: results of 0 texts", "Nothing was measured."]
    assert json.loads(sweep_chart.to_json(empty))["cells"] == []


@pytest.mark.parametrize("title", ["big + little", "<b> & \x1b[31m \ud800" + "x" * 200])
def test_svg_shows_table_and_bars_whatever_the_title_is(tmp_path: Path, title: str) -> None:
    path = tmp_path / "report.svg"
    assert not sweep_chart.write_svg(report(title=title), str(path))
    text = "".join(ElementTree.parse(path).getroot().itertext()).replace("\xa0", " ")
    assert title[:5] in text
    for word in ("greedy, 50 tokens", "by position", "█", "30.0"):
        assert word in text


def test_each_table_block_has_its_header() -> None:
    out = io.StringIO()
    sweep_chart.print_report(report(), Console(file=out, width=80))
    rows = out.getvalue().splitlines()
    titles = [row for row in rows if " tokens " in row and "tok/s" in row]
    assert [row.split(" tokens")[0] for row in titles] == ["greedy, 50", "sampled, 50", "greedy, 200", "sampled, 200"]
    for title in titles:
        below = rows[rows.index(title) + 1]
        assert title.index("mean") + len("mean") == below.index("1.00") + len("1.00")
        assert below[title.index("by position") :].rstrip() == "90 90 90 90 90 90 …"


def test_json_has_row_for_every_result() -> None:
    result = json.loads(sweep_chart.to_json(report(), model="big"))
    assert result["cells"] == [dataclasses.asdict(f) for f in report().cells]
    assert (result["model"], result["interrupted"]) == ("big", False)


# Settings and cases


@pytest.fixture(scope="module")
def decoder(pair: Pair) -> SpeculativeDecoder:
    return SpeculativeDecoder(pair.target, pair.draft, pair.tokenizer, n_threads=1)


def test_settings_of_pair_and_their_outputs(decoder: SpeculativeDecoder) -> None:
    settings, notes = sweep.make_settings(decoder, [1, 6])
    assert [(s.kind, s.options) for s in settings] == [
        ("alone", ""), ("draft", ""), ("lookup", "-d lookup -g 6"), ("pair", "-g 1"), ("pair", "-g 6"),
    ]  # fmt: skip
    assert notes == []
    texts = [SweepCase("One day", 30, sampling) for sampling in (GREEDY, SAMPLED)]
    cells = sweep.measure(settings, texts, 1).compute_cells()
    assert [f.n_drafted > 0 for f in cells if f.kind != "lookup"] == [False, False, True, True] * 2
    assert {f.setting: len(f.acceptance_by_position) for f in cells if f.kind == "pair"} == {"γ 1": 1, "γ 6": 6}


def test_lookup_get_all_gammas_without_draft(pair: Pair) -> None:
    decoder = SpeculativeDecoder(pair.target, None, pair.tokenizer, n_threads=1)
    settings, _ = sweep.make_settings(decoder, [1, 6])
    assert [s.options for s in settings] == ["", "-d lookup -g 1", "-d lookup -g 6"]


def test_draft_with_fewer_positions_is_not_measured_alone(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder.draft, "n_positions", 64)
    settings, notes = sweep.make_settings(decoder, [2])
    assert [s.kind for s in settings] == ["alone", "lookup", "pair"]
    assert notes == ["the draft alone is left out: it has room for 64 tokens, the target for 128"]


def test_auto_gamma_is_measured_with_the_others(decoder: SpeculativeDecoder) -> None:
    pair = SpeculativeDecoder(decoder.target, decoder.draft, decoder.tokenizer, gamma=2)
    assert [s.options for s in sweep.make_settings(pair, [1, "auto"])[0]] == [
        *("", "", "-d lookup -g auto", "-g 1", "-g auto", "-g auto --tree on", "-g auto --stage lookup")
    ]
    assert pair.gamma == 2


def test_length_beyond_context_is_left_out(decoder: SpeculativeDecoder) -> None:
    """There are 128 positions; the last token needs none."""
    size = len(decoder.encode("One day"))
    prompts = ["One day", "One day there was a cat"]
    texts, notes = sweep.make_cases(decoder, prompts, [10, 129 - size, 500], [GREEDY])
    assert [(text.prompt, text.max_tokens) for text in texts] == [(prompts[0], 10), (prompts[0], 129 - size), (prompts[1], 10)]
    assert [re.findall(r"after (\w+) of", note) for note in notes] == [["1"], ["none"]]
    with pytest.raises(ValueError, match="the context of 128 has room for 500 tokens after none of the 2 prompts"):
        sweep.make_cases(decoder, prompts, [500], [GREEDY])


def test_greedy_sampling_has_one_seed() -> None:
    assert [(s.temperature, s.seed) for s in SweepRequest(seeds=2).samplings] == [(0.0, 1), (1.0, 1), (1.0, 2)]


# The command


@pytest.fixture
def run_sweep(run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs `specdec sweep` in tmp_path with the pair, a file of prompts and further arguments."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("One day\n\n  a cat  \nOne day\n")
    return lambda *more: run("sweep", *make_arguments(pair), *more)


def make_arguments(pair: Pair) -> list[object]:
    models = ["-m", pair.target, "-d", pair.draft, "-z", pair.tokenizer, "-j", 1]
    return [*models, "--prompts", "prompts.txt", "--max-tokens", "5,20", "-g", "1,4", "--rounds", 1]


def test_command_prints_results_and_draws_chart(run_sweep: Run) -> None:
    result = from_json(run_sweep("--json", "--svg", "chart.svg"))
    assert result["prompts"] == ["One day", "a cat"]
    assert (result["kv"], result["arithmetic"]) == ("f32", specdec.__arithmetic__)
    assert {(f["options"], f["temperature"], f["max_tokens"], f["n_texts"]) for f in result["cells"]} == {
        (options, t, n, 2) for options in ("", "-d lookup -g 4", "-g 1", "-g 4") for t in (0, 1) for n in (5, 20)
    }
    assert result["conclusion"].startswith(("Best here", "Leave out"))
    assert "γ&#160;4" in Path("chart.svg").read_text(encoding="utf-8")
    ElementTree.parse("chart.svg")


def test_differing_outputs_exit_with_code_1(run_sweep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that accepts everything: 7 follows each proposal."""
    monkeypatch.setattr(
        "specdec.verification.CoupledVerifier.verify",
        lambda _, logits, draft, position: ([*draft.tokens, 7][: len(logits)], len(draft.tokens)),
    )
    code, out, err = run_sweep()
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert all(word in err for word in ("differs from the target's own", "'One day'", "seed 1", "temperature 0"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--max-tokens", "5,x"], "--max-tokens"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--max-tokens", ","], "--max-tokens"),
        (["-g", "64"], "--gammas"),
        (["--temperatures", "-1"], "--temperatures"),
        (["--temperatures", "nan"], "--temperatures"),
        (["--max-tokens", "5000"], "the context of 128 has room for 5000 tokens"),
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--prompts", "."], "cannot read .: "),
        (["--svg", "nowhere/chart.svg"], "nowhere"),
        (["--svg", "."], "--svg"),
        (["-m", "nowhere.bin"], "nowhere.bin"),
        (["--rounds", "-1"], "--rounds"),
        (["--quantize", "all"], "--quantize"),
        (["-j", "9999"], "threads"),
        (["-p", "2"], "--top-p"),
        (["word"], "word"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected_before_running(
    run_sweep: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[object], word: str
) -> None:
    monkeypatch.setattr(sweep, "measure", lambda *_: pytest.fail("it ran"))
    assert_rejected(run_sweep(*arguments), word)
    assert sorted(path.name for path in Path().iterdir()) == ["models", "prompts.txt"]


def test_a_draft_is_needed(run: Run, pair: Pair) -> None:
    assert_rejected(run("sweep", "-m", pair.target, "-d", "none"), "sweep needs a draft; leave out -d")


@pytest.mark.parametrize("text", [b"", b"\n \n", b"\xff\xfe"])
def test_prompt_file_without_prompts_is_rejected(run_sweep: Run, text: bytes) -> None:
    Path("prompts.txt").write_bytes(text)
    assert_rejected(run_sweep(), "prompts.txt")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk here is always full")
def test_results_are_printed_if_chart_cannot_be_written(run_sweep: Run) -> None:
    code, out, err = run_sweep("--json", "--svg", "/dev/full")
    assert (code, err.count("\n")) == (2, 1) and json.loads(out)["cells"] and "/dev/full" in err


def test_ctrl_c_prints_results_so_far(run_sweep: Run, pair: Pair) -> None:
    with ShellJob(["sweep", *make_arguments(pair), "--rounds", 400], 90, 60) as job:
        job.read_until(word="s left")  # from a hundredth on: four rounds are done
        job.type_keys(b"\x03")
        assert job.read_report() == "130"
        screen = job.make_screen()
    for word in ("greedy, 20 tokens", "█", "interrupted"):
        assert word in screen.get_text()
    assert "Best here" in screen.get_text() or "Leave out -d here" in screen.get_text()
    assert not any(word in screen.get_text() for word in ("measuring", "loading", "^C"))
    assert not screen.was_cursor_hidden
