"""Warm-up: everything that a sequence needs is compiled and measured before its first token, also after an interruption."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec import SpeculativeDecoder
from specdec.draft import tree
from specdec.engine import autotuner, warm_up
from specdec.engine.scheduler import Scheduler
from tests.conftest import Pair
from tests.tools.checkpoint_files import ROOT
from tests.tools.random_heads import head_folder

# A process per case, forked before anything is compiled or loaded. With the times set here all drafts are profitable.
LATE = """
import json, os, sys
from specdec import Proposal, Sampling, SpeculativeDecoder
from specdec.engine import autotuner
from specdec.runtime import code_cache as cache
from specdec.draft.draft_length import CostCurve, CostModel

target, draft, endless, head = sys.argv[1:]
loaded = []
load = cache.MachineCodeCache.load_overload
cache.MachineCodeCache.load_overload = lambda code, *what: [loaded.append(code._name), load(code, *what)][1]
autotuner.measure = lambda *_: CostCurve({1: 1.0, 64: 1.1}, 0.01)
autotuner.CalibrationFile.read = lambda *_: None
CostModel.end_pass = lambda *_: None
SAMPLINGS = Sampling(0), Sampling(1, 0, 0, 1), Sampling(1, 5, 0, 2), Sampling(0.8, 0, 0.5, 3)
PROMPT = "abc abd abc abd abc ab"

def generate(decoder, prompt=PROMPT, n=30, stream=None):
    late = []
    for sampling in SAMPLINGS:
        events = (stream or decoder.stream)(prompt, n, sampling)
        events.__next__()
        before = len(loaded)
        proposals = [event for event in events if isinstance(event, Proposal)]
        late += loaded[before:]
        drafted.extend(proposals)
    return late

def case(*models, prompt=PROMPT, n=30, then=(), **settings):
    def run():
        decoder = SpeculativeDecoder(*models, n_threads=settings.pop("n_threads", 1), **settings)
        decoder.warm_up()
        late = generate(decoder, prompt, n)
        for name, value in then:
            owner = decoder.target if name == "n_threads" else decoder
            setattr(owner, name, value)
            late += generate(decoder, prompt, n)
        return late
    return run

def not_warmed_up():
    decoder = SpeculativeDecoder(target, draft, verify="rejection", tree="on", n_threads=1)
    return generate(decoder)

def chat():
    decoder = SpeculativeDecoder(endless, draft, n_threads=1, template="llama2")
    return generate(decoder, [{"role": "user", "content": "Hi"}], 30, decoder.chat)

TWO = {"n_threads": 2} if (os.cpu_count() or 1) > 1 else {}
CASES = {
    "plain": case(target, None),
    "default": case(target, draft, n_threads=None),
    "rejection": case(target, draft, verify="rejection"),
    "block": case(target, draft, verify="block"),
    "lookup": case(target, "lookup", tree="off"),
    "lookup with trees": case(target, "lookup"),
    "lookup, rejection": case(target, "lookup", verify="rejection"),
    "lookup, block": case(target, "lookup", verify="block"),
    "self": case(target, "self"),
    "self, int4": case(target, "self", quantize="draft=int4"),
    "int8 and int4": case(target, draft, quantize="target=int8,draft=int4"),
    "stage": case(target, draft, stage="lookup"),
    "model as stage": case(target, "self", stage=draft),
    "trees": case(target, draft, tree="on"),
    "tree auto": case(target, draft, tree="auto"),
    "trees, gamma 4": case(target, draft, tree="on", gamma=4),
    "trees, gamma 4, f16": case(target, draft, tree="on", gamma=4, kv="f16"),
    "trees, rejection": case(target, draft, tree="on", verify="rejection"),
    "trees, never warmed up": not_warmed_up,
    "verify changes": case(target, draft, then=[("verify", "rejection"), ("verify", "block"), ("verify", "coupled")]),
    "verify of lookup changes": case(target, "lookup", tree="off", then=[("verify", "block"), ("verify", "rejection")]),
    "gamma of trees changes": case(target, draft, tree="on", gamma=3, then=[("gamma", 1), ("gamma", "auto"), ("gamma", 63)]),
    "trees later": case(target, draft, then=[("tree", "on"), ("gamma", 3), ("verify", "rejection"), ("tree", "off")]),
    "threads change": case(target, draft, **TWO, then=[("n_threads", 1)]),
    "f16": case(target, draft, kv="f16"),
    "long prompt": case(endless, draft, prompt=[1, 300 - 1, 260] * 80, n=60),
    "head": case(target, head, n_threads=None),
    "head, rejection": case(target, head, verify="rejection", quantize="none"),
    "head, gamma 4": case(target, head, gamma=4, quantize="draft=int4", prompt="a"),
    "chat": chat,
}
for name, run in CASES.items():
    sys.stdout.flush()
    if not os.fork():
        drafted = []
        late = run()
        n_trees = sum(event.tree is not None for event in drafted)
        result = {"late": late, "loaded": loaded, "modules": [*sys.modules], "n_drafted": len(drafted), "n_trees": n_trees}
        print(json.dumps([name, result]), flush=True)
        os._exit(0)
    os.wait()
