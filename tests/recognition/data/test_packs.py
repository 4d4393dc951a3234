import contextlib
import os
import pickle
import pickletools
import struct
import tracemalloc

import cv2
import numpy as np
import pytest

from dsoftmax.recognition.data.packs import PackError, read_pack, write_pack


@pytest.fixture
def pack_path(tmp_path):
    return tmp_path / "lfw.bin"


@pytest.fixture
def images(jpeg):
    return [jpeg() for _ in range(4)]


def check(pack_path, images, issame=(True, False)):
    pack = read_pack(pack_path)
    assert [image.tobytes() for image in pack.images] == list(images)
    assert all(image.dtype == np.uint8 and image.ndim == 1 for image in pack.images)
    assert pack.issame.dtype == bool
    assert pack.issame.tolist() == list(issame)
    assert (pack.name, len(pack)) == ("lfw", len(issame))


def test_written_pack_is_plain_bytes(pack_path, images):
    write_pack(pack_path, images, np.array([1, 0], bool))
    with open(pack_path, "rb") as file:
        content = pickle.load(file, encoding="bytes")  # as insightface's load_bin does
    assert content == (images, [True, False])
    assert {type(image) for image in content[0]} == {bytes}
    check(pack_path, images)


def test_writer_checks(pack_path, images):
    with pytest.raises(PackError, match="1 pairs need 2 images, it has 4"):
        write_pack(pack_path, images, [True])
    with pytest.raises(PackError, match="no pair"):
        write_pack(pack_path, [], [])
    assert not pack_path.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "as_entry",
    [
        bytes,
        bytearray,
        lambda image: image.decode("latin1"),
        lambda image: np.frombuffer(image, np.uint8),
        lambda image: np.frombuffer(image, np.uint8)[:, None],
        lambda image: np.frombuffer(image, np.uint8).copy(),
    ],
    ids=["bytes", "bytearray", "str", "array", "column", "writable array"],
)
@pytest.mark.parametrize(
    "as_issame",
    [list, tuple, np.array, lambda flags: [np.bool_(f) for f in flags], lambda flags: [1, 0]],
    ids=["list", "tuple", "array", "numpy bools", "ints"],
)
def test_every_protocol_and_entry(pack_path, images, protocol, as_entry, as_issame):
    content = [as_entry(image) for image in images], as_issame([True, False])
    pack_path.write_bytes(pickle.dumps(content, protocol))
    check(pack_path, images)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_numpy_two_names(pack_path, images, protocol):
    content = (
        [np.frombuffer(image, np.uint8) for image in images],
        [np.bool_(True), np.bool_(False)],
    )
    data = pickle.dumps(content, protocol)
    renamed = b""
    position = 0
    # Rename numpy.core to numpy._core as numpy 2 would, with the length prefix where there is one.
    while True:
        found = data.find(b"numpy.core.", position)
        if found < 0:
            break
        name_end = min(
            end for end in (data.find(b"\n", found), data.find(b"\x94", found)) if end > 0
        )
        name = data[found:name_end]
        if data[found - 2 : found - 1] == b"\x8c":  # SHORT_BINUNICODE
            renamed += data[position : found - 1] + bytes([len(name) + 1])
        else:
            renamed += data[position:found]
        renamed += name.replace(b"numpy.core.", b"numpy._core.")
        position = name_end
    renamed += data[position:]
    if protocol >= 4:  # the frame's length changed: leave the frame out
        renamed = renamed[:2] + renamed[11:] if renamed[2:3] == b"\x95" else renamed
    assert b"numpy._core." in renamed
    pack_path.write_bytes(renamed)
    check(pack_path, images)


def python2_string(data: bytes) -> bytes:
    return b"T" + struct.pack("<i", len(data)) + data  # BINSTRING


def test_python2_pickle_of_str(pack_path, images):
    """Protocol 2 as Python 2's cPickle writes (list of str, list of bool)."""
    body = b"\x80\x02" + b"](" + b"".join(map(python2_string, images)) + b"e"
    pack_path.write_bytes(body + b"](\x88\x89e\x86.")
    check(pack_path, images)


