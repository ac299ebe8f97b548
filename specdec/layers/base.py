"""What an architecture is: the tensors it takes, the matrices they become, the buffers it works in, the program of its pass."""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np

from specdec.config import Config
from specdec.kernels import MAX_TOKENS, KVCache, copy_rows
from specdec.quant import PACKED_BF16, Kind, kind_for
from specdec.quant.bf16_trial import LEAST_WEIGHTS, pays
from specdec.quant.matrix import Floats, Matrix, NoRoom, converted, floats, n_strips, pack
from specdec.runtime.memory import Block, aligned, copy_written, lazy_zeros, physical_memory_bytes, zeros
from specdec.runtime.program import Program, Row, Runner
from specdec.runtime.simd import Float32, Int64, round_up
from specdec.runtime.tile import STRIP_ROWS

LONG = "long_"
Shapes = dict[str, tuple[int, ...]]
PIECE = ":"  # in front of the number of a matrix's piece, from 1 on
CHOOSING, EXPERTS = (".router", ".shared_gate"), ".experts_"  # in names of matrices
TABLES = ("embedding", "classifier")  # matrices of a row for each token


def tell_nobody(share: float) -> None:
    """The progress of something that nobody watches."""


class Part(NamedTuple):
    """A packed matrix: (rows, n) of each tensor in it, which lie below each other, or so many at a time strip by strip in turns.

    tensors: names, and the layer, or the expert, where a tensor holds one matrix for each.
    """

    tensors: tuple[tuple[str, int | None], ...]
    rows: tuple[int, ...]
    n: int
    turns: int = 1

    @property
    def n_strips(self) -> int:
        return sum(map(n_strips, self.rows))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.n_strips * STRIP_ROWS, self.n)


class Piece(NamedTuple):
    """A part, or those of its tensors that become one kind of weights, the others having others; first, total: as of `Matrix`."""

    part: Part
    kind: Kind
    first: int = 0
    total: int = 0


class Vector(NamedTuple):
    """Packed vectors: tensors of those sizes, padded to strips, one after the other or strip by strip in turns.

    n_rows: of each tensor where it is a table of vectors, else 0.
    """

    tensors: tuple[tuple[str, int | None], ...]
    sizes: tuple[int, ...]
    in_turns: bool = False
    n_rows: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        size = sum(round_up(size, STRIP_ROWS) for size in self.sizes)
        return (self.n_rows, size) if self.n_rows else (size,)


Packed = dict[str, Part | Vector]


class Joined(NamedTuple):
    """Tensors that are packed as one, as far as there are such: below each other, or strip by strip in turns.

    is_table: whether a row of them is a vector of its own; else tensors of rows are matrices.
    """

    tensors: tuple[str, ...]
    in_turns: bool = False
    is_table: bool = False


def packed(own: Shapes, joined: Mapping[str, Joined], stored: Shapes, i: int | None = None) -> Packed:
    """What tensors become: each by its name, or those that are joined; of layer i by names that begin with its number.

    own: their shapes, without the axis that a file's have, stored, where a tensor holds one for each layer. One that holds a
    matrix for each expert becomes a matrix of all of them, below each other.
    """
    wholes = {name: whole for whole, each in joined.items() for name in each.tensors}

    def place(name: str) -> tuple[str, int | None]:
        return (f"{i}.{name}", None) if f"{i}.{name}" in stored else (name, i if stored[name] != own[name] else None)

    found: Packed = {}
    for whole in dict.fromkeys(wholes.get(name, name) for name in own):
        each, our_name = joined.get(whole, Joined((whole,))), whole if i is None else f"{i}.{whole}"
        names = [name for name in each.tensors if name in own]
        (*lengths, n), places = own[names[0]], tuple(map(place, names))
        if each.is_table or not lengths:
            found[our_name] = Vector(places, tuple(own[name][-1] for name in names), each.in_turns, *lengths)
            continue
        rows, turns = tuple(own[name][-2] for name in names), len(names) if each.in_turns else 1
        if len(lengths) > 1:
            rows, places = rows * lengths[0], tuple((name, expert) for expert in range(lengths[0]) for name, _ in places)
        found[our_name] = Part(places, rows, n, turns)
    return found


