"""A gallery: the faces of people one wants to find, as vectors on disk.

``gallery.json`` says which model has embedded them and lists the parts. Building a gallery writes
its first part, each addition another one: ``part-<n>.vectors.npy``, ``part-<n>.scales.npy`` for
int8, and ``part-<n>.csv``, the list of the images. A part counts once ``gallery.json``
lists it, so that an interrupted addition leaves the gallery as it was.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple, Sequence

import numpy as np

from dsoftmax.eval.embedding_files import Embedded, Job, csv_path, embed_to_file
from dsoftmax.eval.models import Model, ModelName
from dsoftmax.eval.sheets import BLACK, GREY, Tile, draw_sheet
from dsoftmax.eval.top_matches import DTYPES, Block, compress, top_matches
from dsoftmax.recognition.common.arrays import map_npy
from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.data.folders import COLUMNS, Source, parse_row, row_of
from dsoftmax.recognition.data.identities import read_table, write_table
from dsoftmax.recognition.data.images import FindLandmarks, ImageError
from dsoftmax.recognition.data.inputs import Images, image_files, open_sources

STATE, NEW = "gallery.json", "new.npy"
DTYPE = "int8"
ROWS_AT_ONCE = 1 << 16


class Match(NamedTuple):
    """A person of the gallery, by the face that is most alike."""

    person: str
    path: str
    cosine: float
    images: int  # the person's in the gallery
    row: int  # of the face in the gallery


class Gallery:
    """A gallery on disk.

    Parameters
    ----------
    folder : str

    Attributes
    ----------
    model : str
        The name of the model that has embedded it, as `parse_models` takes it.
    size : (int, int)
        Height and width of its images.
    dtype : {"float32", "float16", "int8"}
    faces : list of Source
        One per row of all parts.
    """

    def __init__(self, folder: str):
        self.folder = folder
        path = os.path.join(folder, STATE)
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path}: there is no such file; build a gallery first")
        try:
            with open(path, encoding="utf-8") as file:
                self._state = json.load(file)
            self.model, self.dtype = self._state["model"], self._state["dtype"]
            self._digest = self._state["digest"]
            self.size = tuple(self._state["size"])
            parts = self._state["parts"]
            self._parts = [(str(part["name"]), int(part["images"])) for part in parts]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: not the description of a gallery") from None
        self.faces = [face for part in self._parts for face in self._faces(*part)]
        people = {face.identity: None for face in self.faces}
        numbers = {person: number for number, person in enumerate(people)}
        self._person_of = np.array([numbers[face.identity] for face in self.faces])
        self._images_of = np.bincount(self._person_of)

    def _faces(self, name: str, images: int) -> list[Source]:
        path = os.path.join(self.folder, f"{name}.csv")
        try:
            faces = [parse_row(row) for row in read_table(path)]
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: not the list of a gallery's images ({error})") from None
        if len(faces) != images:
            raise ValueError(f"{path}: {len(faces)} rows for {images} vectors")
        return faces

    def __len__(self) -> int:
        return len(self.faces)

    @property
    def num_people(self) -> int:
        """The number of people."""
        return len(self._images_of)

    def check(self, model: ModelName) -> None:
        """Refuse a model that has not embedded the gallery: its vectors mean something else."""
        if model.digest() != self._digest:
            raise ValueError(
                f"{self.folder} was built with {self.model}, {model} is another model: their "
                "vectors can't be compared. Give that model, or build a gallery with this one"
            )

    def parts(self) -> list[Block]:
        """Map the vectors from disk."""
        return [self._part(name, images) for name, images in self._parts]

    def _part(self, name: str, images: int) -> Block:
        stem = os.path.join(self.folder, name)
        vectors = map_npy(f"{stem}.vectors.npy")
        if vectors.ndim != 2 or vectors.dtype != self.dtype or len(vectors) != images:
            raise ValueError(
                f"{stem}.vectors.npy: {vectors.dtype} {vectors.shape} instead of {self.dtype} "
                f"vectors of {images} images"
            )
        if self.dtype != "int8":
            return Block(vectors, None)
        scales = map_npy(f"{stem}.scales.npy")
        if scales.shape != (images,) or scales.dtype != np.float32 or not np.isfinite(scales).all():
            raise ValueError(f"{stem}.scales.npy: it is not one finite float32 number per image")
        return Block(vectors, scales)

    def search(
        self, embeddings: np.ndarray, top: int, threshold: float | None = None
    ) -> list[list[Match]]:
        """Find the people who are most alike, each by the best of their images.

        Parameters
        ----------
        embeddings : (q, D)
            Of length 1, made by the gallery's model.
        top : int
            The most people to return per query.
        threshold : float, optional
            Return only those with a higher cosine.

        Returns
        -------
        list of list of Match
            Per query, the best first.
        """
        parts = self.parts()
        widths = {part.vectors.shape[1] for part in parts}
        if widths != {embeddings.shape[1]}:
            raise ValueError(
                f"{self.folder}: vectors of {', '.join(map(str, widths)) or 'no'} numbers, but the "
                f"model's embeddings have {embeddings.shape[1]}"
            )
        found = top_matches(embeddings, parts, top, self._person_of)
        least = -np.inf if threshold is None else threshold
        return [
            [
                self._match(place, float(cosine))
                for place, cosine in zip(places, cosines)
                if place >= 0 and cosine > least
            ]
            for places, cosines in zip(found.places.tolist(), found.cosines)
        ]

    def _match(self, place: int, cosine: float) -> Match:
        face = self.faces[place]
        images = int(self._images_of[self._person_of[place]])
        return Match(str(face.identity), face.path, cosine, images, place)


def draw_matches(
    gallery: Gallery,
    queries: Images,
    readable: Sequence[int],
    matches: Sequence[Sequence[Match]],
    threshold: float | None = None,
) -> np.ndarray:
    """Draw a row per query: its face, then those of the people who are most alike.

    Parameters
    ----------
    gallery : Gallery
    queries : Images
        If they find landmarks, the photographs of the gallery are aligned, too.
    readable : sequence of int
        The numbers of the queries that `matches` are of.
    matches : sequence of sequence of Match
    threshold : float, optional

    Returns
    -------
    (height, width, 3) uint8
        In RGB.
    """
    rows = []
    nobody = "nobody" if threshold is None else f"nobody\nabove {threshold:g}"
    for number, found in zip(readable, matches):
        query = Tile(
            queries.load(number, gallery.size).image,
            ["query", os.path.basename(queries.name(number))],
            border=BLACK,
        )
        rows.append([query, *(_tile(gallery, match, queries.find) for match in found)])
        if not found:
            rows[-1].append(Tile(word=nobody, ground=GREY))
    return draw_sheet(rows)


def _tile(gallery: Gallery, match: Match, find: FindLandmarks | None) -> Tile:
    lines = [f"{match.cosine:.3f}  {match.person}", os.path.basename(match.path)]
    try:
        face = image_files([gallery.faces[match.row]], find).load(0, gallery.size).image
    except ImageError:
        return Tile(word="the image\nis gone", ground=GREY, lines=lines)
    return Tile(face, lines)


class Addition(NamedTuple):
    """What was added to a gallery."""

    added: int  # images
    known: int  # images that the gallery had already
    images: Images  # those that were to be embedded
    embedded: Embedded | None  # None if there was none


def build(
    folder: str,
    people: str,
    embed: Model,
    size: tuple[int, int],
    dtype: str = DTYPE,
    find: FindLandmarks | None = None,
    **options: Any,
) -> Addition:
    """Build a gallery from one folder of images per person, or from a list.

    Parameters
    ----------
    folder : str
        Of the gallery, which must not exist yet.
    people : str
        Holds one folder per person; or a list of images with labels, perhaps with landmarks.
    embed : Model
    size : (int, int)
        Height and width of the model's images.
    dtype : {"int8", "float16", "float32"}
        How the vectors are kept.
    find : callable, optional
        Finds the landmarks of photographs: a `FaceFinder`.
    **options
        ``batch_size`` and ``threads`` of `embed_to_file`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"vectors are kept as {', '.join(DTYPES)}, not as {dtype!r}")
    if os.path.exists(os.path.join(folder, STATE)):
        raise FileExistsError(f"{folder} is a gallery already; `add` adds people to it")
    state = {
        "model": str(embed.name._replace(prefix=os.path.abspath(embed.name.prefix))),
        "digest": embed.name.digest(),
        "size": list(size),
        "dtype": dtype,
        "parts": [],
    }
    return _add(folder, state, people, set(), embed, find, options)


