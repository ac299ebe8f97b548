"""A program: what a pass runs, as rows of an operation and its arguments, and the threads that run it. Knows no operation.

A row reaches the threads as numbers: the address of the operation, then the address and shape of each array, and each number.
So one parallel region runs any program, and an operation is compiled when a program that holds it first runs. A phase is cut in
parts (`parts`); its rows follow each other in each part by itself, and no thread goes on to a phase before all parts of the
last one are done.

A pass may hold the tokens of several texts. Rows that take nothing of a text's own run once, over all tokens. A row that does,
as attention does with a cache, runs once for each text: with that text's arrays, from its first token on, as if it were alone.
"""

import bisect
import copy
import functools
import itertools
import struct
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import as_dtype

from specdec.runtime.code_cache import MachineCode, callback, inlined, inner
from specdec.runtime.cpu_topology import keep_threads_by_their_memory, known
from specdec.runtime.simd import F32, I32, I64, Float32, Int64, UInt16, atomic_store, call, load_word
from specdec.runtime.threads import available_threads, pause, run_on_threads
from specdec.runtime.work_stealing import NOBODY, PHASE, is_over, n_parts_each, take_part, victim

# What an operation may take, told by its annotations: C-contiguous arrays of so many dimensions, and whole numbers and floats.
Floats1 = Annotated[Float32, types.float32, 1]
Floats2 = Annotated[Float32, types.float32, 2]
Floats3 = Annotated[Float32, types.float32, 3]
Floats4 = Annotated[Float32, types.float32, 4]
Halves1 = Annotated[UInt16, types.uint16, 1]  # the bits of fp16 or bf16
Halves2 = Annotated[UInt16, types.uint16, 2]
Halves3 = Annotated[UInt16, types.uint16, 3]
Halves4 = Annotated[UInt16, types.uint16, 4]
Words2 = Annotated[npt.NDArray[np.uint32], types.uint32, 2]
Words3 = Annotated[npt.NDArray[np.uint32], types.uint32, 3]
Words4 = Annotated[npt.NDArray[np.uint32], types.uint32, 4]
Codes3 = Annotated[npt.NDArray[np.int8], types.int8, 3]
Bytes2 = Annotated[npt.NDArray[np.uint8], types.uint8, 2]
Bytes3 = Annotated[npt.NDArray[np.uint8], types.uint8, 3]
Bytes4 = Annotated[npt.NDArray[np.int8], types.int8, 4]
Ints1 = Annotated[Int64, types.int64, 1]
Ints2 = Annotated[Int64, types.int64, 2]


class Pass(NamedTuple):
    """What every operation of a pass knows.

    n_tokens, the first of them in the cache's slot pos, and logits asked for at the last n_logits. The first n_text slots hold a
    text, each at the position of its number; those behind them the nodes of a tree. An operation does what is this part's of
    n_parts; what each thread needs for itself in this phase it does where its thread `begins` with it.
    """

    n_tokens: int
    pos: int
    n_logits: int
    n_threads: int
    n_text: int
    part: int
    n_parts: int
    begins: int


class Row(NamedTuple):
    """An operation and its arguments, as `Operation.words` puts them into numbers.

    work: how many bytes it goes over for a token, and slot_work, for each slot of a text: of what takes long enough to be shared.
    """

    operation: "Operation"
    arguments: tuple[Any, ...]
    work: int = 0
    slot_work: int = 0


class TextPart(NamedTuple):
    """A text's tokens in a pass: n_tokens, the first of them in slot pos of its cache, by the program over its buffers.

    n_logits: how many of the pass's are its own, which tells what may be guesses.
    """

    runner: "Runner"
    n_tokens: int
    pos: int
    n_logits: int


Program = Sequence[Sequence[Row]]  # phases of rows

