"""What is compared: the losses of the paper's tables, and the settings they are trained in."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Iterable, NamedTuple, Sequence

D_VALUES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # the paper's, and lower ones
M2_VALUES = (0.1, 0.2, 0.3, 0.5)
INTRA = "dsoftmax_intra"  # the loss of `trial.IntraOnly`
MODEL_FILE = "model-0000.params"  # that a trial leaves, with its class weights
PAPERS_WAY = {"batch_classes": "added"}  # of Rand-Softmax, Rand-ArcFace and HF-Softmax
MEAN = {"mean_over_rows": True}


@dataclass(frozen=True)
class Trial:
    """One training run, and everything that decides what it finds.

    Attributes
    ----------
    data : str
        The name of a dataset that `people` has cut.
    loss : str
        The preset.
    seed : int
        Of the initial weights, the order of the images and all draws. Trials of one seed have the
        same images in the same order, and begin with the same network.
    options : dict
        Of the loss.
    flags : dict
        Other flags of ``train.py``.
    begin : Trial, optional
        The trial whose network and class weights this one begins with.
    """

    data: str
    loss: str
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    begin: Trial | None = None

    @classmethod
    def from_json(cls, described: dict[str, Any]) -> Trial:
        """Return the trial that ``dataclasses.asdict`` has described."""
        begin = described["begin"] and cls.from_json(described["begin"])
        return cls(**{**described, "begin": begin})

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def name(self) -> str:
        """A name that no other trial has."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.loss}-{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Cell:
    """A loss with its options, trained with several seeds.

    Attributes
    ----------
    name : str
    label : str
        As the paper's tables call it.
    loss : str
        The preset.
    options : dict
        What differs from the preset's, beside the scale.
    """

    name: str
    label: str
    loss: str
    options: dict[str, Any] = field(default_factory=dict)

    def termination_point(self, scale: float, negatives: float) -> float:
        """Return the cosine where the intra-class gradient ends, if negatives are orthogonal."""
        from dsoftmax.losses.presets import resolve

        spec = resolve(self.loss, {"scale": scale, **self.options})
        return spec.make_criterion().termination_point(math.log(max(negatives, 1)))


@dataclass(frozen=True)
class Setting:
    """Everything but the loss that decides a trial.

    Attributes
    ----------
    name, title : str
    data : str
        The name of a dataset that `people` has cut.
    scale : float
        The scale s of all losses.
    part : int
        The main sampling rate is 1 / part; others are four times as high and as low.
    seeds : int
        Trials of each cell, with the seeds 1, 2 and so on.
    flags : dict
        Of ``train.py``.
    foundation : (Cell, dict), optional
        The loss and the flags of the network that all trials of a seed begin with. Comparing losses
        on the way from random weights would compare how fast they begin, for most of the time that
        two cores have.
    only : tuple of str
        The cells that have trials; by default all.
    """

    name: str
    title: str
    data: str
    scale: float
    part: int
    seeds: int
    flags: dict[str, Any]
    foundation: tuple[Cell, dict[str, Any]] | None = None
    only: tuple[str, ...] = ()

    def is_wanted(self, cell: Cell) -> bool:
        """Say whether the setting has trials of a cell."""
        return not self.only or cell.name in self.only

    def trial(self, cell: Cell, seed: int) -> Trial:
        """Return the trial of a cell with a seed."""
        begin = None
        if self.foundation:
            loss, flags = self.foundation
            options = {"scale": self.scale, **loss.options}
            begin = Trial(self.data, loss.loss, seed, options, {**self.flags, **flags})
        options = {"scale": self.scale, **cell.options}
        return Trial(self.data, cell.loss, seed, options, self.flags, begin)

    def trials(self, cells: Iterable[Cell], seeds: int | None = None) -> list[Trial]:
        """Return the trials of some cells: all of one seed before those of the next."""
        wanted = [cell for cell in cells if self.is_wanted(cell)]
        numbers = range(1, min(seeds or self.seeds, self.seeds) + 1)
        return [self.trial(cell, seed) for seed in numbers for cell in wanted]


def varied(name: str, label: str, loss: str, option: str, values: Sequence, **others) -> list[Cell]:
    """Return one cell per value of an option."""
    return [Cell(f"{name}-{value}", label, loss, {option: value, **others}) for value in values]


