"""Programs: a forward pass as a sequence of ops, each a kernel and its arguments, and the executor that runs them on threads.

An op reaches the threads as numbers: the kernel's address, then the address and shape of each array, and each number. So one
parallel region runs any program, and a kernel is compiled when a program with it first runs. A phase is split into chunks
(`work_stealing`). Within a chunk its ops run one after another, and no thread starts the next phase before all chunks are done.
A pass in fp32 takes 0.995 to 1.007 of the time that one function over all layers took, and at most 1.03 in int8.

A pass may hold the tokens of several sequences. Ops without arrays of one sequence run once, over all tokens. An op with such
arrays, like attention with a KV cache, runs once for each sequence: with its arrays, from its first token on, as if it were
alone.
"""

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
from numba.np.numpy_support import as_dtype

from specdec.runtime import work_stealing
from specdec.runtime.code_cache import MachineCodeCache, compile_callback, jitable, make_dispatcher
from specdec.runtime.parallel_region import get_available_threads, pause, run_on_threads
from specdec.runtime.simd import Array, Float32, Int64, UInt16, atomic_store, call_address, load_word, make_tuple_loader

# Annotations of kernel parameters: C-contiguous arrays with a number of dimensions. A kernel also takes int and float.
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
Codes4 = Annotated[npt.NDArray[np.int8], types.int8, 4]
Ints1 = Annotated[Int64, types.int64, 1]
Ints2 = Annotated[Int64, types.int64, 2]


class ForwardContext(NamedTuple):
    """The data that every kernel receives about the forward pass and its own chunk of the work.

    Attributes:
        n_tokens: Tokens of the pass, or of the sequence that the kernel runs for.
        pos: KV cache slot of the first of these tokens.
        n_logits: Logits are computed for the last n_logits tokens.
        n_threads: Threads of the pass.
        seq_len: The first seq_len slots hold a sequence in order of position; the slots after it hold the nodes of a tree.
        chunk: Index of the chunk of the phase that the kernel computes.
        n_chunks: Number of chunks of the phase.
        is_first_chunk: 1 for a thread's first chunk of the phase, where it prepares its own copies of data.
    """

    n_tokens: int
    pos: int
    n_logits: int
    n_threads: int
    seq_len: int
    chunk: int
    n_chunks: int
    is_first_chunk: int


Argument = Any  # of a kernel: an array or a number


class Op(NamedTuple):
    """One step of a program: a kernel and the arguments that it runs with.

    Attributes:
        kernel: The kernel.
        arguments: Its arguments, which `Kernel.encode_arguments` turns into numbers.
        bytes_per_token: Bytes that the kernel reads per token; 0: too short to be split into chunks.
        bytes_per_slot: Bytes that the kernel reads per KV cache slot of a sequence; 0: none, or too short to be split.
    """

    kernel: "Kernel"
    arguments: tuple[Argument, ...]
    bytes_per_token: int = 0
    bytes_per_slot: int = 0


class BatchEntry(NamedTuple):
    """One sequence's part of a forward pass over several sequences.

    Attributes:
        executor: The program over the sequence's own buffers.
        n_tokens: Tokens of the sequence in this pass.
        pos: Slot of its KV cache for the first of these tokens.
        n_logits: How many of the pass's logits belong to the sequence, which shows which tokens may be drafts.
    """

    executor: "Executor"
    n_tokens: int
    pos: int
    n_logits: int


Program = Sequence[Sequence[Op]]  # phases of ops

WORD_BYTES = 8
POS_WORD, N_THREADS_WORD = (ForwardContext._fields.index(name) for name in ("pos", "n_threads"))
N_CONTEXT_WORDS = ForwardContext._fields.index("chunk")  # fields that all chunks share
# After the fields of a pass or of one sequence's entry: the address of its own ops, the number of sequences, and their address
SEQUENCE_OPS_WORD, N_SEQUENCES_WORD, SEQUENCES_WORD, SEQUENCE_WORDS = range(N_CONTEXT_WORDS, N_CONTEXT_WORDS + 4)
# After them, in cache lines of each thread: how many chunks of a phase it has done, and its queue of chunks
CACHE_LINE_WORDS = 8
DONE_WORD, QUEUES_WORD, THREAD_STRIDE_WORDS = 2 * CACHE_LINE_WORDS, 3 * CACHE_LINE_WORDS, 2 * CACHE_LINE_WORDS
CONTEXT_STRUCT = struct.Struct(f"={SEQUENCE_WORDS}q")  # numpy would take 1 us
# Words of an op before its arguments. The first op of a phase holds the number of the phase's ops and their bytes; the last word
# is its index among the ops with arrays of a sequence, or -1.
KERNEL_WORD, N_OPS_WORD, TOKEN_BYTES_WORD, SLOT_BYTES_WORD, SEQUENCE_OP_WORD, OP_HEADER_WORDS = range(6)
OP_WORDS = 56