keep_threads_by_their_memory()  # which begin with the first region
WORD_BYTES = 8
POS, N_THREADS = (Pass._fields.index(name) for name in ("pos", "n_threads"))
N_NUMBERS = Pass._fields.index("part")  # of a pass, before a part's own
# behind the numbers of a pass, or of a text's part of it: where its own rows lie, and how many texts there are, and where
OWN_ROWS, N_TEXTS, TEXTS, TEXT_WORDS = range(N_NUMBERS, N_NUMBERS + 4)
# behind them, in lines of words that are each thread's own: how many parts of a phase it did, and those that it has left
LINE = 8
NODES = 2 * LINE - 1  # in front of these: of how many nodes the memory is
DONE, CLAIMS, THREAD_LINES = 2 * LINE, 3 * LINE, 2 * LINE
NUMBERS = struct.Struct(f"={TEXT_WORDS}q")  # numpy takes 1 us for them
# The words of a row in front of the arguments: how many rows the phase has that it begins, and what they have to do; its place
# among a text's own, or -1
OPERATION, N_ROWS, WORK, SLOT_WORK, PLACE, ROW_HEAD = range(6)
ROW_WORDS = 56


@inlined
def pass_at(address, part, n_parts, begins):
    """The `Pass` at an address, of that part."""
    return Pass(
        load_word(address),
        load_word(address + WORD_BYTES),
        load_word(address + 2 * WORD_BYTES),
        load_word(address + 3 * WORD_BYTES),
        load_word(address + 4 * WORD_BYTES),
        part,
        n_parts,
        begins,
    )


def _unpacker(unpacked: Any) -> Any:
    """The intrinsic (address of a row) -> its arguments, a tuple of that numba type; arrays are where and as they lie."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from numba.np.arrayobj import populate_array  # with all that numba can do with arrays and strings: only to compile

        words = builder.inttoptr(args[0], I64.as_pointer())
        numbers = (builder.load(builder.gep(words, [I64(place)])) for place in range(ROW_HEAD, ROW_WORDS))
        values = []
        for kind in unpacked:
            if kind is types.float32:
                values.append(builder.bitcast(builder.trunc(next(numbers), I32), F32))
            elif kind is types.int64:
                values.append(next(numbers))
            else:
                address, *shape = [next(numbers) for _ in range(1 + kind.ndim)]
                item_bytes = context.get_constant(types.intp, kind.dtype.bitwidth // 8)
                strides = [item_bytes]
                for size in reversed(shape[1:]):
                    strides.insert(0, builder.mul(strides[0], size))
                array = context.make_array(kind)(context, builder)
                populate_array(array, builder.inttoptr(address, array.data.type), shape, strides, item_bytes, meminfo=None)
                values.append(array._getvalue())
        return context.make_tuple(builder, signature.return_type, values)

    return intrinsic(lambda typingctx, row: (unpacked(types.int64), codegen))


class Operation:
    """A kernel that rows name: function(run: Pass, thread, ...), each further parameter annotated as above.

    Many parameters are one, a record: a NamedTuple whose fields are annotated so. kept: whether its machine code outlives the
    process, which is for functions in `cache.SOURCES`. others: annotations that stand for those of the same names.
    """

    def __init__(self, function: Callable[..., None], kept: bool = True, **others: Any) -> None:
        functools.update_wrapper(self, function)
        self.function, self._kept = function, kept
        self._others = others

    def named(self, name: str, module: str = "") -> "Operation":
        """The same, kept and pickled by that name of that module, by default its function's."""
        self.__module__, self.__qualname__ = module or self.__module__, name
        setattr(sys.modules[self.__module__], name, self)
        return self

    def over(self, name: str, module: str = "", **others: Any) -> "Operation":
        """The operation of that name, beside it or of that module, which takes others in the place of some of its parameters."""
        return Operation(self.function, self._kept, **others).named(name, module)

    @functools.cached_property
    def _record(self) -> Any:
        """The NamedTuple that its own parameters are, if they are."""
        hint = [*get_type_hints(self.function, include_extras=True).values()][2]
        return hint if hasattr(hint, "_fields") else None

    @functools.cached_property
    def _kinds(self) -> dict[str, Any]:
        """The numba types of its own parameters; a run uses one operation of four."""
        hints = get_type_hints(self._record or self.function, include_extras=True) | self._others
        return {name: _kind_of(hint) for name, hint in hints.items() if name not in ("run", "thread", "return")}

    @functools.cached_property
    def _dtypes(self) -> list[Any]:
        """The same for numpy, asked for at every row."""
        return [as_dtype(getattr(kind, "dtype", kind)) for kind in self._kinds.values()]

    @property
    def _own_function(self) -> Callable[..., None]:
        """The function by the operation's name: where two functions have the same, as those of one maker have, and two processes
        compiled them, whoever loads both would run the first for either."""
        given = self.function
        own = FunctionType(given.__code__, given.__globals__, self.name, given.__defaults__, given.__closure__)
        own.__qualname__ = self.name
        return own

    @functools.cached_property
    def address(self) -> int:
        """Where its machine code lies; compiled when first asked for."""
        body, kinds = inner(self._own_function), [*self._kinds.values()]
        unpack = _unpacker(types.BaseTuple.from_types(kinds, self._record))

        def entry(run, row, thread, part, n_parts, begins):
            body(pass_at(run, part, n_parts, begins), thread, *unpack(row))

        def entry_of_record(run, row, thread, part, n_parts, begins):
            body(pass_at(run, part, n_parts, begins), thread, unpack(row))

        return callback(ENTRY, entry_of_record if self._record else entry, self._code)

    @property
    def _code(self) -> MachineCode | None:
        """Where its machine code is kept."""
        return MachineCode(self.function, self.name) if self._kept else None

    @property
    def name(self) -> str:
        """Its room and its own: "kernels.rope"."""
        return f"{self.__module__.partition('.')[2]}.{self.__qualname__}"

    @property
    def is_compiled(self) -> bool:
        """Whether its machine code is kept already."""
        return bool(self._code and self._code.is_kept(ENTRY))

    def __call__(self, *arguments: Any) -> Row:
        return Row(self, arguments)

    def __reduce__(self) -> str:
        return self.__qualname__  # pickled by its name: machine code stays where it is

    def words(self, arguments: Sequence[Any]) -> list[int]:
        """The arguments as a row holds them; they have to be what the annotations say."""
        words: list[int] = []
        for (name, kind), dtype, value in zip(self._kinds.items(), self._dtypes, arguments, strict=True):
            if isinstance(kind, types.Array):
                sound = value.ndim == kind.ndim and value.dtype == dtype and value.flags.c_contiguous
                assert sound, f"{self.__qualname__} takes {kind} for {name}, not {value.dtype} of {value.ndim} dimensions"
                words += [value.ctypes.data, *value.shape]
            else:
                words.append(int(np.float32(value).view(np.int32)) if kind is types.float32 else int(value))
        return words


