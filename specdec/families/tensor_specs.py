"""Where a family's tensors lie among those of a file, and how they become what blocks take. Knows no format and no family."""

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specdec.config import Config
from specdec.layers.recurrent import fill_rates

GATED, QKV, QKV_BIASES = ("w1", "w3"), ("wq", "wk", "wv"), ("bq", "bk", "bv")  # what may lie in one tensor
OF_EXPERTS = ("experts_w1", "experts_w2", "experts_w3")
EXPERTS_GATED, SHARED_GATED = ("experts_w1", "experts_w3"), ("shared_w1", "shared_w3")
TURNED = ("wq", "wk", "bq", "bk", "q_norm", "k_norm")  # of heads that RoPE turns
CONV_IN, CONV_IN_BIASES = ("conv_b", "conv_c", "conv_x"), ("conv_b_bias", "conv_c_bias", "conv_x_bias")


class Place(NamedTuple):
    """Where a tensor lies: its name, `{}` for the layer, and in which form.

    halves: in each head all first parts of RoPE's pairs, then all second ones; conv: a matrix (inputs, outputs), not (outputs,
    inputs); among: the tensors, by our names, that lie there one behind the other along the outputs, itself one of them;
    alone: of several that there may be, each with its number in its name, it is the only one and has none; turn: of heads that
    lie in turns with those of other tensors, see `FileTensor`; made: how a small one is made of what is stored; each: there is
    one for each expert, by a second `{}` in the name, or all of them are one tensor; step: of outputs in turns those from the
    first on, so many apart; scales: the name of the exponents of such blocks of MXFP4 as lie there; groups: by its layer's
    numbers, in which groups of rows its own lie there.
    """

    name: str
    halves: bool = False
    conv: bool = False
    among: tuple[str, ...] = ()
    alone: bool = False
    turn: tuple[int, int] = (0, 1)
    made: "Making | None" = None
    each: bool = False
    step: tuple[int, int] = (0, 1)
    scales: str = ""
    groups: "Callable[[Config], Groups] | None" = None


class Making(NamedTuple):
    """What a tensor is made of another by, and which shape that one has."""

    numbers: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
    stored: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple


class Groups(NamedTuple):
    """Of rows in n groups, each of parts of those sizes, the parts from `first` on up to `last`: each one's of all groups."""

    n: int
    sizes: tuple[int, ...]
    first: int
    last: int

    @property
    def n_rows(self) -> int:
        """Of all parts."""
        return self.n * sum(self.sizes)

    def places(self) -> npt.NDArray[np.int64]:
        """Where its rows lie, in its order."""
        groups, ends = np.arange(self.n_rows).reshape(self.n, -1), [*itertools.accumulate(self.sizes, initial=0)]
        return np.concatenate([groups[:, ends[i] : ends[i + 1]].reshape(-1) for i in range(self.first, self.last)])


def named(form: str, **stored: str) -> dict[str, Place]:
    """Places, by our names, of tensors whose own names fill a form such as `layers.{}.%s.weight`."""
    return {name: Place(form % each) for name, each in stored.items()}


def together(names: tuple[str, ...], stored: str, each: bool = False, conv: bool = False) -> dict[str, Place]:
    """Places of tensors that are one in the file."""
    return dict.fromkeys(names, Place(stored, among=names, each=each, conv=conv))


def experts_in_one(form: str) -> dict[str, Place]:
    """Places of a folder's experts of which all are one tensor, as transformers 5 has them in memory."""
    return {
        **together(EXPERTS_GATED, form % "gate_up_proj", each=True),
        "experts_w2": Place(form % "down_proj", each=True),
    }


def changed(places: Mapping[str, Place], names: Collection[str], **how: Any) -> dict[str, Place]:
    """The same places, those of some names in another form."""
    return {name: place._replace(**how) if name in names else place for name, place in places.items()}


def _rates(logarithms: npt.NDArray[Any]) -> npt.NDArray[Any]:
    rates = np.empty(logarithms.shape, logarithms.dtype)
    fill_rates(rates, logarithms)
    return rates


# a convolution's weights, of each channel in a row, in a folder with a dimension of 1
TAPS = Making(lambda stored: np.ascontiguousarray(stored.reshape(len(stored), -1).T), lambda own: (own[1], 1, own[0]))
TURNED_TAPS = TAPS._replace(stored=lambda own: own[::-1])
# of a table of biases (E, 2 F) those in turns, of which a tensor (E, F) is
EVEN = Making(lambda stored: stored[:, 0::2], lambda own: (own[0], 2 * own[1]))
ODD = EVEN._replace(numbers=lambda stored: stored[:, 1::2])
ONE_MORE = Making(lambda stored: np.float32(1) + stored)  # of norms of which 1 + w is the weight
RATE = Making(_rates)  # of a delta net's decays