# (address) -> the fields of a `ForwardContext` that all chunks of a pass share
load_pass_fields = make_tuple_loader(types.UniTuple(types.int64, N_CONTEXT_WORDS))


@jitable
def load_context(run, chunk, n_chunks, is_first_chunk):
    """Return the `ForwardContext` of a chunk; `run` is the address of the fields that all chunks share."""
    n_tokens, pos, n_logits, n_threads, seq_len = load_pass_fields(run)
    return ForwardContext(n_tokens, pos, n_logits, n_threads, seq_len, chunk, n_chunks, is_first_chunk)


class Kernel:
    """A compute kernel that ops refer to, compiled on first use: function(run: ForwardContext, thread, ...).

    Each further parameter is annotated as above. A kernel with many parameters takes one record instead: a NamedTuple with
    annotated fields.
    """

    def __init__(self, function: Callable[..., None], cache: bool = True, **others: object) -> None:
        """Wrap a kernel function.

        Args:
            function: The kernel function.
            cache: Whether its machine code is cached on disk, for functions in `code_cache.SOURCES`.
            others: Annotations that replace those of the parameters with these names.
        """
        functools.update_wrapper(self, function)
        self.function, self._is_cached = function, cache
        self._annotations = others

    def register(self, name: str, module: str = "") -> "Kernel":
        """Set the kernel's name and module (default: its function's), make it an attribute of that module, and return the kernel.

        Its machine code is cached, and the kernel is pickled, under this name.
        """
        self.__module__, self.__qualname__ = module or self.__module__, name
        setattr(sys.modules[self.__module__], name, self)
        return self

    def specialize(self, name: str, module: str = "", **others: object) -> "Kernel":
        """Return a new kernel of the same function, with other annotations for some parameters, registered under a new name.

        Args:
            name: Name of the new kernel.
            module: Module to register it in, by default the function's.
            others: New annotations by parameter name.
        """
        return Kernel(self.function, self._is_cached, **others).register(name, module)

    @functools.cached_property
    def _record(self) -> type | None:
        """The NamedTuple class that holds the kernel's parameters, or None if they are separate."""
        hint = [*get_type_hints(self.function, include_extras=True).values()][2]
        return hint if hasattr(hint, "_fields") else None

    @functools.cached_property
    def _arg_types(self) -> dict[str, types.Type]:
        """The numba types of the kernel's parameters, by name, computed on demand: a run uses only one kernel in four."""
        hints = get_type_hints(self._record or self.function, include_extras=True) | self._annotations
        return {name: _get_numba_type(hint) for name, hint in hints.items() if name not in ("run", "thread", "return")}

    @functools.cached_property
    def _dtypes(self) -> list[object]:
        """The numpy dtypes of the kernel's parameters, in order, which every op needs."""
        return [as_dtype(getattr(arg_type, "dtype", arg_type)) for arg_type in self._arg_types.values()]

    @property
    def _renamed_function(self) -> Callable[..., None]:
        """A copy of the kernel function under the kernel's own name.

        Several functions of one factory have the same name. If two processes compiled them, a process that loads both would run
        the first for either.
        """
        function = self.function
        renamed = FunctionType(function.__code__, function.__globals__, self.name, function.__defaults__, function.__closure__)
        renamed.__qualname__ = self.name
        return renamed

    @functools.cached_property
    def address(self) -> int:
        """Address of the kernel's machine code, which is compiled or loaded from the cache on first use."""
        function = make_dispatcher(self._renamed_function)
        arguments_type = types.BaseTuple.from_types([*self._arg_types.values()], self._record)
        load_arguments = make_tuple_loader(types.UniTuple(arguments_type, 1) if self._record else arguments_type)

        def entry(run, op, thread, chunk, n_chunks, is_first_chunk):
            arguments = load_arguments(op + OP_HEADER_WORDS * WORD_BYTES)
            function(load_context(run, chunk, n_chunks, is_first_chunk), thread, *arguments)

        return compile_callback(KERNEL_SIGNATURE, entry, self._code_cache)

    @property
    def _code_cache(self) -> MachineCodeCache | None:
        """The disk cache of the kernel's machine code, or None if it is not cached."""
        return MachineCodeCache(self.function, self.name) if self._is_cached else None

    @property
    def name(self) -> str:
        """The kernel's module and name, for example "kernels.rope"."""
        return f"{self.__module__.partition('.')[2]}.{self.__qualname__}"

    @property
    def is_compiled(self) -> bool:
        """Whether the kernel's machine code is in the disk cache."""
        return bool(self._code_cache and self._code_cache.is_stored(KERNEL_SIGNATURE))

    def __call__(self, *arguments: Argument) -> Op:
        """Return an op that runs this kernel with these arguments; does not run it."""
        return Op(self, arguments)

    def __reduce__(self) -> str:
        """Return the kernel's name, by which pickle finds it again."""
        return self.__qualname__  # pickled by name: machine code is not copied

    def encode_arguments(self, arguments: Sequence[Argument]) -> list[int]:
        """Return kernel arguments as the int64 words of an op: an address and a shape for each array, and each number.

        Raises:
            AssertionError: An array does not match its parameter's annotation or is not C-contiguous.
        """
        words: list[int] = []
        for (name, arg_type), dtype, value in zip(self._arg_types.items(), self._dtypes, arguments, strict=True):
            if isinstance(arg_type, types.Array):
                is_valid = value.ndim == arg_type.ndim and value.dtype == dtype and value.flags.c_contiguous
                assert is_valid, f"{self.__qualname__} takes {arg_type} for {name}, not {value.dtype} of {value.ndim} dimensions"
                words += [value.ctypes.data, *value.shape]
            else:
                words.append(int(np.float32(value).view(np.int32)) if arg_type is types.float32 else int(value))
        return words


