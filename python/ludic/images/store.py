"""Images as bytes, stored once under their digest. Messages, traces and samples have the digest
alone, so that they stay JSON.

An image of a user is a PIL image, an array, bytes, a path, or one of the forms in which data sets
store images. It is checked when it is added: a damaged or huge file is an error that names the row
and not a crash in a training step. Images are never downloaded.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ludic.errors import DataError, import_optional
from ludic.files.atomic import name_aside

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = {"PNG": "Png", "JPEG": "Jpeg", "WEBP": "WebP", "BMP": "Bmp", "GIF": "Gif"}
"""Formats that are read -> Pillow's name of their reader."""
KEPT = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp"}
"""Formats whose bytes are kept as they are, if every reader sees the same pixels in them, and the
suffixes of their files."""
URI = "ludic-image:"
"""What the digest of a stored image follows in content."""
DIGEST_BYTES = 16
DIGEST = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
MAX_FILE_MB = 32.0
"""Megabytes that the file of an image may have."""
MAX_PIXELS = 64 * 2**20
"""Width times height that an image may have, checked before its pixels are decoded."""
_ORIENTATION = 0x0112
"""The key of EXIF's orientation: 1, or a number from 2 of one of these turns."""
_TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")


class ImageError(DataError):
    """An image that cannot be read; the message says which and why."""


class ImageStore:
    """The images of a run, in files that are named by their digest. Thread-safe; several processes
    may share a folder.

    >>> store = ImageStore(Path("runs/a/images"))
    >>> digest = store.add(Image.open("cat.png"))
    >>> store.open(digest).size
    (640, 480)
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is made when the first image is added. None means a temporary folder, which is
        deleted with the store."""
        self._folder = folder
        self._temporary: weakref.finalize[..., ImageStore] | None = None
        self._known: dict[str, Path] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._unflushed: set[Path] = set()
        self._lock = threading.RLock()

    @property
    def folder(self) -> Path:
        """Where the files are."""
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="ludic-images-"))
                self._temporary = weakref.finalize(self, _remove_temporary, self._folder, os.getpid())
            return self._folder

    def settle(self, folder: Path) -> None:
        """Move the images that this object added to `folder`, and add others there."""
        with self._lock:
            if folder == self._folder:
                return
            self._folder = folder
            for digest, path in self._known.items():
                self._known[digest] = self._write(digest, path.read_bytes(), path.suffix[1:])
            if self._temporary is not None:
                self._temporary()

    def add(self, source: Any, *, base: Path | None = None, name: str = "the image") -> str:
        """Store an image and return its digest, 32 hexadecimal digits.

        `source`: a PIL image; an array of uint8 [H, W] or [H, W, 3 or 4]; the bytes of a file; a
        `pathlib.Path`; with `base` also a path as text or a `file:` URL, relative to `base`, which
        it may not leave; a `data:` URL; or `{"bytes": ..., "path": ...}`, as data sets store
        images. Raises ImageError, which begins with `name`.

        PNG, JPEG and WEBP files in RGB are stored as they are. Everything else becomes a PNG of the
        pixels: the first frame in RGB, turned as its metadata tell, transparent parts over white.
        """
        data = _read_source(source, base, name)
        if isinstance(data, bytes):
            if self.has(digest := digest_of(data)):
                return digest
            image = _open_checked(data, name)
            suffix = KEPT[str(image.format)] if _is_plain(image, name) else None
        else:
            image, suffix = data, None
        kept = data if suffix is not None and isinstance(data, bytes) else _encode_png(_to_rgb(image, name))
        with self._lock:
            digest = digest_of(kept)
            self._known[digest] = self._write(digest, kept, suffix or "png")
        return digest

    def read(self, digest: str) -> bytes:
        """The bytes of an image. Raises ImageError for one that is not in the store, and for a file
        that was changed."""
        path = self._require(digest)
        data = path.read_bytes()
        if digest_of(data) != digest:
            raise ImageError(f"{path} was changed: its digest is no longer its name; restore the file")
        return data

    def data_url(self, digest: str) -> str:
        """The image as a `data:` URL, for servers. Raises ImageError as `read`."""
        data, suffix = self.read(digest), self._require(digest).suffix[1:]
        kind = next(name.lower() for name, each in KEPT.items() if each == suffix)
        return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"

    def flush(self) -> None:
        """Flush the files of images that were added to disk: before a checkpoint names them."""
        with self._lock:
            for path in sorted(filter(Path.is_file, self._unflushed)):
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            self._unflushed.clear()

    def check(self, digests: Iterable[str]) -> None:
        """Raise ImageError, as `read`, for the first image that is not in the store."""
        for digest in dict.fromkeys(digests):
            self._require(digest)

    def open(self, digest: str) -> Image:
        """The image, in RGB."""
        return _to_rgb(_open_checked(self.read(digest), f"image {digest}"), f"image {digest}")

    def has(self, digest: str) -> bool:
        """Whether the image is in the store."""
        return self._find(digest) is not None

    def size(self, digest: str) -> tuple[int, int]:
        """(width, height). Raises ImageError as `read`."""
        if digest not in self._sizes:
            self._sizes[digest] = _open_checked(self.read(digest), f"image {digest}").size
        return self._sizes[digest]

    def _require(self, digest: str) -> Path:
        if (path := self._find(digest)) is None:
            raise ImageError(
                f"image {digest!r:.80} is not in {self.folder}; restore it: samples need the images of the run that made them"
            )
        return path

    def _find(self, digest: str) -> Path | None:
        """The file; None if there is none, and for text that is no digest."""
        if (known := self._known.get(digest)) is not None and known.is_file():
            return known
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            return None
        paths = (self.folder / digest[:2] / f"{digest}.{suffix}" for suffix in KEPT.values())
        if (path := next(filter(Path.is_file, paths), None)) is not None:
            with self._lock:
                self._known[digest] = path
                self._unflushed.add(path)  # another process may have written it a moment ago
        return path

    def _write(self, digest: str, data: bytes, suffix: str) -> Path:
        path = self.folder / digest[:2] / f"{digest}.{suffix}"
        if path.is_file() and path.stat().st_size == len(data):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = name_aside(path).with_suffix(f".{os.getpid()}.unfinished")  # other processes may write it now
        aside.write_bytes(data)
        os.replace(aside, path)
        self._unflushed.add(path)
        return path


