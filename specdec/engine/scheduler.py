"""Texts that are wanted, all that run in passes that they share, on a thread that owns the target. Knows no HTTP.

A pass takes of each running text its last token and what is proposed behind it; what is left of its room goes to prompts, a piece
at a time. Logits at a position depend on that text's tokens alone, so each text is the one that it would be alone.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as GenericSequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from specdec.decoder import SpeculativeDecoder
from specdec.draft.policy import CostModel
from specdec.engine.auxiliary_tasks import Beside, Steps
from specdec.engine.decoding import Event, Job, Prefill, Prompt, Step, Text, TokenLogprob, run
from specdec.engine.kv_slots import LEAST_SHARED, Seat, Seats
from specdec.engine.metrics import Figures
from specdec.kernels import MAX_TOKENS
from specdec.model.transformer import Transformer
from specdec.runtime.simd import Float32
from specdec.server.validation import Refused
from specdec.text.detokenizer import Wording
from specdec.validation import known, n_common
from specdec.verification import Draft

INTERRUPTED = "interrupted"
IDLE_SEATS = 4  # for each slot, of talks that may go on
PIECE_SECONDS = 0.1  # that a piece of a prompt may add to a pass which others wait for
AHEAD_SECONDS = 1.0  # of passes, that a client may have had more than another one before its prompts wait for that
LEAST_PIECE = 8  # tokens of such a piece
MORE_CLIENTS = 64  # that may wait where all places are taken, by clients of which none asks for anything else


class Client(NamedTuple):
    """Who asks. name: by which clients take turns; owner: by which they share caches."""

    name: str = ""
    owner: str = ""


class Full(Refused):
    """As many texts wait as may."""

    def __init__(self) -> None:
        super().__init__("as many requests wait as may; ask again later", None, "queue_full", 429)


class Closed(Refused):
    """No more texts are taken."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down", None, "shutting_down", 503)


Hear = Callable[[Event | Prefill | Exception], None]


class Ticket:
    """A text that was asked for."""

    def __init__(self, job: Job, hear: Hear, wake: Callable[[], None], who: Client) -> None:
        self.job, self.hear, self.who, self.asked = job, hear, who, time.perf_counter()
        self.is_cancelled = False
        self._wake = wake

    def cancel(self) -> None:
        """Its place is free within a step, and no more of it is heard, but for what is being told."""
        self.is_cancelled = True
        self._wake()


