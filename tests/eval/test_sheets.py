"""Sheets show what they are given, whatever its size and name."""

import cv2
import numpy as np
import pytest

from dsoftmax.eval.sheets import SIDE, Tile, draw_sheet, save_sheet


def test_faces_keep_their_colours_and_places():
    red, blue = (np.full((50, 50, 3), colour, np.uint8) for colour in ((255, 0, 0), (0, 0, 255)))
    sheet = draw_sheet([[Tile(red), Tile(), Tile(blue)], [Tile(word="x", ground="#00ff00")]])
    for colour, count in (((255, 0, 0), SIDE**2), ((0, 0, 255), SIDE**2), ((0, 255, 0), 12000)):
        assert SIDE**2 >= np.count_nonzero((sheet == colour).all(axis=2)) >= count
    red_columns = np.nonzero((sheet == (255, 0, 0)).all(axis=2))[1]
    blue_columns = np.nonzero((sheet == (0, 0, 255)).all(axis=2))[1]
    assert blue_columns.min() - red_columns.min() == 2 * (SIDE + 8)


def test_wide_faces_are_not_distorted():
    face = np.full((56, 112, 3), (255, 0, 0), np.uint8)
    sheet = draw_sheet([[Tile(face)]])
    assert np.count_nonzero((sheet == (255, 0, 0)).all(axis=2)) == 56 * 112


def test_any_name(recwarn):
    face = np.zeros((20, 20, 3), np.uint8)
    names = ["Jürgen Ångström", "Пётр", "名前", "x" * 500, "bad\udcff.jpg", ""]
    sheet = draw_sheet([[Tile(face, [name]) for name in names]], ["a title " * 30])
    assert sheet.shape[1] > 6 * SIDE
    assert not recwarn


def test_files(tmp_path):
    sheet = np.zeros((30, 40, 3), np.uint8)
    sheet[:, :, 0] = 200
    save_sheet(sheet, str(tmp_path / "new" / "sheet.png"))
    np.testing.assert_array_equal(cv2.imread(str(tmp_path / "new/sheet.png"))[:, :, ::-1], sheet)
    with pytest.raises(ValueError, match=r"sheet.gif: a picture is a .png or a .jpg"):
        save_sheet(sheet, str(tmp_path / "sheet.gif"))
