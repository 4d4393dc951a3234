import subprocess
import sys

import numpy as np
import pytest

from dsoftmax.recognition.common.rows import Rows


@pytest.fixture
def parts(rng, tmp_path):
    """Return parts in memory and in files, of several types and layouts, and all their rows."""
    arrays = [
        rng.normal(size=(5, 3)).astype(np.float32),
        rng.normal(size=(1, 3)),
        rng.normal(size=(4, 3)).astype(np.float16),
        np.asfortranarray(rng.normal(size=(6, 3)).astype(np.float32)),
    ]
    for number in (0, 2, 3):
        np.save(tmp_path / f"{number}.npy", arrays[number])
    mapped = [
        arrays[1] if number == 1 else np.load(tmp_path / f"{number}.npy", mmap_mode="r")
        for number in range(4)
    ]
    return mapped, np.concatenate([array.astype(np.float32) for array in arrays])


def test_rows_of_several_parts(parts, rng):
    mapped, whole = parts
    rows = Rows(mapped)
    assert rows.shape == (16, 3)
    index = rng.integers(0, 16, 40)
    np.testing.assert_array_equal(rows.take(index), whole[index])
    np.testing.assert_array_equal(np.concatenate(list(rows.blocks(5))), whole)
    np.testing.assert_array_equal(rows.whole(), whole)


def test_orders_of_orders(parts, rng):
    mapped, whole = parts
    once, twice = rng.permutation(16)[:9], rng.permutation(9)[:4]
    rows = Rows(mapped).ordered(once).ordered(twice)
    np.testing.assert_array_equal(rows.whole(), whole[once][twice])
    both = rows.followed_by(Rows(mapped[:2])).followed_by(rows)
    expected = np.concatenate([whole[once][twice], whole[:6], whole[once][twice]])
    np.testing.assert_array_equal(both.whole(), expected)


def test_a_part_of_a_view(parts):
    mapped, whole = parts
    np.testing.assert_array_equal(Rows([mapped[0][2:4]]).whole(), whole[2:4])


def test_one_file_is_not_copied(parts):
    mapped, _ = parts
    assert Rows(mapped[:1]).whole() is mapped[0]


def test_different_widths(rng):
    with pytest.raises(ValueError, match=r"different widths .*\[2, 3\]"):
        Rows([np.zeros((1, 2)), np.zeros((1, 3))])


def test_memory_holds_a_block(tmp_path):
    """A file of 256 MB goes through a process that grows by less than 64."""
    path = tmp_path / "large.npy"
    np.lib.format.open_memmap(path, "w+", np.float32, (1 << 20, 64))
    code = (
        "import resource, numpy as np\n"
        "from dsoftmax.recognition.common.rows import Rows\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"rows = Rows([np.load({str(path)!r}, mmap_mode='r')])\n"
        "rows = rows.ordered(np.random.default_rng(0).permutation(len(rows)))\n"
        "assert not sum(block.any() for block in rows.blocks())\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 64 << 20