"""
OF_TREES = {"kernels.build_tree_paths", "kernels.move_kv_slots", "sampling.accept_or_reject"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that begin where another one is")
def test_nothing_is_compiled_or_loaded_after_the_first_event(pair: Pair, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LATE, pair.target, pair.draft, pair.endless, head_folder(tmp_path / "head", pair)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    results = dict(json.loads(line) for line in process.stdout.splitlines())
    assert len(results) == 30, process.stderr
    assert {name: case["late"] for name, case in results.items() if case["late"]} == {}
    for name, case in results.items():  # each did its task, and no more
        assert (case["n_drafted"] > 0) == (name != "plain"), name
        # trees of looked-up drafts depend on measured costs
        assert name == "lookup with trees" or (case["n_trees"] > 0) == ("trees" in name), name
        assert bool(OF_TREES.intersection(case["loaded"])) == ("trees" in name), name
        assert ("specdec.draft.tree" in case["modules"]) == ("trees" in name), name
        assert ("specdec.draft.staged" in case["modules"]) == ("stage" in name), name


PARTS = {
    "stream": Scheduler, "warm_up_verifier": warm_up, "stop_processes": warm_up, "choose_threads": autotuner,
    "measure": autotuner,
    "warm_up_trees": tree,
}  # fmt: skip


def test_costs_are_measured_after_all_compilation(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times measured next to a compiler would make drafts look unprofitable."""
    decoder, calls = SpeculativeDecoder(pair.target, pair.draft, n_threads=1), list[str]()
    for name, owner in PARTS.items():
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, name=name, original=original: [calls.append(name), original(*args)][1])
    decoder.warm_up()
    assert calls == ["stream", "warm_up_verifier", "stop_processes", "measure"]


@pytest.mark.parametrize("where", PARTS)
def test_an_interrupted_warm_up_is_completed_later(pair: Pair, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    decoder = SpeculativeDecoder(pair.target, pair.draft, tree="on", n_threads=1)
    decoder.autotuner.thread_choices = [2, 1] if where == "choose_threads" else [2]  # the number of threads is free
    original, calls = getattr(PARTS[where], where), list[bool]()

    def interrupted(*args: object) -> object:
        calls.append(bool(calls))
        if not calls[-1]:
            raise KeyboardInterrupt
        return original(*args) if where != "choose_threads" else None

    monkeypatch.setattr(PARTS[where], where, interrupted)
    monkeypatch.setattr(decoder.autotuner, "_set_n_threads", lambda n_threads: None)  # it has a thread tuner
    with pytest.raises(KeyboardInterrupt):
        decoder.warm_up()
    text = decoder.generate("ab", 30, temperature=0).text
    n_calls = len(calls)
    decoder.warm_up()
    assert calls[:2] == [False, True] and len(calls) == n_calls
    assert decoder.autotuner.curve
    assert text == SpeculativeDecoder(pair.target, None).generate("ab", 30, temperature=0).text


def test_a_second_warm_up_measures_nothing(pair: Pair) -> None:
    decoder = SpeculativeDecoder(pair.target, pair.draft, n_threads=1)
    decoder.warm_up()
    curve = decoder.autotuner.curve
    decoder.verify, decoder.gamma = "block", 3
    decoder.warm_up()
    assert decoder.autotuner.curve is curve