def operation(function: Callable[..., None]) -> Operation:
    """A kernel of the product's own as an `Operation`."""
    return Operation(function)


def _kind_of(hint: Any) -> Any:
    """The numba type that an annotation means."""
    if hint in (int, float):
        return types.int64 if hint is int else types.float32
    dtype, n_dimensions = hint.__metadata__
    return types.Array(dtype, n_dimensions, "C")


@inner
def work_of(run, row):
    """What the phase that begins with the row at an address has to do for a token."""
    work, slot_work = load_word(row + WORK * WORD_BYTES), load_word(row + SLOT_WORK * WORD_BYTES)
    if slot_work > 0:
        texts = load_word(run + TEXTS * WORD_BYTES)
        for text in range(load_word(run + N_TEXTS * WORD_BYTES)):
            part = texts + text * TEXT_WORDS * WORD_BYTES
            work += slot_work * (load_word(part) + load_word(part + POS * WORD_BYTES))
    return work


@inner
def run_part(run, rows, first, last, thread, part, n_parts, begins):
    """That part of a phase, rows first to last of a program."""
    for i in range(first, last):
        row = rows + i * ROW_WORDS * WORD_BYTES
        entry, place = load_word(row + OPERATION * WORD_BYTES), load_word(row + PLACE * WORD_BYTES)
        if place < 0:
            call(entry, (run, row, thread, part, n_parts, begins))
        else:
            texts = load_word(run + TEXTS * WORD_BYTES)
            for text in range(load_word(run + N_TEXTS * WORD_BYTES)):
                own = texts + text * TEXT_WORDS * WORD_BYTES
                own_row = load_word(own + OWN_ROWS * WORD_BYTES) + place * ROW_WORDS * WORD_BYTES
                call(entry, (own, own_row, thread, part, n_parts, begins))