def add(
    gallery: Gallery,
    people: str,
    embed: Model,
    find: FindLandmarks | None = None,
    **options: Any,
) -> Addition:
    """Add the images that the gallery does not have yet.

    Parameters
    ----------
    gallery : Gallery
        As it was opened; open it anew afterwards.
    people, embed, find, **options
        See `build`.
    """
    gallery.check(embed.name)
    known = {face.path for face in gallery.faces}
    return _add(gallery.folder, gallery._state, people, known, embed, find, options)


def _add(
    folder: str,
    state: dict[str, Any],
    people: str,
    known: set[str],
    embed: Model,
    find: FindLandmarks | None,
    options: dict,
) -> Addition:
    sources = [
        source._replace(path=os.path.abspath(source.path)) for source in open_sources(people)
    ]
    new_sources = [source for source in sources if source.path not in known]
    images, skipped = image_files(new_sources, find), len(sources) - len(new_sources)
    if not new_sources:
        return Addition(0, skipped, images, None)
    job = Job(embed, images, tuple(state["size"]), flip=True, normalize=True)
    new = os.path.join(folder, NEW)
    # What another job has left is of no use; what this one has left is taken up.
    embedded = embed_to_file(job, new, overwrite=True, **options)
    unreadable = {row for row, _ in embedded.unreadable}
    rows = [row for row in range(len(images)) if row not in unreadable]
    if not rows:
        raise ValueError(f"{people}: not one of its {len(images)} images can be used")
    name = f"part-{len(state['parts'])}"
    faces = [new_sources[row] for row in rows]
    _write_part(os.path.join(folder, name), np.load(new, mmap_mode="r"), rows, faces, state)
    part = {"name": name, "images": len(rows)}
    with AtomicFile(os.path.join(folder, STATE), "w") as file:
        json.dump({**state, "parts": [*state["parts"], part]}, file, indent=2)
    for path in (new, csv_path(new)):
        os.unlink(path)
    return Addition(len(rows), skipped, images, embedded)


def _write_part(
    stem: str,
    embeddings: np.ndarray,
    rows: Sequence[int],
    faces: Sequence[Source],
    state: dict[str, Any],
) -> None:
    scales = []
    with AtomicFile(f"{stem}.vectors.npy") as file:
        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(state["dtype"])),
            "fortran_order": False,
            "shape": (len(rows), embeddings.shape[1]),
        }
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            block = compress(embeddings[rows[start : start + ROWS_AT_ONCE]], state["dtype"])
            file.write(np.ascontiguousarray(block.vectors))
            scales.append(block.scales)
    if state["dtype"] == "int8":
        with AtomicFile(f"{stem}.scales.npy") as file:
            np.save(file, np.concatenate(scales))
    write_table(f"{stem}.csv", COLUMNS, map(row_of, faces))