def digest_of(data: bytes) -> str:
    """The digest of the bytes of an image."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def _remove_temporary(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked process
        shutil.rmtree(folder, ignore_errors=True)


_current = ImageStore()


def current_store() -> ImageStore:
    """The store of this process: the run's, or a temporary one."""
    return _current


@contextmanager
def use_store(store: ImageStore) -> Iterator[ImageStore]:
    """Inside, `store` is the store of this process."""
    global _current
    before, _current = _current, store
    try:
        yield store
    finally:
        _current = before


def _read_source(source: Any, base: Path | None, name: str) -> bytes | Image:
    """The bytes of a file, or a PIL image that is not decoded yet."""
    if isinstance(source, Mapping):
        given = source.get("bytes") if source.get("bytes") is not None else source.get("path")
        if given is None or isinstance(given, Mapping):
            raise ImageError(f"{name} has neither bytes nor a path; it has {', '.join(map(repr, source)) or 'nothing':.200}")
        source = given
    if isinstance(source, bytes | bytearray | memoryview):
        _check_file_size(len(source), name)
        return bytes(source)
    if isinstance(source, str) and source.startswith("data:"):
        return _read_data_url(source, name)
    if isinstance(source, str):
        _check_no_url(source, name)
    if isinstance(source, str | Path):
        return _read_file(source, base, name)
    if hasattr(source, "save") and hasattr(source, "convert"):
        return _check_pixels(source, name)
    if hasattr(source, "__array_interface__") or hasattr(source, "__array__"):
        return _check_pixels(_image_of_array(source, name), name)
    raise ImageError(f"{name} ({type(source).__name__}) must be a PIL image, an array of uint8, bytes, a path or a data: URL")


def _check_file_size(size: int, name: str) -> None:
    if size > MAX_FILE_MB * 1e6:
        raise ImageError(f"{name} has {size / 1e6:.1f} MB, the limit is {MAX_FILE_MB:g}; make it smaller")


