"""Damage bytes: as a disk, a bad copy, a wrong editor or an attacker would."""

from __future__ import annotations

import random
import re
from typing import Callable

HUGE = [b"-1", b"0", b"99999999999999999999", b"4294967296", b"1e999", b"nan", b"-0.5"]
WORDS = [  # little-endian integers and floats that binary headers may hold
    b"\xff" * 4,
    b"\xff" * 8,
    b"\x00" * 8,
    b"\xff\xff\xff\x7f",
    b"\x00\x00\x00\x80",
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x00\x00\xc0\x7f",  # NaN as float32
]
OTHERS = [
    b"\x89PNG\r\n\x1a\n",
    b"\x80\x04]\x94.",
    b"\x93NUMPY\x01\x00",
    b"PK\x03\x04",
    b"{}",
    b"[]",
]


def flip_bit(content: bytearray, draw: random.Random) -> None:
    """Flip one bit."""
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def change_bytes(content: bytearray, draw: random.Random) -> None:
    """Replace up to four bytes by random ones."""
    for _ in range(draw.randint(1, 4)):
        content[draw.randrange(len(content))] = draw.randrange(256)


def truncate(content: bytearray, draw: random.Random) -> None:
    """Cut the end off, at times everything."""
    del content[draw.choice([0, draw.randrange(len(content)), draw.randrange(len(content))]) :]


def remove(content: bytearray, draw: random.Random) -> None:
    """Remove some bytes in the middle."""
    start = draw.randrange(len(content))
    del content[start : start + draw.randint(1, 16)]


def duplicate(content: bytearray, draw: random.Random) -> None:
    """Repeat a piece, or a whole line."""
    start = draw.randrange(len(content))
    piece = content[start : start + draw.choice([1, 8, 64, 1024])]
    content[start:start] = piece * draw.choice([1, 2, 50])


def replace_number(content: bytearray, draw: random.Random) -> None:
    """Write a huge, negative or otherwise unusual number over one that is text, or binary."""
    numbers = list(re.finditer(rb"\d+", content))
    if numbers and draw.random() < 0.7:
        place = draw.choice(numbers)
        content[place.start() : place.end()] = draw.choice(HUGE)
    else:
        word = draw.choice(WORDS)
        start = 4 * draw.randrange(max(1, min(len(content), 4096) // 4))
        content[start : start + len(word)] = word


def insert_nuls(content: bytearray, draw: random.Random) -> None:
    """Insert NULs."""
    start = draw.randrange(len(content))
    content[start:start] = bytes(draw.choice([1, 4, 512]))


def insert_other_text(content: bytearray, draw: random.Random) -> None:
    """Insert bytes that are no UTF-8, or characters that look like others."""
    start = draw.randrange(len(content))
    content[start:start] = draw.choice(
        [b"\xff\xfe", b"\xe9", "٣".encode(), "²".encode(), b'"', b"\r", b"\t", b","]
    )


def take_for_another(content: bytearray, draw: random.Random) -> None:
    """Put the beginning of another format in front, or instead."""
    content[: draw.choice([0, 4, len(content)])] = draw.choice(OTHERS)


MUTATIONS: list[Callable[[bytearray, random.Random], None]] = [
    flip_bit,
    change_bytes,
    truncate,
    remove,
    duplicate,
    replace_number,
    insert_nuls,
    insert_other_text,
    take_for_another,
]


def mutate(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Return the names of one or two mutations, and the result."""
    damaged, names = bytearray(content), []
    for _ in range(draw.choice([1, 1, 2])):
        if damaged:
            mutation = draw.choice(MUTATIONS)
            mutation(damaged, draw)
            names.append(mutation.__name__)
    return " + ".join(names), bytes(damaged)