class Writing:
    """A text that runs: where it sits, and how far it is.

    draft: what it wants run next, None where nobody has asked it yet. leader: another one, which is reading what both prompts
    begin with: that goes over when it is read.
    """

    def __init__(self, ticket: Ticket, text: Text, seat: Seat, wording: Wording) -> None:
        self.ticket, self.text, self.seat, self.wording = ticket, text, seat, wording
        self.model: Transformer = seat.team.target
        self.n_cached, self.began = self.n_read(), time.perf_counter()
        self.draft: Draft | None = None
        self.leader: Writing | None = None
        self.n_led = 0  # tokens that both begin with
        self.has_begun = self.has_spoken = self.is_over = False

    @property
    def client(self) -> str:
        """The client that asked for it."""
        return self.ticket.who.name

    @property
    def unread(self) -> int:
        """Tokens that have to run before the last one of its text can."""
        return self.model.unread(self.text.tokens)

    def piece(self, n: int) -> list[int]:
        """What the target has run of the text when so many of these have run, too."""
        return self.text.tokens[: len(self.text.tokens) - 1 - self.unread + n]

    def n_read(self) -> int:
        """How many of its prompt's tokens have run."""
        return self.seat.n_cached(self.ticket.job.prompt)

    def follows(self, running: Collection["Writing"]) -> bool:
        """Whether an earlier text is going to read more of this prompt than there is: the one that reads most of it leads."""
        prompt, is_long = self.ticket.job.prompt, self.model.config.is_long
        best = self.n_cached + LEAST_SHARED - 1, len(prompt)
        for other in running:
            theirs = other.ticket.job.prompt
            n, n_read = n_common(theirs[:-1], prompt, len(prompt) - 1), other.n_read()
            is_alike = other.seat.owner == self.seat.owner and is_long(len(theirs)) == is_long(len(prompt))
            if is_alike and n_read < n and not other.has_begun and other.began < self.began and (n, n_read) > best:
                self.leader, self.n_led, best = other, n, (n, n_read)
        return self.leader is not None

    def waits(self, running: Collection["Writing"]) -> bool:
        """For its leader to have read what both begin with; that goes over then, or as much as there is if nobody reads on."""
        if not (leader := self.leader):
            return False
        if leader in running and not leader.has_begun and leader.n_read() < self.n_led:
            return True
        self.leader = None
        self.seat.take_over(leader.seat, self.ticket.job.prompt)
        self.n_cached = self.n_read()
        return self.follows(running)

    def left(self, running: Collection["Writing"]) -> int:
        """How many tokens have to run until it, or one that it leads, gets on."""
        led = (each.n_led - self.n_read() for each in running if each.leader is self)
        return min([self.unread, *led])

    def reads_drafts(self) -> bool:
        """Let what drafts read a piece of the prompt, that of one pass; whether there was something to read."""
        for model in self.seat.team.models.values():
            tokens = known(self.ticket.job.prompt, model.config.vocab_size)
            if model is not self.model and len(tokens) <= model.n_positions and (left := model.unread(tokens)):
                model.forward(tokens[: len(tokens) - 1 - max(left - MAX_TOKENS, 0)], 0, len(tokens))
                return True
        return False

    @property
    def has_tree(self) -> bool:
        """Whether it wants a pass of its own."""
        return self.draft is not None and self.draft.parents is not None