def _read_data_url(url: str, name: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ImageError(f"{name} ({url[:40]!r}) must be a URL such as data:image/png;base64,...")
    _check_file_size(len(body) * 3 // 4, name)
    with _named(name, "is a data: URL whose base64 is damaged"):
        return base64.b64decode(body, validate=True)


def _read_file(place: str | Path, base: Path | None, name: str) -> bytes:
    """The bytes of a file. Text names one only in a folder of data: it may come from a model or
    over a network."""
    if base is None and isinstance(place, str):
        raise ImageError(f"{name} ({place!r:.80}) is text; give the bytes, a pathlib.Path or a data: URL")
    with _named(f"{name} ({str(place)!r:.200})", "cannot be read"):
        with open(_find_file(str(place), base, name), "rb") as file:
            data = file.read(int(MAX_FILE_MB * 1e6) + 1)
            _check_file_size(max(len(data), os.fstat(file.fileno()).st_size), name)
        return data


def _find_file(text: str, base: Path | None, name: str) -> Path:
    folder = (base or Path()).resolve()
    path = unquote(text.removeprefix("file:").removeprefix("//")) if text.startswith("file:") else text
    found = (folder / path).resolve()
    if base is not None and not found.is_relative_to(folder):
        raise ImageError(f"{name} ({text!r:.200}) leaves {folder}; set image_folder to a folder that has all images")
    if not found.is_file():
        raise ImageError(f"{name} ({text!r:.200}) does not exist in {folder}")
    return found


def check_source(source: Any, base: Path | None, name: str) -> None:
    """Raise ImageError, as `ImageStore.add`, for a URL, and for text that names no file in `base`.
    Opens no file."""
    given = source.get("path") if isinstance(source, Mapping) and source.get("bytes") is None else source
    if isinstance(given, str) and not given.startswith(("data:", URI)):
        _check_no_url(given, name)
        with _named(f"{name} ({given!r:.200})", "cannot be read"):
            _find_file(given, base, name)


def _check_no_url(text: str, name: str) -> None:
    if re.match(r"(?!file:)[a-zA-Z][a-zA-Z0-9+.-]*://", text):
        raise ImageError(f"{name} ({text!r:.80}) is a URL; images are not downloaded, so save them and name the files")


@contextmanager
def _named(name: str, fault: str) -> Iterator[None]:
    """Whatever readers of foreign files raise is an ImageError in one line."""
    try:
        yield
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # Pillow's readers raise many kinds
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ImageError(f"{name} {fault}: {reason}") from error


def _image_of_array(array: Any, name: str) -> Image:
    import numpy as np

    pil = import_optional("PIL.Image", "images")
    with _named(name, "is no array that can be read"):
        values = np.asarray(array)
    if values.dtype != np.uint8 or values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in (3, 4)):
        raise ImageError(f"{name} is an array of {values.dtype} {list(values.shape)}; it must be uint8 [H, W] or [H, W, 3 or 4]")
    if not values.size:
        raise ImageError(f"{name} is an array of {list(values.shape)}, which has no pixels")
    image: Image = pil.fromarray(np.ascontiguousarray(values))
    return image


def _encode_png(image: Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG", icc_profile=None)
    return file.getvalue()


def _open_checked(data: bytes, name: str) -> Image:
    """The image, whose pixels are not decoded yet. Raises ImageError for a file that is no image of
    `FORMATS`, and for too many pixels.

    The readers are called as `Image.open` calls them, without its own limit of pixels, which is a
    setting of the process and warns below it.
    """
    pil = import_optional("PIL.Image", "images")
    for kind, reader in FORMATS.items():
        import_optional(f"PIL.{reader}ImagePlugin", "images")
        make, accepts = pil.OPEN[kind]
        if accepts(data[:16]) is True:
            with _named(name, f"is a damaged {kind} file"):
                return _check_pixels(make(io.BytesIO(data), ""), name)
    raise ImageError(f"{name} is no image that can be read; its file must be one of {', '.join(FORMATS)}")


def _check_pixels(image: Any, name: str) -> Image:
    width, height = image.size
    if width * height <= 0:
        raise ImageError(f"{name} is {width}x{height}, which has no pixels")
    if width * height > MAX_PIXELS:
        size = f"{width}x{height} ({width * height / 2**20:,.0f} Mpixel)"
        raise ImageError(f"{name} is {size}, the limit is {MAX_PIXELS / 2**20:g}; make it smaller")
    checked: Image = image
    return checked


def _is_plain(image: Image, name: str) -> bool:
    """Whether every reader sees the same pixels in the file: one frame in RGB that is not turned.
    Its pixels are decoded then."""
    if image.format not in KEPT or image.mode != "RGB" or "transparency" in image.info:
        return False
    with _named(name, f"is a damaged {image.format} file"):
        image.load()
        return getattr(image, "n_frames", 1) == 1 and _find_orientation(image) == 1


def _find_orientation(image: Image) -> int:
    """The orientation in the EXIF data, 1 without any that can be read."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # of metadata, the pixels may be right
        return 1
    return found if found in range(2, 9) else 1


def _to_rgb(image: Image, name: str) -> Image:
    """The current frame in RGB, in the orientation that its metadata tell, transparent parts over
    white. 16 bits a pixel become 8."""
    from PIL import Image as pil

    with _named(name, f"is a damaged {image.format} file" if image.format else "cannot be converted to RGB"):
        image.load()
        if (orientation := _find_orientation(image)) > 1:
            image = image.transpose(pil.Transpose[_TURNS[orientation - 2]])
        if image.mode.startswith("I"):
            image = image.point(lambda value: value / 256).convert("L")
            image.info.pop("transparency", None)
        if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = pil.new("RGB", image.size, (255, 255, 255))
            white.paste(image, mask=image.getchannel("A"))
            return white
        return image.convert("RGB")