@dataclass(frozen=True)
class Table:
    """A tensor of a row for each token that stays where it lies, in its file: of a pass's tokens alone the rows are read."""

    tensor: Any

    def rows(self, tokens: Sequence[int]) -> Float32:
        """(n, columns), float32. Raises what reading the file raises."""
        rows = [_widened(self.tensor[token : token + 1]) for token in tokens]
        return np.concatenate(rows) if rows else np.empty((0, self.tensor.shape[1]), np.float32)


def _widened(rows: Floats) -> Float32:
    """`floats` of so few that one thread is faster."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rows.astype(np.float32, copy=False)


@dataclass(frozen=True)
class Weights:
    """A model's weights: packed matrices and padded vectors, by the names that its architecture gives them, and tables, by those
    of the buffers that their rows fill.
    """

    matrices: dict[str, Matrix]
    vectors: dict[str, Float32]
    tables: dict[str, Table] = field(default_factory=dict)

    def pieces(self, name: str) -> list[Matrix]:
        """A matrix, in as many as its rows are of several kinds."""
        names = itertools.chain([name], (f"{name}{PIECE}{i}" for i in itertools.count(1)))
        return [*itertools.takewhile(bool, map(self.matrices.get, names))]  # type: ignore[list-item]

    def product(self, name: str, out: Float32, x: Float32, scratches: Sequence[Float32], *, unit: int = 1) -> list[Row]:
        """`Matrix.product` of all its pieces; scratches: one for each, at least."""
        pieces = zip(self.pieces(name), scratches, strict=False)
        return [piece.product(out, x, scratch, unit=unit) for piece, scratch in pieces]

    def take_in(self, tokens: Sequence[int], buffers: "Buffers", at: int) -> None:
        """Put a pass's tokens, and what tables say of them, from that place of buffers on."""
        places = slice(at, at + len(tokens))
        buffers.tokens[places] = tokens
        for name, table in self.tables.items():
            getattr(buffers, name)[places] = table.rows(tokens)

    @property
    def kind(self) -> str:
        """What the matrices are, in words."""
        return " and ".join(sorted({matrix.kind.name for matrix in self.matrices.values()}))

    @property
    def n_bytes(self) -> int:
        """What all arrays take; one that is two matrices counts once."""
        arrays = [*(matrix.strips for matrix in self.matrices.values()), *self.vectors.values()]
        return sum({id(array): array.nbytes for array in arrays}.values())

    @property
    def places(self) -> list[int]:
        """Which arrays the matrices are."""
        return [id(matrix.strips) for matrix in self.matrices.values()]

    def n_bytes_as(self, kind: Kind) -> int:
        """What the matrices would take in another kind of weights."""
        return 4 * sum(_n_floats(len(m.strips), m.n, 0, new) for m, new in self._in(kind).values())

    def converted(self, kind: Kind, progress: Callable[[float], None] = tell_nobody) -> "Weights":
        """The same matrices in another kind of weights, beside the same vectors; progress: is told the share that is done."""
        block, new, matrices = Block(self.n_bytes_as(kind) // 4), dict[int, Matrix](), self._in(kind)
        for n, (key, (matrix, to)) in enumerate(matrices.items()):
            progress(n / len(matrices))
            new[key] = matrix if to is matrix.kind else converted(matrix, to, block.take)
        return replace(self, matrices={name: new[id(matrix)] for name, matrix in self.matrices.items()})

    def _in(self, kind: Kind) -> dict[int, tuple[Matrix, Kind]]:
        """Each matrix once, by its id, and what it becomes."""
        return {id(matrix): (matrix, _kind_in(name, kind) or matrix.kind) for name, matrix in self.matrices.items()}

    def aligned(self) -> "Weights":
        """The same, in arrays that begin at cache lines."""
        new = {id(matrix): matrix.aligned() for matrix in self.matrices.values()}
        vectors = {name: aligned(vector) for name, vector in self.vectors.items()}
        return replace(self, matrices={name: new[id(matrix)] for name, matrix in self.matrices.items()}, vectors=vectors)


class Room(NamedTuple):
    """What buffers are for: texts of so many positions, whole strips of them, kept so, and passes of so many threads.

    n_hidden: before how many layers the hidden states are kept.
    """

    kv: KVCache
    n_positions: int
    n_threads: int
    n_hidden: int = 0


Whose = Literal["pass", "token", "text", "cache"]


class Buffer(NamedTuple):
    """An array that a program works in; what grows with the text keeps its numbers, at the same indexes.

    whose: "pass": any pass may write over it; "token": so too, and it has a row, its last axis, for each token of a pass;
    "text": a text's own, which several texts in a pass do not share; "cache": a text's own of which only what is
    written becomes resident, for what most texts do not fill.
    """

    shape: tuple[int, ...]
    dtype: type = np.float32
    whose: Whose = "pass"

    @property
    def is_own(self) -> bool:
        """Whether it is a text's own."""
        return self.whose in ("text", "cache")

    @property
    def token_bytes(self) -> int:
        """How far a token's row lies from the next one's, where there are such; else 0."""
        if self.whose != "token":
            return 0
        return (self.shape[-1] if len(self.shape) > 1 else 1) * np.dtype(self.dtype).itemsize

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def array(self, old: Any = None) -> Any:
        """Zeros; old: the array that they grow out of, itself where it is as large already. Raises MemoryError."""
        if old is not None and old.shape == self.shape:
            return old
        if self.whose == "cache":
            new = lazy_zeros(self.dtype, *self.shape)
        else:
            new = zeros(*self.shape) if self.dtype is np.float32 else np.zeros(self.shape, self.dtype)
        if old is not None:
            self.copy(new[tuple(map(slice, old.shape))], old)
        return new

    def copy(self, to: Any, source: Any) -> None:
        """Numbers of such an array to another one."""
        if self.whose == "cache":
            copy_written(to, source)
        else:
            to[...] = source


class Buffers(SimpleNamespace):
    """The arrays of a program, by the names that its architecture declares them by, and of every program

    kv: the `KVCache`, tokens (T,) and logits (T, V padded) of a pass, x (1, T, D padded): the residual stream,
    depths (N,) of a tree's nodes, whose position is n_text + depth, and paths (N, N): the node at each depth on the way to a
    node, itself the last; where hidden states are kept, hidden_states (S, layers D) of the cache's slots. A name that begins with
    long_ is that of what long texts have in the place of the rest of it.
    """

    def of_long_texts(self) -> "Buffers":
        """The same, by the names that others have."""
        instead = {name.removeprefix(LONG): array for name, array in vars(self).items() if name.startswith(LONG)}
        return Buffers(**vars(self) | instead)


@dataclass(frozen=True)
class Common:
    """Buffers that are no text's own, for texts of so many positions; and the programs over them, by what they were made for."""

    buffers: Buffers | None = None
    n_positions: int = 0
    runners: dict[tuple[int, tuple[int, ...]], list[Runner]] = field(default_factory=dict)


class Layers(NamedTuple):
    """A pass: what makes x of tokens, the layers, and what makes logits of x; in front of each of them x is a hidden state."""

    first: Program
    layers: Sequence[Program]
    last: Program

    def program(self, before: Mapping[int, Program]) -> Program:
        """All of it; before: what else runs before layers, by their numbers, and those behind the last one before logits."""
        layers = enumerate([*self.layers, [], []])
        return [*self.first, *(phase for i, layer in layers for phase in (*before.get(i, []), *layer)), *self.last]


@dataclass(frozen=True)
class Architecture:
    """A family of models.

    shapes: of each tensor that a file of the family holds.
    packed: what they become, among it the parts "embedding" and "classifier".
    buffers: what the program works in, beside what every program has (`Buffers`).
    program: the pass, over weights and buffers.
    fill: puts what depends on positions alone into buffers, from one of them on.
    learned_positions: whether positions are a table of the file's, at whose end a text ends.
    move: puts what buffers hold of a tree's path, nodes from depth 0 on, where it follows a text of so many tokens. None: the
    family runs no trees.
    features: of a head that drafts, what makes x of the target's hidden states, which lie in the buffer taps.
    outcome: puts what the last norm makes of x into normed, of all tokens. None: that is no hidden state that is asked for.
    n_states: where there is a running state beside the cache's slots, of how many last lengths of a text buffers hold it: a text
    may go back by one less, and one that goes back farther is run again. The pass at position 0 takes none. 0: there is none.
    caches: of each layer the buffers as its blocks name them, keys and values among them. None: nothing of a text is given back
    before it ends.
    tables: which buffers rows of tensors fill, by their tokens, and which tensors those are.
    """

    shapes: Callable[[Config], Shapes]
    packed: Callable[[Config], Packed]
    buffers: Callable[[Config, Weights, Room], dict[str, Buffer]]
    program: Callable[[Config, Weights, Buffers], Layers]
    fill: Callable[[Config, Buffers, int], None] = lambda config, buffers, start: None
    learned_positions: bool = False
    move: Callable[[Buffers, Int64, int], None] | None = None
    n_states: int = 0
    caches: Callable[[Config, Weights, Buffers], list[Buffers]] | None = None
    tables: Callable[[Config], dict[str, str]] = lambda config: {}
    features: Callable[[Config, Weights, Buffers], Program] | None = None
    outcome: Callable[[Config, Weights, Buffers], Row] | None = None

    def parts(self, config: Config) -> dict[str, Part]:
        """The matrices of `packed`."""
        return {name: each for name, each in self.packed(config).items() if isinstance(each, Part)}

    def vectors(self, config: Config) -> dict[str, Vector]:
        """The vectors of `packed`."""
        return {name: each for name, each in self.packed(config).items() if isinstance(each, Vector)}

    def all_buffers(self, config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
        """The family's, and those of every program."""
        kept = {"hidden_states": Buffer((room.n_positions, room.n_hidden * config.dim), whose="cache")} if room.n_hidden else {}
        return (
            kept
            | {
                "tokens": Buffer((MAX_TOKENS,), np.int64, "token"),
                "depths": Buffer((MAX_TOKENS,), np.int64, "text"),
                "paths": Buffer((MAX_TOKENS, MAX_TOKENS), np.int64, "text"),
                "x": Buffer((1, MAX_TOKENS, round_up(config.dim, STRIP_ROWS)), whose="token"),
                "logits": Buffer((MAX_TOKENS, weights.matrices["classifier"].n_rows), whose="token"),
            }
            | self.buffers(config, weights, room)
        )

    def new_buffers(
        self, config: Config, weights: Weights, room: Room, old: Buffers | None = None, common: "Common | None" = None
    ) -> Buffers:
        """All of them, tables not filled but for what is common. Raises MemoryError.

        old: those that a text's own grow out of; common: what all else grows out of, or is already.
        """
        common = common or Common()
        declared = self.all_buffers(config, weights, room)
        wide = self.all_buffers(config, weights, room._replace(n_positions=max(room.n_positions, common.n_positions)))
        new = {name: (buffer, old) if buffer.is_own else (wide[name], common.buffers) for name, buffer in declared.items()}
        return Buffers(kv=room.kv, **{name: buffer.array(getattr(source, name, None)) for name, (buffer, source) in new.items()})

    def grown(
        self, config: Config, weights: Weights, room: Room, old: Buffers | None, common: "Common"
    ) -> "tuple[Buffers, Common]":
        """The same with tables filled, and what other texts may have in common with them."""
        buffers = self.new_buffers(config, weights, room, old, common)
        if room.n_positions > common.n_positions:
            self.fill(config, buffers, common.n_positions)
            declared = self.all_buffers(config, weights, room)
            shared = {name: getattr(buffers, name) for name, buffer in declared.items() if not buffer.is_own}
            common = Common(Buffers(**shared), room.n_positions)
        return buffers, common

    def copy_text(self, config: Config, weights: Weights, room: Room, source: Buffers, to: Buffers) -> None:
        """What buffers hold of a text's own, of as many positions as that room has."""
        for name, buffer in self.all_buffers(config, weights, room).items():
            if buffer.is_own:
                of_text = (*map(slice, buffer.shape),)
                buffer.copy(getattr(to, name)[of_text], getattr(source, name)[of_text])

    def runners(
        self, config: Config, weights: Weights, buffers: Buffers, room: Room, common: Common, layers: tuple[int, ...]
    ) -> list[Runner]:
        """The program of short texts, and that of long ones where they differ, over buffers made for that room.

        layers: before which hidden states are kept. What is written once is in common from then on.
        """
        declared = [(getattr(buffers, name), buffer) for name, buffer in self.all_buffers(config, weights, room).items()]
        own = [array for array, buffer in declared if buffer.is_own]
        if written := common.runners.get((room.n_positions, layers)):
            return [runner.over(own) for runner in written]
        by_token = [(array, buffer.token_bytes) for array, buffer in declared if buffer.token_bytes]
        before = dict[int, Program]()
        for i, layer in enumerate(layers):
            normed = [self.outcome(config, weights, buffers)] if layer > config.n_layers and self.outcome else []
            kept = buffers.normed if normed else buffers.x
            before[layer] = [[*normed, copy_rows(buffers.hidden_states, kept, i * config.dim, 0, config.dim, True)]]
        of_both = [buffers, buffers.of_long_texts()][: 1 + (config.rope.n_short > 0)]
        runners = [Runner(self.program(config, weights, each).program(before), own, by_token) for each in of_both]
        common.runners[room.n_positions, layers] = [runner.without_texts() for runner in runners]
        return runners

    def pieces(self, config: Config, tensors: Mapping[str, Any], kind: Kind | None) -> dict[str, Piece]:
        """What each matrix becomes, of block types that differ each what it is; see `pack`."""
        pieces = {}
        for name, part in self.parts(config).items():
            ts, own_kind = [_at(tensors, *place) for place in part.tensors], kind and _kind_in(name, kind)
            types = [getattr(tensor, "type", "") for tensor in ts]
            if part.turns > 1 or len({*types}) == 1:
                pieces[name] = Piece(part, kind_for(ts, own_kind))
                continue
            for i, own in enumerate(_runs(types)):
                piece, above = Part(part.tensors[own], part.rows[own], part.n), sum(map(n_strips, part.rows[: own.start]))
                pieces[name + f"{PIECE}{i}" * (i > 0)] = Piece(piece, kind_for(ts[own], own_kind), above, part.n_strips)
        return pieces

    def n_bytes_as(self, config: Config, tensors: Mapping[str, Any], kind: Kind | None = None) -> int:
        """Return the bytes of the matrices that `pack` makes, or would make if they became a kind of weights; reads none."""
        names = {piece: name for name, piece in self.pieces(config, tensors, None).items()}  # a tied classifier counts once
        kinds = {piece: (kind and _kind_in(name, kind)) or piece.kind for piece, name in names.items()}
        return 4 * sum(_n_floats(piece.part.n_strips, piece.part.n, 0, own) for piece, own in kinds.items())

    def _packable(self, config: Config, tensors: Mapping[str, Any], without: Collection[str] = ()) -> list[Part]:
        """Parts of bf16 that may become 12 bits."""
        pieces = self.pieces(config, tensors, PACKED_BF16).items()
        found = (piece.part for name, piece in pieces if piece.kind is PACKED_BF16 and name not in without)
        return [*dict.fromkeys(found)]

    def packing_may_pay(self, config: Config, tensors: Mapping[str, Any]) -> bool:
        """Whether it has so many weights of bf16 that a trial may find 12 bits faster."""
        return sum(sum(part.rows) * part.n for part in self._packable(config, tensors)) >= LEAST_WEIGHTS

    def packing_pays(self, config: Config, tensors: Mapping[str, Any], n_threads: int) -> bool:
        """Whether 12 bits are faster on so many threads: a trial on the first of its layers' matrices of bf16."""
        parts = self._packable(config, tensors, without=TABLES)
        return pays((_at(tensors, *place) for part in parts for place in part.tensors), n_threads)

    def outline(self, config: Config, tensors: Mapping[str, Any], kind: Kind | None = None) -> Weights:
        """The weights that `pack` makes, of their kinds and numbers of rows, without a number: enough to write the program."""
        matrices = {
            name: Matrix(kind, np.empty((part.n_strips, 0, 0), np.float32), part.n, kind.group(part.n, 0), *place)
            for name, (part, kind, *place) in self.pieces(config, tensors, kind).items()
        }
        # Programs compute with vectors as they are written, so these are numbers.
        return Weights(matrices, {name: zeros(*vector.shape) for name, vector in self.vectors(config).items()})

    def pack(
        self,
        config: Config,
        tensors: Mapping[str, Any],
        kind: Kind | None = None,
        progress: Callable[[float], None] = tell_nobody,
    ) -> Weights:
        """The tensors, in the shapes of `shapes`, as the kernels read them.

        kind: what those of floats become, by default what they are; progress: is told the share that is done. Tensors are
        indexed by layer, then by a slice of rows, a block at a time: they may lie in a file. Raises ValueError for a matrix of
        another shape, MemoryError for weights that the machine cannot hold.
        """
        pieces = self.pieces(config, tensors, kind)
        kinds = {piece.part: piece.kind for piece in pieces.values()}
        sources = {part: [_at(tensors, *place) for place in part.tensors] for part in kinds}
        for part, ts in sources.items():
            for (name, _), rows, tensor in zip(part.tensors, part.rows, ts, strict=True):
                if tuple(tensor.shape) != (rows, part.n):  # compiled code would write where nothing is
                    raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; this config needs {(rows, part.n)}")
        needed = 4 * sum(
            _n_floats(part.n_strips, part.n, getattr(tensors[0], "group", 0), kinds[part]) for part, tensors in sources.items()
        )
        if needed > (memory := physical_memory_bytes()):
            raise MemoryError(f"its weights take {needed / 2**30:.2f} GiB; this machine has {memory / 2**30:.2f} GiB of memory")
        block = Block(needed // 4, sum(_n_more(part, kinds[part]) for part in sources))
        packed = {}
        for part, ts in sources.items():
            used, instead = block.used, kinds[part].instead
            try:
                packed[part] = pack(ts, kinds[part], part.turns, block.take)
            except NoRoom:
                assert instead
                block.give_back(used)
                packed[part] = pack(ts, instead, part.turns, block.take)
            progress(block.share_taken)
        return Weights(
            {name: _placed(packed[part], *place) for name, (part, _, *place) in pieces.items()},
            {name: _pack_vector(vector, tensors) for name, vector in self.vectors(config).items()},
            {name: Table(tensors[stored]) for name, stored in self.tables(config).items()},
        )

    def check(self, config: Config, weights: Weights) -> None:
        """Raises ValueError for weights that are not of that config's shape, or more than it needs."""
        known = self.packed(config)
        pieces = {name: weights.pieces(name) for name in known}
        found = {name: (sum(each.n_rows for each in own), *{each.n for each in own}) for name, own in pieces.items() if own}
        found |= {name: vector.shape for name, vector in weights.vectors.items()}
        for name, needed in known.items():
            if found.get(name) != needed.shape:
                raise ValueError(f"the weights' {name} has not the shape {needed.shape} that the config needs")
        if more := {name for name in (*weights.matrices, *weights.vectors) if name.partition(PIECE)[0] not in known}:
            raise ValueError(f"the weights' {min(more)} is none of the config's")


def _kind_in(name: str, kind: Kind) -> Kind | None:
    """What the matrix of that name becomes where a model becomes that kind. None: what it is, of what chooses experts."""
    if name in TABLES:
        return kind.of_tables or kind
    if name.endswith(CHOOSING):
        return None
    return kind.of_experts or kind if EXPERTS in name else kind


def _runs(types: Sequence[str]) -> list[slice]:
    """Which of them follow each other and are alike."""
    edges = [0, *(i for i in range(1, len(types)) if types[i] != types[i - 1]), len(types)]
    return [slice(*edge) for edge in itertools.pairwise(edges)]


def _placed(matrix: Matrix, first: int, total: int) -> Matrix:
    """A matrix as a piece; one that is whole stays the same."""
    return replace(matrix, first=first, total=total) if total else matrix


def _at(tensors: Mapping[str, Any], name: str, layer: int | None) -> Any:
    return tensors[name] if layer is None else tensors[name][layer]


def _n_floats(n_strips: int, n: int, group: int, kind: Kind) -> int:
    """What a matrix of n columns takes in that kind, of a tensor whose weights share scales in groups, if in any."""
    return n_strips * math.prod(kind.strip_shape(n, kind.group(n, group)))


def _n_more(part: Part, kind: Kind) -> int:
    """What the kind that a matrix may become instead takes beyond its own."""
    kinds = (kind.instead or kind, kind)
    instead, own = (_n_floats(part.n_strips, part.n, 0, each) for each in kinds)
    return max(instead - own, 0)


def _pack_vector(vector: Vector, tensors: Mapping[str, Any]) -> Float32:
    out, at = zeros(*vector.shape), 0
    for i, (place, size) in enumerate(zip(vector.tensors, vector.sizes, strict=True)):
        padded = zeros(*vector.shape[:-1], round_up(size, STRIP_ROWS))
        padded[..., :size] = floats(_at(tensors, *place)[:])
        if vector.in_turns:
            out.reshape(-1, len(vector.sizes), STRIP_ROWS)[:, i] = padded.reshape(-1, STRIP_ROWS)
        else:
            out[..., at : at + padded.shape[-1]] = padded
        at += padded.shape[-1]
    return out
