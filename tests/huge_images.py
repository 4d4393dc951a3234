"""Images of few bytes that announce more pixels than there is memory for, by format."""

import struct
import zlib

import cv2
import numpy as np


def huge_png(height, width):
    """Write a PNG of few bytes that announces many pixels."""

    def chunk(kind, content):
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def patched(extension, marker, skip, form, *numbers):
    """Encode a small image and write other numbers some bytes behind a marker."""
    content = bytearray(cv2.imencode(extension, np.zeros((16, 16, 3), np.uint8))[1].tobytes())
    struct.pack_into(form, content, content.index(marker) + skip, *numbers)
    return bytes(content)


HUGE = {
    "png": huge_png(60000, 60000),
    "jpeg": patched(".jpg", b"\xff\xc0", 5, ">HH", 65500, 65500),
    "jpeg that would be decoded": patched(".jpg", b"\xff\xc0", 5, ">HH", 9000, 9000),
    "bmp": patched(".bmp", b"BM", 18, "<ii", 60000, 60000),
    "webp": patched(".webp", b"VP8L", 9, "<I", 16382 << 14 | 16382),
    "tiff": patched(".tiff", b"\0\1\3\0\1\0\0\0", 8, "<IHHII", 60000, 257, 3, 1, 60000),
    "ppm": b"P6\n60000 60000\n255\n" + bytes(64),
}