def tuned_cells(part: int) -> dict[str, list[Cell]]:
    """Return the groups of which one cell is chosen on the validation people, by name.

    Parameters
    ----------
    part : int
        The main sampling rate is 1 / part.
    """
    rate = {"sample_rate": 1 / part}
    arcface = {**rate, **PAPERS_WAY}
    return {
        "d-best": varied("d", "D-Softmax", "dsoftmax", "d", D_VALUES),
        "arcface-best": varied("arcface", "ArcFace", "arcface", "m2", M2_VALUES),
        "k": varied("k", "D-Softmax-K", "dsoftmax_k", "d", D_VALUES, **rate),
        "rand-arcface": varied(
            "rand-arcface", "Rand-ArcFace", "rand_arcface", "m2", M2_VALUES, **arcface
        ),
    }


def fixed_cells(best: dict[str, Cell], part: int) -> dict[str, Cell]:
    """Return the cells that are not tuned, by name.

    Parameters
    ----------
    best : dict of str to Cell
        The chosen cells of `tuned_cells`. A cell that needs the d or the margin of one that is
        missing is left out.
    part : int
        As for `tuned_cells`.
    """
    rate = {"sample_rate": 1 / part}
    more, fewer = {"sample_rate": 4 / part}, {"sample_rate": 1 / (4 * part)}
    cells = [
        Cell("softmax", "Softmax", "nsoftmax"),
        Cell("sphereface", "SphereFace", "sphereface"),
        Cell("rand-softmax", "Rand-Softmax", "rand_softmax", {**rate, **PAPERS_WAY}),
        Cell("rand-counted", "Rand-Softmax, Partial FC's way", "rand_softmax", rate),
        Cell("hf-softmax", "HF-Softmax", "hf_softmax", {**rate, **PAPERS_WAY}),
        Cell("intra-0.9", "D intra alone", INTRA, {"d": 0.9, **rate}),
    ]
    if "d-best" in best:
        d = {"d": best["d-best"].options["d"]}
        cells += [
            Cell("b-more", "D-Softmax-B", "dsoftmax_b", {**d, **more}),
            Cell("b", "D-Softmax-B", "dsoftmax_b", {**d, **rate}),
            # The inter part is then as strong as that of all samples.
            Cell("b-mean", "D-Softmax-B, mean over its rows", "dsoftmax_b", {**d, **rate, **MEAN}),
            Cell("d+softmax", "D intra + Softmax inter", "dsoftmax_softmax", d),
            Cell("intra", "D intra alone", INTRA, {**d, **rate}),
        ]
    if "d-best" in best and "arcface-best" in best:
        both = {**d, "m2": best["arcface-best"].options["m2"]}
        cells.append(Cell("d+arcface", "D intra + ArcFace inter", "dsoftmax_arcface", both))
    if "k" in best:
        d = {"d": best["k"].options["d"]}
        batch = {**d, **rate, **PAPERS_WAY}
        cells += [
            Cell("k-more", "D-Softmax-K", "dsoftmax_k", {**d, **more}),
            Cell("k-fewer", "D-Softmax-K", "dsoftmax_k", {**d, **fewer}),
            Cell("k+batch", "D-Softmax-K and the batch's classes", "dsoftmax_k", batch),
            Cell("k+softmax", "D intra + Softmax inter", "dsoftmax_softmax", batch),
        ]
    return {cell.name: cell for cell in cells}


def cell_names(part: int) -> list[str]:
    """Return the names of all cells, as `trials.csv` has them."""
    groups = tuned_cells(part)
    any_of_each = {name: group[0] for name, group in groups.items()}
    return [cell.name for group in groups.values() for cell in group] + [
        *fixed_cells(any_of_each, part)
    ]


class Target(NamedTuple):
    """A table or figure: its cells in order, and the groups of `tuned_cells` they depend on."""

    rows: tuple[str, ...]
    tuned: tuple[str, ...]


TARGETS = {
    "table1": Target(
        ("softmax", "sphereface", "arcface-best", *(f"d-{d}" for d in D_VALUES))
        + ("d+softmax", "d+arcface"),
        ("d-best", "arcface-best"),
    ),
    "table2": Target(
        ("d-best", "b-more", "b", "b-mean", "k-more", "k", "k-fewer", "rand-softmax")
        + ("rand-arcface", "hf-softmax", "rand-counted", "k+batch", "k+softmax"),
        ("d-best", "k", "rand-arcface"),
    ),
    "table3": Target(("softmax", "rand-softmax", "hf-softmax", "k"), ("k",)),
    "figure4": Target(("softmax", "intra-0.9", "k-0.9", "intra", "k"), ("d-best", "k")),
    "figure5": Target(tuple(f"{kind}-{d}" for kind in ("d", "k") for d in D_VALUES), ()),
}