def test_python2_pickle_in_text(pack_path, images):
    """Protocol 0, as Python 2's pickle.dump writes by default."""
    lines = [b"(lp0\n"]
    for number, image in enumerate(images):
        literal = repr(image)[1:].encode()  # Python 2 has no b prefix
        lines.append(b"S" + literal + b"\np%d\na" % (number + 1))
    pack_path.write_bytes(b"(" + b"".join(lines) + b"(lp9\nI01\naI00\natp10\n.")
    check(pack_path, images)


def test_python2_pickle_of_arrays(pack_path, images):
    """Protocol 2 of numpy arrays whose raw data is a Python 2 str."""

    def array(image: bytes) -> bytes:
        minus_one = b"J\xff\xff\xff\xff"
        dtype_state = b"(K\x03U\x01|NNN" + minus_one + minus_one + b"K\x00tb"
        dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R" + dtype_state
        start = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        shape = b"J" + struct.pack("<i", len(image)) + b"\x85"
        return start + b"(K\x01" + shape + dtype + b"\x89" + python2_string(image) + b"tb"

    body = b"\x80\x02](" + b"".join(map(array, images)) + b"e"
    pack_path.write_bytes(body + b"](\x88\x89e\x86.")
    check(pack_path, images)


@pytest.mark.parametrize("extension", [".jpg", ".png"])
def test_any_size_and_format_decodes_to_rgb(pack_path, extension):
    red = np.zeros((40, 24, 3), np.uint8)
    red[:, :, 2] = 255  # OpenCV's order
    encoded = cv2.imencode(extension, red)[1].tobytes()
    write_pack(pack_path, [encoded] * 2, [True])
    image = read_pack(pack_path).decode(1)
    assert image.shape == (40, 24, 3)
    np.testing.assert_allclose(image[20, 12], [255, 0, 0], atol=3)


def test_broken_image_names_its_pair(pack_path, images):
    write_pack(pack_path, [*images[:3], images[3][:200]], [True, False])
    with pytest.raises(PackError, match="lfw: image 3 of pair 1: the JPEG has no end"):
        read_pack(pack_path).decode(3)


