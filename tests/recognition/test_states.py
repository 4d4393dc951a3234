import json
import os
import zlib

import numpy as np
import pytest

from dsoftmax.recognition import states

BLOCK = 100


@pytest.fixture
def write(tmp_path, monkeypatch, rng):
    """Return a function that writes a state of files of random bytes in blocks of 100."""
    monkeypatch.setattr(states, "BLOCK_SIZE", BLOCK)

    def write_state(step):
        path = tmp_path / f"state-{step:08d}"
        path.mkdir()
        writer = states.StateWriter(str(path))
        for number, name in enumerate(states.FILES):
            with writer.file(name) as file:
                for size in (7, 90, 250 + number):
                    file.write(rng.bytes(size))
        writer.describe({"step": step, "num_classes": 5, "embedding_size": 4, "rate": 0.1})
        return path

    return write_state


def damage(path, place=0):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_checksums_of_blocks(rng):
    content = rng.integers(0, 256, 1000, np.uint8)
    found = states.BlockChecksums(300)
    for part in np.split(content, [1, 2, 299, 300, 950]):
        found.update(part)
    expected = [zlib.crc32(content[start : start + 300]) for start in range(0, 1000, 300)]
    assert [int(value, 16) for value in found.sums] == expected


def test_a_sound_state(write):
    path = write(3)
    read = []
    check = states.check_state(str(path), read.append)
    assert check == states.Check(str(path), 3, 4 * 347 + 6, True, [])
    assert sum(read) == check.size
    assert states.read_facts(str(path))["rate"] == 0.1


@pytest.mark.parametrize("name", states.FILES)
@pytest.mark.parametrize("block", [0, 1, 3])
def test_a_flipped_bit_is_found(write, name, block):
    path = write(3)
    damage(path / name, BLOCK * block + 40)
    (problem,) = states.check_state(str(path)).problems
    assert (problem.file, problem.block) == (name, block)
    assert f"block {block + 1} of 4, from byte {BLOCK * block}" in problem.why


def test_every_byte_of_the_description_counts(write):
    path = write(3) / "state.json"
    content = path.read_bytes()
    for place in range(len(content)):
        if content[place] in b" \n":
            continue
        damage(path, place)
        if b'"format": 1,' in path.read_bytes():
            assert not states.check_state(str(path.parent)).is_sound, content[place - 9 : place + 9]
        path.write_bytes(content)


def test_checksums_that_lost_their_name(write):
    path = write(3)
    description = path / states.DESCRIPTION
    description.write_text(description.read_text().replace('"checksums"', '"checkums"'))
    with pytest.raises(states.DamagedStateError, match=r"state\.json: it is not what was written"):
        states.read_facts(str(path))


def test_several_problems(write):
    path = write(3)
    (path / "classes.npy").unlink()
    (path / "head.states").write_bytes(b"x")
    damage(path / "backbone.params", 5)
    damage(path / "backbone.params", 205)
    problems = states.check_state(str(path)).problems
    assert [(problem.file, problem.block) for problem in problems] == [
        ("backbone.params", 0),
        ("backbone.params", 2),
        ("classes.npy", None),
        ("head.states", None),
    ]
    assert str(problems[2]) == "classes.npy: there is no such file"
    assert str(problems[3]) == "head.states: it has 1 bytes instead of 350"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is no JSON"),
        ("[]", "it does not describe a state"),
        ("{}", "it does not describe a state"),
        ('{"format": 1, "checksums": []}', "its checksum differs"),
        ('{"format": 1, "files": []}', "it does not describe all of a state"),
        ('{"format": 1, "step": 3, "files": {"classes.npy": "5"}}', "all of a state"),
    ],
)
def test_a_damaged_description(write, text, message):
    path = write(3)
    (path / "state.json").write_text(text)
    (problem,) = states.check_state(str(path)).problems
    assert message in str(problem)
    assert not states.is_whole(str(path))


def test_the_newest_sound_state_is_chosen(write, tmp_path):
    assert states.choose_state(str(tmp_path / "nowhere")) == (None, [])
    for step in (1, 2, 3, 4):
        write(step)
    damage(tmp_path / "state-00000004" / "classes.npy")
    (tmp_path / "state-00000003" / "state.json").unlink()
    chosen, damaged = states.choose_state(str(tmp_path))
    assert chosen.step == 2
    assert [os.path.basename(check.path) for check in damaged] == [
        "state-00000004",
        "state-00000003",
    ]


def test_another_version_is_not_passed_over(write, tmp_path):
    write(1)
    path = write(2)
    (path / "state.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(states.UnknownFormatError, match="of format 2, this version reads format 1"):
        states.choose_state(str(tmp_path))


def test_none_is_sound(write, tmp_path):
    damage(write(1) / "classes.npy")
    with pytest.raises(states.DamagedStateError, match="no sound state to go on from"):
        states.choose_state(str(tmp_path))


def test_pruning_leaves_what_it_does_not_know(write, tmp_path):
    for step in range(1, 7):
        write(step)
    (tmp_path / "state-00000001" / "state.json").write_text(json.dumps({"format": 2}))
    (tmp_path / "state-00000002" / "head.states").write_bytes(b"")
    (tmp_path / "state-mine").mkdir()
    states.prune_states(str(tmp_path), 2)
    assert sorted(os.listdir(tmp_path)) == [
        "state-00000001",
        "state-00000002",
        "state-00000005",
        "state-00000006",
        "state-mine",
    ]


def test_nothing_that_was_set_aside_is_lost(write):
    path = str(write(1))
    assert states.set_aside(path) == f"{path}.damaged"
    path = str(write(1))
    assert states.set_aside(path) == f"{path}.damaged-2"