@inner
def run_phase(run, rows, first, last, thread, n_threads):
    """A phase, as one of its threads: parts of it, until all are done."""
    phase, stride, own, claims = first + 1, THREAD_LINES * WORD_BYTES, run + DONE * WORD_BYTES, run + CLAIMS * WORD_BYTES
    n = n_parts_each(work_of(run, rows + first * ROW_WORDS * WORD_BYTES), load_word(run), n_threads)
    whose, n_done, n_waits = thread, 0, 0
    while whose != NOBODY:
        place = take_part(claims + whose * stride, phase, n, whose == thread)
        if place != NOBODY:
            run_part(run, rows, first, last, thread, whose * n + place, n * n_threads, 1 if n_done == 0 else 0)
            n_done += 1
            atomic_store(own + thread * stride, phase << PHASE | n_done)
        if place == NOBODY or whose != thread:
            whose = victim(claims, stride, phase, n, thread, n_threads, load_word(run + NODES * WORD_BYTES))
    while not is_over(own, stride, phase, n_threads, n * n_threads):
        n_waits += 1
        pause(n_waits)


def run_rows(run, rows, first, last, thread):
    """Rows first to last of a program, whole phases, as one of its threads."""
    n_threads = load_word(run + N_THREADS * WORD_BYTES)
    while first < last:
        end = first + load_word(rows + (first * ROW_WORDS + N_ROWS) * WORD_BYTES)
        if n_threads > 1:
            run_phase(run, rows, first, end, thread, n_threads)
        else:
            run_part(run, rows, first, end, 0, 0, 1, 1)
        first = end


ENTRY = types.void(*[types.int64] * 6)
RUN_ROWS = types.void(*[types.int64] * 5)


@functools.cache
def _runner() -> int:
    """The address of `run_rows`, compiled once: numba would compile it again into each of a parallel region's wrappers."""
    return callback(RUN_ROWS, run_rows)