def kernel(function: Callable[..., None]) -> Kernel:
    """Return a `Kernel` that wraps a kernel function of the package and is cached on disk; use it as a decorator."""
    return Kernel(function)


def _get_numba_type(hint):
    """Return the numba type of a kernel parameter's annotation: int, float, or an array type like `Floats2`."""
    if hint in (int, float):
        return types.int64 if hint is int else types.float32
    dtype, n_dimensions = hint.__metadata__
    return types.Array(dtype, n_dimensions, "C")


@jitable
def get_phase_bytes(run, op):
    """Return the bytes per token, KV cache slots included, that a phase reads; `op` is the address of its first op."""
    n_bytes, slot_bytes = load_word(op + TOKEN_BYTES_WORD * WORD_BYTES), load_word(op + SLOT_BYTES_WORD * WORD_BYTES)
    if slot_bytes > 0:
        sequences = load_word(run + SEQUENCES_WORD * WORD_BYTES)
        for i in range(load_word(run + N_SEQUENCES_WORD * WORD_BYTES)):
            sequence = sequences + i * SEQUENCE_WORDS * WORD_BYTES
            n_bytes += slot_bytes * (load_word(sequence) + load_word(sequence + POS_WORD * WORD_BYTES))
    return n_bytes


@jitable
def run_chunk(run, ops, first, last, thread, chunk, n_chunks, is_first_chunk):
    """Run ops first to last (exclusive) of a program on one chunk of their phase.

    An op with arrays of one sequence runs once for each sequence of the pass.
    """
    for i in range(first, last):
        op = ops + i * OP_WORDS * WORD_BYTES
        entry, sequence_op = load_word(op + KERNEL_WORD * WORD_BYTES), load_word(op + SEQUENCE_OP_WORD * WORD_BYTES)
        if sequence_op < 0:
            call_address(entry, (run, op, thread, chunk, n_chunks, is_first_chunk))
        else:
            sequences = load_word(run + SEQUENCES_WORD * WORD_BYTES)
            for j in range(load_word(run + N_SEQUENCES_WORD * WORD_BYTES)):
                sequence = sequences + j * SEQUENCE_WORDS * WORD_BYTES
                own_op = load_word(sequence + SEQUENCE_OPS_WORD * WORD_BYTES) + sequence_op * OP_WORDS * WORD_BYTES
                call_address(entry, (sequence, own_op, thread, chunk, n_chunks, is_first_chunk))


