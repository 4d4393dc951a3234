"""AgeDB's and CFP's lists of pairs, written as those are distributed."""

import subprocess

import numpy as np
import pytest
from scipy.io import savemat

from dsoftmax.recognition.data.pairs import make_pack, read_pairs


def cell(*entries):
    """Make what MATLAB calls a cell array, (1, n)."""
    made = np.empty((1, len(entries)), object)
    made[0, :] = entries
    return made


@pytest.fixture
def agedb(tmp_path, jpeg):
    folds = [
        [("Ann_1_20_f_x", "Ann_2_50_f_x"), ("Ann_1_20_f_x", "Bob_1_40_m_x")],
        [("Bob_1_40_m_x", "Bob_2_70_m_x"), ("Bob_2_70_m_x", "Ann_2_50_f_x")],
    ]
    splits = np.empty((len(folds), 1), object)
    for number, pairs in enumerate(folds):
        table = np.empty((2, len(pairs)), object)
        for column, pair in enumerate(pairs):
            for row, name in enumerate(pair):
                table[row, column] = np.array(
                    [(name, 30)], dtype=[("name", object), ("age", object)]
                ).reshape(1, 1)
        splits[number, 0] = np.array([(table,)], dtype=[("pairs", object)]).reshape(1, 1)
    images = tmp_path / "03_Protocol_Images"
    images.mkdir()
    for name in {name for pairs in folds for pair in pairs for name in pair}:
        (images / f"{name}.jpg").write_bytes(jpeg(112, 112))
    savemat(tmp_path / "protocol.mat", {"splits": splits})
    return tmp_path, folds


def test_agedb(agedb):
    folder, folds = agedb
    pairs = read_pairs(str(folder / "protocol.mat"), str(folder))
    names = [pair for pairs_of_fold in folds for pair in pairs_of_fold]
    assert [(pair.first, pair.second) for pair in pairs] == [
        tuple(str(folder / "03_Protocol_Images" / f"{name}.jpg") for name in two) for two in names
    ]
    assert [pair.issame for pair in pairs] == [True, False, True, False]
    assert pairs[1].people == ("Ann", "Bob")
    assert len(make_pack("agedb_30", pairs).pack) == 4


def test_another_mat(tmp_path):
    savemat(tmp_path / "other.mat", {"x": 1})
    (tmp_path / "none.mat").write_bytes(b"no mat at all")
    for name in ("other.mat", "none.mat"):
        with pytest.raises(ValueError, match=rf"{name}: not AgeDB's list of pairs"):
            read_pairs(str(tmp_path / name), str(tmp_path))


def test_a_mat_that_crashes_its_reader(agedb, monkeypatch):
    folder, _ = agedb
    crash = "import ctypes; ctypes.string_at(0)"
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: run([command[0], "-c", crash], **options)
    )
    with pytest.raises(ValueError, match=r"protocol\.mat: not AgeDB's .* \(SciPy can't read it\)"):
        read_pairs(str(folder / "protocol.mat"), str(folder))


@pytest.fixture
def cfp(tmp_path):
    protocol = tmp_path / "Protocol"
    for fold in ("01", "02"):
        split = protocol / "Split" / "FP" / fold
        split.mkdir(parents=True)
        (split / "same.txt").write_text("1,1\n2,2\n")
        (split / "diff.txt").write_text("1,2\n")
    for letter, name in (("F", "frontal"), ("P", "profile")):
        lines = [f"{n} ../Data/Images/00{n}/{name}/01.jpg\n" for n in (1, 2)]
        (protocol / f"Pair_list_{letter}.txt").write_text("".join(lines))
    return tmp_path


def test_cfp(cfp):
    pairs = read_pairs(str(cfp / "Protocol" / "Split" / "FP"), str(cfp))
    assert [pair.issame for pair in pairs] == [True, True, False] * 2
    images = cfp / "Data" / "Images"
    assert pairs[2].first == str(images / "001" / "frontal" / "01.jpg")
    assert pairs[2].second == str(images / "002" / "profile" / "01.jpg")
    assert pairs[2].people == ("001", "002")


@pytest.mark.parametrize("line", ["1,3", "1;2", "1", ""])
def test_a_line_of_cfp_that_is_no_pair(cfp, line):
    (cfp / "Protocol" / "Split" / "FP" / "02" / "diff.txt").write_text(f"1,2\n{line}\n")
    with pytest.raises(ValueError, match=r"02/diff\.txt: line 2 must be `i,j`"):
        read_pairs(str(cfp / "Protocol" / "Split" / "FP"), str(cfp))


def test_other_folders(cfp):
    with pytest.raises(ValueError, match="a folder of pairs is CFP's"):
        read_pairs(str(cfp / "Protocol" / "Split"), str(cfp))
    (cfp / "Protocol" / "Split" / "FF").mkdir()
    with pytest.raises(ValueError, match="there is no folder 01"):
        read_pairs(str(cfp / "Protocol" / "Split" / "FF"), str(cfp))