def numbers_of_pass() -> Int64:
    """Room for them, and for what its threads count in lines of their own."""
    words = np.zeros(DONE + THREAD_LINES * available_threads() + LINE, np.int64)
    return words[-words.ctypes.data % (LINE * WORD_BYTES) // WORD_BYTES :]


class Runner:
    """A program in numbers.

    own: arrays of the text's own, which several texts do not share; by_token: those of a row for each token of a pass, and how
    many bytes such a row takes. Both as they lie: a row of the program may take a part of one.
    """

    def __init__(self, program: Program, own: Sequence[Any] = (), by_token: Sequence[tuple[Any, int]] = ()) -> None:
        rows = [row for phase in program for row in phase]
        self._rows = np.zeros((len(rows), ROW_WORDS), np.int64)
        for phase, end in zip(program, itertools.accumulate(map(len, program)), strict=True):
            work = sum(row.work for row in phase), sum(row.slot_work for row in phase)
            self._rows[end - len(phase), [N_ROWS, WORK, SLOT_WORK]] = len(phase), *work
        self._kept: list[Any] = [row.operation for row in rows]  # what rows name by address, beside a text's own
        owned, of_tokens = _Places([(array, i + 1) for i, array in enumerate(own)]), _Places(by_token)
        texts = dict[int, list[int]]()
        for i, (words, row) in enumerate(zip(self._rows, rows, strict=True)):
            numbers = [row.operation.address, *words[N_ROWS:PLACE].tolist(), -1, *row.operation.words(row.arguments)]
            arrays, at = list[int](), ROW_HEAD  # where the addresses of its arrays stand
            for argument in row.arguments:
                if n_dimensions := getattr(argument, "ndim", 0):
                    arrays.append(at)
                    if not owned.at(numbers[at]):
                        self._kept.append(argument)
                at += 1 + n_dimensions
            if any(owned.at(numbers[place]) for place in arrays):
                numbers[PLACE], texts[i] = len(texts), arrays
            words[: len(numbers)] = numbers
        self._own_rows = self._rows[[*texts]]
        self._token_bytes = np.zeros(self._own_rows.shape, np.int64)  # how far each word of them moves on for a token
        self._owners = np.zeros(self._own_rows.shape, np.int64)  # in which array of the text's own each lies, from 1 on, or 0
        for words, moves, owners, arrays in zip(self._own_rows, self._token_bytes, self._owners, texts.values(), strict=True):
            for place in arrays:
                moves[place], owners[place] = of_tokens.at(int(words[place])), owned.at(int(words[place]))
        self._own, self._bases = own, np.array([0, *(array.ctypes.data for array in own)])
        self._get_ready()

    def _get_ready(self) -> None:
        """The numbers of a pass, and where all numbers lie."""
        self._run = numbers_of_pass()
        self._run[NODES] = known().nodes
        self._addresses = self._run.ctypes.data, self._rows.ctypes.data
        self._alone = self._own_rows.ctypes.data, 1, self._run.ctypes.data

    def over(self, own: Sequence[Any]) -> "Runner":
        """The same program over other arrays of a text's own, of the same shapes, which costs a fifth of writing it again."""
        other, bases = copy.copy(self), np.array([0, *(array.ctypes.data for array in own)])
        other._own, other._bases = own, bases
        other._own_rows = self._own_rows + (bases - self._bases)[self._owners]
        other._get_ready()
        return other

    def without_texts(self) -> "Runner":
        """The same, keeping no text's own arrays: to be called with others (`over`)."""
        other = copy.copy(self)
        other._own = ()
        return other

    def __call__(self, n_tokens: int, pos: int, n_logits: int, n_threads: int, n_text: int | None = None) -> None:
        """Run the program; the numbers are those of a `Pass`, n_text by default of one whose tokens are all a text's."""
        n_text = pos + n_tokens if n_text is None else n_text
        self._run_phases(n_tokens, pos, n_logits, n_threads, n_text, *self._alone)

    def run_together(self, parts: Sequence[TextPart], n_logits: int, n_threads: int) -> None:
        """Run the program over the tokens of several texts, one text's behind the other's, with logits at the last n_logits.

        Their runners are of the same program over buffers of which only those of a text's own differ.
        """
        records, kept = np.zeros((len(parts), TEXT_WORDS), np.int64), []
        n_tokens = 0
        for record, (runner, n, pos, n_own) in zip(records, parts, strict=True):
            assert runner._own_rows.shape == self._own_rows.shape
            own_rows = runner._own_rows + n_tokens * runner._token_bytes if n_tokens else runner._own_rows
            record[:N_TEXTS] = n, pos, n_own, n_threads, pos + n, own_rows.ctypes.data
            kept.append(own_rows)
            n_tokens += n
        self._run_phases(n_tokens, 0, n_logits, n_threads, n_tokens, 0, len(parts), records.ctypes.data)

    def _run_phases(self, *numbers: int) -> None:
        NUMBERS.pack_into(self._run.data, 0, *numbers)
        self._run[DONE:] = 0
        run_on_threads(_runner(), *self._addresses, 0, len(self._rows), numbers[N_THREADS])


class _Places:
    """Arrays, each with a number, found by what lies in them."""

    def __init__(self, arrays: Sequence[tuple[Any, int]]) -> None:
        self._arrays = sorted((array.ctypes.data, array.ctypes.data + array.nbytes, number) for array, number in arrays)
        self._starts = [start for start, _, _ in self._arrays]

    def at(self, address: int) -> int:
        """The number of the array that holds that address, 0 where there is none."""
        i = bisect.bisect_right(self._starts, address) - 1
        return self._arrays[i][2] if i >= 0 and address < self._arrays[i][1] else 0


def on_all_threads(row: Row, n_threads: int | None = None) -> None:
    """One operation by itself, each thread its share; no tokens. n_threads: by default as many as there are."""
    Runner([[row]])(0, 0, 0, n_threads or available_threads())