@jitable
def run_phase(run, ops, first, last, thread, n_threads):
    """Run a phase as one of its threads: take and run chunks until none is left, then wait until all threads' chunks are done."""
    phase, stride = first + 1, THREAD_STRIDE_WORDS * WORD_BYTES
    done, queues = run + DONE_WORD * WORD_BYTES, run + QUEUES_WORD * WORD_BYTES
    n_bytes = get_phase_bytes(run, ops + first * OP_WORDS * WORD_BYTES)
    n = work_stealing.count_chunks_per_thread(n_bytes, load_word(run), n_threads)
    victim, n_done, n_waits = thread, 0, 0
    while victim != work_stealing.NOT_FOUND:
        chunk = work_stealing.take_chunk(queues + victim * stride, phase, n, victim == thread)
        if chunk != work_stealing.NOT_FOUND:
            run_chunk(run, ops, first, last, thread, victim * n + chunk, n * n_threads, 1 if n_done == 0 else 0)
            n_done += 1
            atomic_store(done + thread * stride, phase << work_stealing.PHASE_SHIFT | n_done)
        if chunk == work_stealing.NOT_FOUND or victim != thread:
            victim = work_stealing.find_busiest_thread(queues, stride, phase, n, n_threads)
    while not work_stealing.is_phase_done(done, stride, phase, n_threads, n * n_threads):
        n_waits += 1
        pause(n_waits)


def run_ops(run, ops, first, last, thread):
    """Run ops first to last (exclusive) of a program, which are whole phases, in order, as one of the pass's threads."""
    n_threads = load_word(run + N_THREADS_WORD * WORD_BYTES)
    while first < last:
        end = first + load_word(ops + (first * OP_WORDS + N_OPS_WORD) * WORD_BYTES)
        if n_threads > 1:
            run_phase(run, ops, first, end, thread, n_threads)
        else:
            run_chunk(run, ops, first, end, 0, 0, 1, 1)
        first = end


KERNEL_SIGNATURE = types.void(*[types.int64] * 6)
RUN_OPS_SIGNATURE = types.void(*[types.int64] * 5)


@functools.cache
def _get_run_ops_address() -> int:
    """Return the address of `run_ops`, compiled once; numba would compile it again into each wrapper of a parallel region."""
    return compile_callback(RUN_OPS_SIGNATURE, run_ops)