class Hostile:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, "system"),
        (eval, "builtins.eval"),
        (exec, "builtins.exec"),
        (getattr, "builtins.getattr"),
        (np.load, "numpy.load"),
        (np.fromfile, "fromfile"),
        (pickle.loads, "loads"),
    ],
)
def test_hostile_pickle_is_refused_by_name(pack_path, tmp_path, protocol, function, name):
    trace = tmp_path / "trace"
    payload = f"open({str(trace)!r}, 'w')" if function is not os.system else f"touch {trace}"
    pack_path.write_bytes(pickle.dumps(([Hostile(function, payload)], [True]), protocol))
    with pytest.raises(PackError, match=rf"lfw\.bin: refused: the pickle asks for \S*{name}"):
        read_pack(pack_path)
    assert not trace.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'touch %s'\ntR.",  # GLOBAL, REDUCE
        b"(S'touch %s'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'touch %s'\no.",  # OBJ
        b"\x80\x04\x8c\x02os\x8c\x06system\x93(S'touch %s'\ntR.",  # STACK_GLOBAL
        b"\x80\x02cos\nsystem\n(S'touch %s'\nt\x81.",  # NEWOBJ
        b"Pnowhere\n.",  # PERSID
        b"\x80\x02\x82\x01.",  # EXT1
        b"c__main__\n__dict__\n.",
        b"cnumpy.core.multiarray\n_reconstruct\n(dS'x'\nI1\nsb.",  # BUILD on a function
        b"cnumpy.core.multiarray\n_reconstruct\n(N(dS'_build'\nI1\nstb.",  # slot state
        b"cnumpy\ndtype\n(S'O'\nI0\nI1\ntR.",  # object arrays
        b"cnumpy\ndtype.__init__\n.",
        b"c_codecs\nencode\n(S'x'\nS'rot13'\ntR.",
        b"]r\xff\xff\xff\x7f.",  # LONG_BINPUT: a memo of 2^31 entries
        b"}.",
        b"(lp0\n(lp1\nt.",
        b"",
        b"\x80\x02](",
        b"no pickle at all",
    ],
)
def test_opcodes_of_attack_and_damage(pack_path, tmp_path, code):
    trace = tmp_path / "trace"
    pack_path.write_bytes(code.replace(b"%s", os.fsencode(trace)))
    with pytest.raises(PackError, match=r"lfw\.bin: "):
        read_pack(pack_path)
    assert not trace.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"\x80\x05\x96" + (3 << 30).to_bytes(8, "little") + b".",  # BYTEARRAY8
        b"\x80\x04\x8e" + (3 << 30).to_bytes(8, "little") + b".",  # BINBYTES8
        b"\x80\x03B" + (3 << 30).to_bytes(4, "little") + b".",  # BINBYTES
        b"\x80\x04\x95" + (3 << 30).to_bytes(8, "little") + b".",  # FRAME
        # One text of 4 MB, encoded again and again.
        b"\x80\x02X" + (4 << 20).to_bytes(4, "little") + bytes(4 << 20) + b"q\x000]q\x01"
        b"c_codecs\nencode\nq\x020(" + 300 * b"h\x02h\x00X\x06\x00\x00\x00latin1\x86R" + b"l.",
    ],
    ids=["bytearray", "bytes8", "bytes", "frame", "encode"],
)
def test_few_bytes_do_not_fill_the_memory(pack_path, code):
    pack_path.write_bytes(code)
    tracemalloc.start()
    try:
        with pytest.raises(PackError, match=r"lfw\.bin: "):
            read_pack(pack_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(code) + (1 << 20)


def test_the_reader_itself_cannot_be_changed(pack_path, images):
    """After attacks on its stand-ins, it still reads a sound pack."""
    for state in (b"(dS'__call__'\nI1\nsb.", b"(N(dS'__class__'\nI1\nstb."):
        for name in (b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"c_codecs\nencode\n"):
            pack_path.write_bytes(name + state)
            with pytest.raises(PackError):
                read_pack(pack_path)
    write_pack(pack_path, images, [True, False])
    check(pack_path, images)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (([b"a", b"b", b"c"], [True]), "1 pairs need 2 images, it has 3"),
        (([b"a", b""], [True]), "image 1 has no bytes"),
        (([b"a", 7], [True]), "image 1 must be bytes or a uint8 array, not int"),
        (([b"a", "\u4e00"], [True]), "image 1 is text"),
        (([b"a", np.zeros(3, np.int64)], [True]), "image 1 must be .*int64 array"),
        (([b"a", b"b"], [2]), "pair 0: issame must be True or False"),
        (([b"a", b"b"], ["yes"]), "pair 0: issame must be True or False, not str"),
        (([], []), "no pair"),
        (b"bytes", r"a pack is \(images, issame\), this is a bytes"),
        ((1, 2), "a pack is two lists, not a int"),
    ],
)
def test_pickles_that_are_no_pack(pack_path, content, message):
    pack_path.write_bytes(pickle.dumps(content))
    with pytest.raises(PackError, match=message):
        read_pack(pack_path)


def test_random_damage_never_escapes(pack_path, images, rng):
    """Whatever the bytes, the answer is a pack or a PackError."""
    sound = pickle.dumps(([np.frombuffer(i, np.uint8)[:40] for i in images], [True, False]), 2)
    assert any(op.name == "REDUCE" for op, _, _ in pickletools.genops(sound))
    for _ in range(300):
        damaged = bytearray(sound)
        for place in rng.integers(0, len(damaged), 3):
            damaged[place] = rng.integers(256)
        pack_path.write_bytes(damaged)
        with contextlib.suppress(PackError):
            read_pack(pack_path)


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "pairs", "shape"),
    [
        ("lfw/lfw_val", 1200, (112, 112, 3)),
        ("lfw/lfw_600", 600, (112, 112, 3)),
        ("omniglot/val", 3000, (32, 32, 3)),
    ],
)
def test_real_packs(real_data, name, pairs, shape):
    pack = read_pack(real_data / f"{name}.bin")
    assert len(pack) == pairs
    assert pack.issame.sum() == pairs // 2
    assert {pack.decode(image).shape for image in range(0, 2 * pairs, 97)} == {shape}
