"""Files that are offered as images: damaged, huge, disguised, and in rare forms."""

import io
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

LEFT_RED = np.zeros((16, 24, 3), dtype=np.uint8)
LEFT_RED[:, :12, 0] = 255
LEFT_RED[:8, 12:, 2] = 255
"""[16, 24, 3]: the left half red, a blue quarter at the upper right, black below: no turn or mirror
of it equals it."""


def encode(image, kind, **options):
    """The bytes of a file."""
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def picture(mode="RGB"):
    """`LEFT_RED` as an image of Pillow."""
    return Image.fromarray(LEFT_RED).convert(mode)


def png(width, height, body=b"", *, color=2, chunks=b""):
    """A PNG whose header tells any size."""
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunks + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def bomb_png(side):
    """`side` x `side` zeros, a thousandth of their size."""
    packer = zlib.compressobj(9)
    first, row = (packer.compress(bytes(1 + 3 * side)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return png(side, side, first + row * (side - 1) + packer.flush())


def noise(kind, **options):
    """A file large enough to be cut in the middle of its pixels."""
    return encode(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)), kind, **options)


def turned(orientation, kind="JPEG"):
    """A file that shows `LEFT_RED` if a reader obeys its EXIF orientation."""
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's number of the inverse turn
    image = picture() if orientation == 1 else picture().transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}, "PNG": {}}
    return encode(image, kind, exif=exif, **options[kind])


def animated(kind):
    """Two frames, of which the first is `LEFT_RED`."""
    return encode(picture(), kind, save_all=True, append_images=[Image.new("RGB", (24, 16), (9, 9, 9))], lossless=True)


def gray16():
    """16 bits a pixel: 0, 256 and 65,280 are 0, 1 and 255 in 8 bits."""
    return encode(Image.fromarray(np.array([[0, 256, 65_280]], dtype=np.uint16)), "PNG")


class _Command:
    def __reduce__(self):
        return Path("executed").touch, ()


def gif_frame_beyond_screen():
    """A GIF of 8x8 whose frame is 20,000 x 20,000."""
    data = bytearray(encode(Image.new("P", (8, 8)), "GIF"))
    at = data.index(b"\x2c", 13 + 3 * 2)
    data[at + 5 : at + 9] = struct.pack("<HH", 20_000, 20_000)
    return bytes(data)


def refused_files():
    """Name -> (bytes, words of the error)."""
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    text = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(20 * 2**20), 9))
    bmp = bytearray(encode(picture(), "BMP"))
    bmp[18:26] = struct.pack("<ii", 30_000, 30_000)
    return {
        "empty": (b"", "no image that can be read"),
        "bomb.png": (bomb_png(20_000), r"20000x20000 .381 Mpixel.*limit is 64"),
        "medium bomb.png": (bomb_png(10_000), r"10000x10000 .*limit"),
        "claims.png": (png(2**31 - 1, 2**31 - 1), "limit|damaged"),
        "zero.png": (png(0, 0), "damaged|no pixels"),
        "flat.png": (png(10, 0), "damaged|no pixels"),
        "text bomb.png": (png(4, 4, zlib.compress(bytes(52)), chunks=text), "damaged PNG"),
        "cut.png": (noise("PNG")[:-3000], "damaged PNG"),
        "header.png": (noise("PNG")[:20], "damaged PNG"),
        "no pixels.png": (png(4, 4), "damaged PNG"),
        "cut.jpg": (noise("JPEG")[:1000], "damaged JPEG"),
        "header.jpg": (noise("JPEG")[:12], "damaged JPEG"),
        "cut.webp": (noise("WEBP")[:1000], "damaged WEBP"),
        "header.webp": (noise("WEBP")[:30], "damaged WEBP"),
        "cut.gif": (noise("GIF")[:900], "damaged GIF"),
        "beyond.gif": (gif_frame_beyond_screen(), "limit|damaged GIF"),
        "bomb.bmp": (bytes(bmp), "limit"),
        "cut.bmp": (noise("BMP")[:500], "damaged BMP"),
        "drawing.svg": (svg, "no image that can be read"),
        "scan.tiff": (encode(picture(), "TIFF"), "no image that can be read"),
        "script.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image that can be read"),
        "icon.ico": (encode(picture(), "ICO"), "no image that can be read"),
        "raw.ppm": (encode(picture(), "PPM"), "no image that can be read"),
        "document.pdf": (b"%PDF-1.7\n", "no image that can be read"),
        "code.pkl": (pickle.dumps(_Command()), "no image that can be read"),
        "page.html": (b"<html><script>0</script></html>", "no image that can be read"),
        "archive.zip": (b"PK\x03\x04" + bytes(64), "no image that can be read"),
    }


def read_files():
    """Name -> (bytes, the pixels [H, W, 3] that are read)."""
    over_white = np.full((2, 2, 3), 255, dtype=np.uint8)
    over_white[0, 0] = (0, 0, 255)
    clear = Image.new("RGBA", (2, 2), (200, 0, 0, 0))
    clear.putpixel((0, 0), (0, 0, 255, 255))
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((0, 0), 1)
    gray = LEFT_RED.max(axis=2)
    files = {
        "plain.png": (encode(picture(), "PNG"), LEFT_RED),
        "plain.bmp": (encode(picture(), "BMP"), LEFT_RED),
        "plain.gif": (encode(picture(), "GIF"), LEFT_RED),
        "plain.webp": (encode(picture(), "WEBP", lossless=True), LEFT_RED),
        "archive behind.png": (encode(picture(), "PNG") + b"PK\x03\x04" + bytes(200), LEFT_RED),
        "page behind.gif": (encode(picture(), "GIF") + b"<script>0</script>", LEFT_RED),
        "gray.png": (encode(Image.fromarray(gray), "PNG"), np.repeat(gray[:, :, None], 3, axis=2)),
        "gray16.png": (gray16(), np.repeat(np.array([[[0], [1], [255]]], dtype=np.uint8), 3, axis=2)),
        "bit.png": (encode(Image.fromarray(gray > 0), "PNG"), np.repeat((gray > 0)[:, :, None] * np.uint8(255), 3, axis=2)),
        "alpha.png": (encode(clear, "PNG"), over_white),
        "alpha.webp": (encode(clear, "WEBP", lossless=True), over_white),
        "clear palette.png": (encode(palette, "PNG", transparency=0), over_white),
        "clear palette.gif": (encode(palette, "GIF", transparency=0), over_white),
        "animated.gif": (animated("GIF"), LEFT_RED),
        "animated.webp": (animated("WEBP"), LEFT_RED),
        "animated.png": (animated("PNG"), LEFT_RED),
        "turned 6.png": (turned(6, "PNG"), LEFT_RED),
        "turned 8.webp": (turned(8, "WEBP"), LEFT_RED),
    }
    files |= {f"turned {number}.jpg": (turned(number), LEFT_RED) for number in range(1, 9)}
    cmyk = encode(picture("CMYK"), "JPEG", quality=100, subsampling=0)
    broken = turned(1).replace(b"Exif\x00\x00MM", b"Exif\x00\x00XX")
    return {**files, "cmyk.jpg": (cmyk, LEFT_RED), "broken exif.jpg": (broken, LEFT_RED)}