def allocate_context() -> Int64:
    """Return a zeroed int64 array, aligned to a cache line, for the context words of a pass and each thread's counters."""
    words = np.zeros(DONE_WORD + THREAD_STRIDE_WORDS * get_available_threads() + CACHE_LINE_WORDS, np.int64)
    return words[-words.ctypes.data % (CACHE_LINE_WORDS * WORD_BYTES) // WORD_BYTES :]


class Executor:
    """A program with its ops encoded as numbers, which runs on threads each time it is called.

    Attributes:
        ops: The encoded ops, one in each row.
    """

    def __init__(
        self, program: Program, sequence_arrays: Sequence[Array] = (), token_arrays: Sequence[tuple[Array, int]] = ()
    ) -> None:
        """Encode a program's ops as numbers; compiles kernels that are not compiled yet.

        Args:
            program: Phases of ops.
            sequence_arrays: Arrays of one sequence, which several sequences do not share.
            token_arrays: Arrays with one row per token of a pass, and the bytes of a row. An op may take a slice of one of these
                arrays.
        """
        ops = [op for phase in program for op in phase]
        self.ops = np.zeros((len(ops), OP_WORDS), np.int64)
        for phase, end in zip(program, itertools.accumulate(map(len, program)), strict=True):
            phase_bytes = sum(op.bytes_per_token for op in phase), sum(op.bytes_per_slot for op in phase)
            self.ops[end - len(phase), [N_OPS_WORD, TOKEN_BYTES_WORD, SLOT_BYTES_WORD]] = len(phase), *phase_bytes
        arrays, is_address = list[Array](), np.zeros(self.ops.shape, bool)
        for words, has_address, op in zip(self.ops, is_address, ops, strict=True):
            words[KERNEL_WORD] = op.kernel.address
            arguments = op.kernel.encode_arguments(op.arguments)
            words[OP_HEADER_WORDS : OP_HEADER_WORDS + len(arguments)] = arguments
            at = OP_HEADER_WORDS
            for argument in op.arguments:
                if n_dimensions := getattr(argument, "ndim", 0):
                    arrays.append(argument)
                    has_address[at] = True
                at += 1 + n_dimensions
        # Number of the sequence array that each word points into, from 1, or 0
        owners = _find_arrays([(array, i + 1) for i, array in enumerate(sequence_arrays)], self.ops) * is_address
        # Keeps alive what ops refer to by address.
        others = [array for array, owner in zip(arrays, owners[is_address], strict=True) if not owner]
        self._references = [op.kernel for op in ops], others
        sequence_ops = np.flatnonzero(owners.any(axis=1))
        self.ops[:, SEQUENCE_OP_WORD] = -1
        self.ops[sequence_ops, SEQUENCE_OP_WORD] = np.arange(len(sequence_ops))
        self._sequence_ops, self._owners = self.ops[sequence_ops], owners[sequence_ops]
        self._token_bytes = _find_arrays(token_arrays, self._sequence_ops) * is_address[sequence_ops]  # step per token of a word
        self._sequence_arrays, self._bases = sequence_arrays, np.array([0, *(array.ctypes.data for array in sequence_arrays)])
        self._prepare()

    def _prepare(self) -> None:
        """Allocate a context, and store the addresses of the context, of the ops and of the ops with sequence arrays."""
        self._context = allocate_context()
        self._addresses = self._context.ctypes.data, self.ops.ctypes.data
        self._single_sequence = self._sequence_ops.ctypes.data, 1, self._context.ctypes.data

    def with_sequence_arrays(self, sequence_arrays: Sequence[Array]) -> "Executor":
        """Return an executor of the same program over other sequence arrays of the same shapes.

        This takes a fifth of the time of encoding the program again.
        """
        other, bases = copy.copy(self), np.array([0, *(array.ctypes.data for array in sequence_arrays)])
        other._sequence_arrays, other._bases = sequence_arrays, bases
        other._sequence_ops = self._sequence_ops + (bases - self._bases)[self._owners]
        other._prepare()
        return other

    def without_sequence_arrays(self) -> "Executor":
        """Return a copy of the executor that holds no sequence arrays; run it only through `with_sequence_arrays`."""
        other = copy.copy(self)
        other._sequence_arrays = ()
        return other

    def __call__(self, n_tokens: int, pos: int, n_logits: int, n_threads: int, seq_len: int | None = None) -> None:
        """Run the program over the tokens of one sequence; see `ForwardContext` for the arguments.

        By default the pass has no tree: seq_len is pos + n_tokens.
        """
        seq_len = pos + n_tokens if seq_len is None else seq_len
        self._run_phases(n_tokens, pos, n_logits, n_threads, seq_len, *self._single_sequence)

    def run_batch(self, entries: Sequence[BatchEntry], n_logits: int, n_threads: int) -> None:
        """Run the program in one pass over the tokens of several sequences, one after another, with logits at the last n_logits.

        The entries' executors run the same program; only their sequence arrays differ.
        """
        records, references = np.zeros((len(entries), SEQUENCE_WORDS), np.int64), []
        n_tokens = 0
        for record, (executor, n, pos, n_own_logits) in zip(records, entries, strict=True):
            assert executor._sequence_ops.shape == self._sequence_ops.shape
            own_ops = executor._sequence_ops + n_tokens * executor._token_bytes if n_tokens else executor._sequence_ops
            record[:N_SEQUENCES_WORD] = n, pos, n_own_logits, n_threads, pos + n, own_ops.ctypes.data
            references.append(own_ops)
            n_tokens += n
        self._run_phases(n_tokens, 0, n_logits, n_threads, n_tokens, 0, len(entries), records.ctypes.data)

    def _run_phases(self, *numbers: int) -> None:
        CONTEXT_STRUCT.pack_into(self._context.data, 0, *numbers)
        self._context[DONE_WORD:] = 0
        run_on_threads(_get_run_ops_address(), *self._addresses, 0, len(self.ops), numbers[N_THREADS_WORD])


def _find_arrays(arrays: Sequence[tuple[Array, int]], addresses: Int64) -> Int64:
    """Return for each address the number that belongs to the array that contains it, or 0 if none does."""
    if not arrays:
        return np.zeros(addresses.shape, np.int64)
    spans = sorted((array.ctypes.data, array.ctypes.data + array.nbytes, number) for array, number in arrays)
    starts, ends, numbers = np.array([(0, 0, 0), *spans], np.int64).T  # address 0 is in none
    i = np.searchsorted(starts, addresses, "right") - 1
    return np.where(addresses < ends[i], numbers[i], 0)


def run_on_all_threads(op: Op, n_threads: int | None = None, n_tokens: int = 0) -> None:
    """Run one op by itself and return when it is done; each of n_threads (default: all) computes its share."""
    Executor([[op]])(n_tokens, 0, 0, n_threads or get_available_threads())