class Engine:
    """Writes the texts of jobs, n_slots in a pass; n_queue: how many wait beside them; cache_bytes: what all caches may take.

    Conversations that go on find their cache. A text that alone takes more than cache_bytes runs alone. Clients share alike: the
    one with fewest texts running is next, one with fewer than its share of the slots need not wait for a slot, and passes take
    clients by turns. Prompts wait of a client that has had more time than another one that runs; other work has half of the time.
    """

    def __init__(self, decoder: SpeculativeDecoder, n_slots: int, n_queue: int, cache_bytes: int) -> None:
        self._decoder, self._n_slots, self._n_queue = decoder, n_slots, n_queue
        self._waiting, self._running = deque[Ticket](), list[Writing]()  # of those that run the last has run last
        self._seats = Seats(decoder.team.seat, cache_bytes, IDLE_SEATS * n_slots)
        self._beside = Beside()
        self._changed = threading.Condition()
        self._is_closed = self._is_cut = False
        self._is_prompts_turn = False  # for want of room in the last pass
        self._owed = 0.0  # seconds that passes have, before other work goes on
        self._used = dict[str, float]()  # seconds of passes that clients have had, of those that run and of who was ahead of them
        self._costs: CostModel  # of passes
        self._ended = 0.0  # when the last pass ended, if there has been work since
        self._figures = Figures()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def figures(self) -> Figures:
        """What is counted, and how many texts run and wait now."""
        self._figures.running, self._figures.queued = len(self._running), len(self._waiting)
        return self._figures

    def submit(self, jobs: GenericSequence[Job], hears: GenericSequence[Hear], who: Client) -> list[Ticket]:
        """All texts of a request, or none. `hears` are called on the engine's thread with the text's events: the last one is a
        step that has a reason to stop, or an error. Raises Full, Closed, and what `SpeculativeDecoder.stream` raises.
        """
        tickets = [Ticket(self._decoder.team.checked(job), hear, self._wake, who) for job, hear in zip(jobs, hears, strict=True)]
        with self._changed:
            if self._is_closed:
                raise Closed()
            there = [*self._waiting, *(writing.ticket for writing in self._running)]
            is_new = all(ticket.who.name != who.name for ticket in there)
            if len(there) + len(tickets) > self._n_slots + self._n_queue + MORE_CLIENTS * (is_new and bool(there)):
                raise Full()
            self._waiting.extend(tickets)
            self._changed.notify()
        return tickets

    def beside(self, work: GenericSequence[Callable[[Transformer], Steps]], who: Client) -> "list[Future[Any]]":
        """Other work with the target, a step at a time between passes; see `Beside`. Raises Full and Closed."""
        with self._changed:
            if self._is_closed:
                raise Closed()
            if not (futures := self._beside.add([partial(each, self._decoder.target) for each in work], who.name)):
                raise Full()
            self._changed.notify()
        return futures

    def limit(self, cache_bytes: int) -> None:
        """Caches may take so much from now on, of texts that begin."""
        self._seats.most_bytes = cache_bytes

    def close(self, grace: float) -> None:
        """No new texts; those that were asked for end, or are cut after so many seconds."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(grace)
        self._is_cut = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _work(self) -> None:
        trouble: Exception | None = None
        try:
            self._decoder.warm_up()
            self._costs = self._decoder.tuning.costs_of_batches()
        except Exception as error:
            trouble = error
        while self._waits_for_work():
            if trouble:
                for ticket in [*self._waiting]:
                    self._fails(self._taken(ticket), trouble)
                self._beside.fail(trouble)
                continue
            if self._is_cut:
                self._beside.fail(Closed())
            begin = time.perf_counter()
            if self._beside and (self._owed <= 0 or not self._running):
                self._beside.step()
                self._owed = 2 * (time.perf_counter() - begin)
            self._sweep()
            self._admit()
            try:
                self._pass()
            except Exception as error:  # nobody waits for what never comes
                for writing in [*self._running]:
                    self._breaks(writing, error)
            self._owed -= time.perf_counter() - begin

    def _waits_for_work(self) -> bool:
        """False: there will be none."""
        with self._changed:
            while not (self._waiting or self._running or self._beside or self._is_closed):
                self._ended = 0.0
                self._changed.wait()
            return bool(self._waiting or self._running or self._beside)

    def _sweep(self) -> None:
        """Those that were cancelled leave; those that are cut off end."""
        for writing in [each for each in self._running if each.ticket.is_cancelled or self._is_cut]:
            if not writing.ticket.is_cancelled:
                self._cut(writing.ticket, writing.wording, writing.has_begun)
            self._leaves(writing)
        with self._changed:
            gone = [ticket for ticket in self._waiting if ticket.is_cancelled or self._is_cut]
            for ticket in gone:
                self._waiting.remove(ticket)
        for ticket in gone:
            if not ticket.is_cancelled:
                self._cut(ticket, self._decoder.team.wording(ticket.job), False)
            self._is_done(ticket.is_cancelled)

    def _cut(self, ticket: Ticket, wording: Wording, has_begun: bool) -> None:
        """The last word of a text that nobody lets end."""
        if not has_begun:
            self._tell(ticket, wording.of(Prompt(ticket.job.prompt, 0.0)))
        self._tell(ticket, wording.of(Step([], [], 0, 0.0, 0.0, INTERRUPTED)))

    def _leaves(self, writing: Writing) -> None:
        self._running.remove(writing)
        writing.seat.keep(writing.text.tokens)
        self._seats.give(writing.seat, len(writing.text.tokens))
        self._is_done(writing.ticket.is_cancelled and not writing.is_over)

    def _is_done(self, is_cancelled: bool) -> None:
        """One that is counted, as cancelled or done."""
        self._figures.cancelled += is_cancelled
        self._figures.done += not is_cancelled

    def _admit(self) -> None:
        """Those that wait, by turns, as long as there is a slot, and room for their caches."""
        while ticket := self._first():
            job, seat = ticket.job, None
            try:
                n_tokens = min(len(job.prompt) + job.max_tokens, self._decoder.target.n_positions)
                seat = self._seats.take(job.prompt, n_tokens, ticket.who.owner)
                if not seat:
                    return
                writing = self._writing(ticket, seat)
                writing.follows(self._running)
            except Exception as error:
                if seat:
                    self._seats.drop(seat)
                self._fails(self._taken(ticket), error)
                continue
            self._taken(ticket)
            self._enters(ticket.who.name)
            self._running.append(writing)

    def _enters(self, client: str) -> None:
        """Begin to count a client's seconds: from those of the client that runs and has had least, or its own where it had more.

        After the virtual token counter of "Fairness in Serving Large Language Models" (arXiv 2401.00588).
        """
        there = {writing.client for writing in self._running}
        least = min([self._used[each] for each in there], default=0.0)
        used = self._used if there else dict[str, float]()
        self._used = {each: seconds for each, seconds in used.items() if each in there or seconds > least}
        self._used.setdefault(client, least)

    def _first(self) -> Ticket | None:
        """Return the first of the client with fewest texts running, if there is a slot or it has less than its share of them."""
        running = Counter(writing.client for writing in self._running)
        with self._changed:
            first = min(self._waiting, key=lambda ticket: running[ticket.who.name], default=None)
            n_clients = len({ticket.who.name for ticket in self._waiting} | running.keys())
        if not first:
            return None
        has_less = running[first.who.name] < max(self._n_slots // n_clients, 1)
        return first if len(self._running) < self._n_slots * (2 if has_less else 1) else None

    def _taken(self, ticket: Ticket) -> Ticket:
        """One of those that wait, which waits no more."""
        with self._changed:
            self._waiting.remove(ticket)
        return ticket

    def _writing(self, ticket: Ticket, seat: Seat) -> Writing:
        decoder, job = self._decoder, ticket.job
        text = decoder.text(seat.team, job, self._costs)
        if job.top_logprobs is not None:
            text.logprobs_of = partial(logprobs_of, n_top=job.top_logprobs, n_ids=decoder.n_ids)
        return Writing(ticket, text, seat, decoder.team.wording(job))

    def _pass(self) -> None:
        """Let all texts that may go on do so, and prompts with what is left of the pass."""
        n_threads = self._decoder.target.n_threads
        reading, ready = list[Writing](), list[Writing]()  # at most as many as there are slots
        for writing in self._by_turns():
            for model in writing.seat.team.models.values():
                model.n_threads = n_threads
            if len(reading) + len(ready) == self._n_slots:
                break
            if self._waits(writing):
                continue
            if writing.unread:
                reading.append(writing)
            elif writing.has_begun or self._begins(writing):
                ready.append(writing)
        ready.sort(key=lambda writing: writing.draft is None)  # what did not fit the last pass is the first of this
        stepping = [] if self._is_prompts_turn else self._stepping(ready, MAX_TOKENS - (LEAST_PIECE if reading else 0))
        most = min([self._used[writing.client] for writing in (*stepping, *reading)], default=0.0) + AHEAD_SECONDS
        reading = [writing for writing in reading if self._used[writing.client] <= most]
        if stepping and stepping[0].has_tree:
            self._is_prompts_turn = bool(reading)
            self._alone(stepping[0])
            self._have_run(stepping[:1])
            return
        pieces = self._pieces(reading, stepping)
        self._is_prompts_turn = bool(reading) and not pieces
        if stepping or pieces:
            self._run(stepping, pieces)
            self._have_run([*stepping, *(writing for writing, _ in pieces)])

    def _have_run(self, those: Collection[Writing]) -> None:
        """Move those that go on behind the others, whose turn is next."""
        # another list, since other threads look at this one
        self._running = sorted(self._running, key=lambda writing: writing in those)

    def _by_turns(self) -> list[Writing]:
        """Return the texts that run, one of each client, then a second of each; of a client the one that has run last is last."""
        n_before, ranked = Counter[str](), list[tuple[int, Writing]]()
        for writing in self._running:
            ranked.append((n_before[writing.client], writing))
            n_before[writing.client] += 1
        return [writing for _, writing in sorted(ranked, key=lambda each: each[0])]

    def _waits(self, writing: Writing) -> bool:
        """Whether another text reads for it, too."""
        with self._blaming(writing):
            return writing.waits(self._running)
        return True

    def _begins(self, writing: Writing) -> bool:
        """Its prompt has run; whether it goes on."""
        figures, job, text = self._figures, writing.ticket.job, writing.text
        with self._blaming(writing):
            if text.drafter:
                if writing.reads_drafts():
                    return False
                text.drafter.get_ready(job.prompt)
            writing.has_begun = True
        if not writing.has_begun:
            return False
        writing.seat.keep(job.prompt)
        figures.prompt_tokens += len(job.prompt)
        figures.cached_tokens += writing.n_cached
        self._tell(writing.ticket, writing.wording.of(Prompt(job.prompt, time.perf_counter() - writing.began)))
        if text.has_ended:
            self._ends(writing, Step([], [], 0, 0.0, 0.0, "max_tokens"))
        return not text.has_ended

    def _stepping(self, ready: list[Writing], most: int) -> list[Writing]:
        """Those of the texts whose last tokens and proposals fit so many tokens; what does not fit goes first in the next
        pass."""
        self._costs.begin_pass(len(ready), most)
        stepping, used = list[Writing](), 0
        for writing in ready:
            if writing.draft is None:
                with self._blaming(writing):
                    writing.draft = writing.text.wants()
                if writing.draft is None:
                    continue
            n = 1 + len(writing.draft.tokens)
            if used and (used + n > most or writing.has_tree):
                continue
            stepping.append(writing)
            used += n
            self._costs.add_tokens(n - 1)
            if writing.has_tree:
                break
        return stepping

    def _pieces(self, reading: list[Writing], stepping: list[Writing]) -> list[tuple[Writing, int]]:
        """Return how many tokens of each prompt come along: so many that others do not wait for long.

        The one that has least left goes first, or that leads one that has; but the one that has waited longest always gets on.
        """
        cost, used = self._costs.pass_cost, sum(1 + len(writing.draft.tokens) for writing in stepping if writing.draft)
        room = MAX_TOKENS - used
        if stepping:
            while room > LEAST_PIECE and cost(used + room) - cost(used) > PIECE_SECONDS:
                room -= 1
        oldest = min(reading, key=lambda writing: writing.began, default=None)
        pieces = list[tuple[Writing, int]]()
        for writing in sorted(reading, key=lambda each: each.left(self._running)):
            kept = LEAST_PIECE if oldest not in (None, writing, *(each for each, _ in pieces)) else 0
            n = min(writing.model.n_to_stop(writing.text.tokens), room - kept)
            if n > 0:
                pieces.append((writing, n))
                room -= n
        return pieces

    def _run(self, stepping: list[Writing], pieces: list[tuple[Writing, int]]) -> None:
        """A pass, and what becomes of those whose turn it was."""
        begin = time.perf_counter()
        jobs = [(writing.model, writing.piece(n), 0, len(writing.text.tokens)) for writing, n in pieces]
        for writing in stepping:
            proposed = writing.draft.tokens if writing.draft else []
            jobs.append((writing.model, writing.text.tokens + proposed, len(proposed) + 1, 0))
        self._figures.passes += 1
        with self._decoder.target.lock:
            try:
                rows = Transformer.forward_together(jobs)
            except Exception:
                self._one_by_one(stepping, pieces)
                return
            judged = list[tuple[Writing, tuple[list[int], int]]]()
            for writing, logits in zip(stepping, rows[len(pieces) :], strict=True):
                with self._blaming(writing):
                    judged.append((writing, writing.text.judge(logits)))
        seconds = time.perf_counter() - begin
        n_tokens = sum(len(logits) for logits in rows)
        ran = [*pieces, *zip(stepping, map(len, rows[len(pieces) :]), strict=True)]
        n_run = sum(n for _, n in ran)
        for writing, n in ran:
            self._used[writing.client] += seconds * n / n_run
        for writing, _ in pieces:
            writing.seat.keep(writing.ticket.job.prompt, False)
        if not pieces:
            self._decoder.tuning.saw(n_tokens, seconds)
        n_written = sum([self._goes_on(writing, *one, seconds) for writing, one in judged])
        if len(judged) == self._costs.n_sequences and not pieces:
            self._costs.end_pass(n_tokens, n_written, seconds, begin - self._ended if self._ended else 0.0)
        self._ended = time.perf_counter()

    def _one_by_one(self, stepping: list[Writing], pieces: list[tuple[Writing, int]]) -> None:
        """A pass that failed is made of each text alone, so that it ends the one that is to blame for it."""
        for writing, n in pieces:
            with self._blaming(writing):
                writing.model.forward(writing.piece(n), 0, len(writing.text.tokens))
        for writing in stepping:
            self._alone(writing)

    def _alone(self, writing: Writing) -> None:
        """A step of one text in a pass of its own."""
        begin = time.perf_counter()
        with self._blaming(writing):
            judged = run(writing.model, writing.text)
            self._figures.passes += 1
            seconds = time.perf_counter() - begin
            self._used[writing.client] += seconds
            self._goes_on(writing, *judged, seconds)

    def _goes_on(self, writing: Writing, new: list[int], n_accepted: int, seconds: float) -> int:
        """A text has made a step; how many tokens it grew by."""
        n = len(new)  # with an end mark, which is none of the text's
        told = writing.wording.of(writing.text.takes(new, n_accepted, seconds))
        writing.draft = None
        assert isinstance(told, Step)
        self._count(writing, told)
        if told.stop_reason:
            self._ends(writing, told)
        else:
            self._tell(writing.ticket, told)
        return n

    def _count(self, writing: Writing, step: Step) -> None:
        figures = self._figures
        if step.tokens and not writing.has_spoken:
            writing.has_spoken = True
            figures.first_token.add(time.perf_counter() - writing.ticket.asked)
        figures.generated_tokens += len(step.tokens)
        figures.drafted_tokens += len(step.draft_tokens)
        figures.accepted_tokens += step.n_accepted

    def _ends(self, writing: Writing, step: Step) -> None:
        writing.is_over = True
        self._leaves(writing)
        self._tell(writing.ticket, step)

    @contextmanager
    def _blaming(self, writing: Writing) -> Iterator[None]:
        """Around work of one text, whose error ends that text alone."""
        try:
            yield
        except Exception as error:
            self._breaks(writing, error)

    def _breaks(self, writing: Writing, error: Exception) -> None:
        self._running.remove(writing)
        self._seats.drop(writing.seat)
        self._fails(writing.ticket, error)

    def _fails(self, ticket: Ticket, error: Exception) -> None:
        self._figures.failed += 1
        self._tell(ticket, error)

    @staticmethod
    def _tell(ticket: Ticket, event: Event | Prefill | Exception) -> None:
        """Whoever cannot hear hears no more."""
        if ticket.is_cancelled:
            return
        try:
            ticket.hear(event)
        except Exception:
            ticket.is_cancelled = True


def logprobs_of(logits: Float32, draft: Draft, new: list[int], n_top: int, n_ids: int | None = None) -> list[TokenLogprob]:
    """Of each new token, by logits (n + 1, V) at a text's last token and each that is proposed; the first n_ids have tokens."""
    told, node = list[TokenLogprob](), -1
    for token in new:
        row = logits[node + 1, :n_ids].astype(np.float64)
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        likeliest = np.argpartition(-row, n_top)[:n_top] if n_top < len(row) else np.arange(len(row))
        likeliest = likeliest[np.lexsort((likeliest, -row[likeliest]))]
        told.append(TokenLogprob(token, float(row[token]), [(int(each), float(row[each])) for each in likeliest]))
        node = next((child for child in draft.children(node) if draft.tokens[child] == token), -1)
    return told
