"""The processor of a model that sees images: from a stored image to the arrays that the vision
tower reads, and to the text that takes the place of the image in a prompt.

Each image is processed alone. An image is then the same wherever it appears, and its arrays and
features can be kept by its digest.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from ludic.errors import ConfigError, DataError
from ludic.images import PROCESSOR
from ludic.images.store import ImageStore, current_store
from ludic.models.wrappers import unwrap_transformer

if TYPE_CHECKING:
    from PIL.Image import Image

OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels")
"""What a processor returns of the text."""
CACHE_BYTES = 256 * 2**20
_REASON = "_ludic_no_images"


@dataclass(frozen=True)
class ProcessedImage:
    """What a model reads of one image."""

    arrays: Mapping[str, Tensor]
    """The image processor's arrays of this image alone, on the CPU. Example: `pixel_values`
    [36, 96] and `image_grid_thw` [[1, 6, 6]]."""
    block: str
    """The text in place of the image: placeholders, and the marks that the processor writes around
    and between them."""
    num_placeholders: int
    num_patches: int
    """Patches that the vision tower computes."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class ImageProcessor:
    """A processor of transformers, for one model. Thread-safe.

    >>> processor = ImageProcessor(AutoProcessor.from_pretrained(folder), model.config)
    >>> processor.process(digest).num_placeholders
    256
    """

    def __init__(self, processor: Any, config: Any, store: ImageStore | None = None) -> None:
        """`config`: of the model, whose placeholder token counts. `store` has the images; None
        means the store of this process. Raises ConfigError for a processor without an image
        processor, and for one whose tokenizer does not know its marker or the placeholder."""
        if getattr(processor, "image_processor", None) is None:
            raise ConfigError(f"{type(processor).__name__} has no image processor; name a model with a preprocessor_config.json")
        self.processor, self._store = processor, store
        self.read_with(processor.tokenizer)
        if getattr(processor, "image_token", None) is None:
            raise ConfigError(f"{type(processor).__name__} does not say which token stands for an image (image_token)")
        self.marker = str(processor.image_token)
        """The text that stands for an image in a rendered prompt."""
        names = [f"{medium}_token_{form}" for medium in ("image", "video", "audio") for form in ("id", "index")]
        found = {name: token for name in names if isinstance(token := getattr(config, name, None), int) and token >= 0}
        of_images = [token for name, token in found.items() if name.startswith("image")]
        if not of_images:
            raise ConfigError(f"the config of {config.model_type} names no token of images (image_token_id)")
        self.placeholder_id = of_images[0]
        """The token whose embedding is replaced by a feature."""
        self.banned_ids = tuple(sorted(set(found.values())))
        """Tokens that are never sampled, because each needs a feature: placeholders of images,
        videos and audio."""
        self._check_tokens(config)
        size = getattr(getattr(config, "vision_config", None), "patch_size", None) or 14
        self._patch_size = int(size if isinstance(size, int) else next(iter(size)))
        self._cache: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._cache_bytes = 0
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> ImageProcessor:
        return self  # a copy of the model has the same

    def read_with(self, tokenizer: Any) -> None:
        """Read text with `tokenizer`, of which `find_processor` then knows this processor."""
        self.tokenizer = self.processor.tokenizer = tokenizer
        object.__setattr__(tokenizer, PROCESSOR, self)

    def limit_pixels(self, **limits: int | None) -> None:
        """Scale images to the limits `min_pixels` and `max_pixels`; None keeps the processor's own.
        Raises ConfigError for a processor that has no such limits."""
        own, given = self.processor.image_processor, {name: limit for name, limit in limits.items() if limit is not None}
        if not given:
            return
        if not given.keys() <= own.valid_kwargs.__annotations__.keys():
            raise ConfigError(f"{type(own).__name__} has no {' and no '.join(given)}; leave them out, its images have one size")
        self.processor.image_processor = type(own)(**{**own.to_dict(), **given})

    @property
    def store(self) -> ImageStore:
        return self._store or current_store()

    @property
    def fingerprint(self) -> str:
        """A digest of the kinds and settings of the processor, without its tokenizer: with another
        one, an image has other pixels or placeholders."""
        settings = {name: value for name, value in self.processor.to_dict().items() if "video" not in name}
        kind = type(self.processor.image_processor)  # its module says by which library it resizes
        text = json.dumps([kind.__module__, kind.__name__, settings], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def reads_several(self) -> bool:
        """Whether an image of a prompt with several has the placeholders that it has alone. LLaVA-
        OneVision makes fewer patches of it then."""
        pictures = [np.random.default_rng(0).integers(0, 256, (56, width, 3), dtype=np.uint8) for width in (56, 112)]
        _, together = self._call(pictures)
        return together == [block for picture in pictures for block in self._call([picture])[1]]

    def check_count(self, count: int) -> None:
        """Raise ConfigError for a prompt with `count` images if it may have one."""
        if count > 1 and not self.reads_several:
            raise ConfigError(
                f"the prompt has {count} images, and {type(self.processor).__name__} makes other patches of an image among others; "
                "give each prompt one"
            )

    def _call(self, images: Sequence[Any]) -> tuple[Any, list[str]]:
        """(what the processor makes of a prompt with the images, the text in place of each)."""
        options = {"return_text_replacement_offsets": True, "return_mm_token_type_ids": False}
        text = " ".join([self.marker] * len(images))
        made = self.processor(images=[list(images)], text=[text], return_tensors="pt", **options)
        [replaced] = made.pop("text_replacement_offsets")
        return made, [str(each["replacement"]) for each in replaced]

    def process(self, digest: str) -> ProcessedImage:
        """The image with this digest. Raises ImageError if the store does not have it."""
        with self._lock:
            if (known := self._cache.get(digest)) is not None:
                self._cache.move_to_end(digest)
                return known
        made = self._read(self.store.open(digest), digest)
        with self._lock:
            if digest not in self._cache:
                self._cache[digest], self._cache_bytes = made, self._cache_bytes + made.nbytes
            while len(self._cache) > 1 and self._cache_bytes > CACHE_BYTES:
                self._cache_bytes -= self._cache.popitem(last=False)[1].nbytes
        return made

    @cached_property
    def blank(self) -> ProcessedImage:
        """A picture of no sample, which stands in where a rank has none."""
        from PIL import Image

        return self._read(Image.new("RGB", (56, 56)), "blank")

    def _read(self, image: Image, digest: str) -> ProcessedImage:
        try:
            made, [block] = self._call([image])
        except Exception as error:  # of a library that we do not know
            width, height = image.size
            raise DataError(
                f"image {digest} ({width}x{height}) cannot be processed by {type(self.processor).__name__}: {error}"
            ) from error
        count = int((made["input_ids"] == self.placeholder_id).sum())
        if not count:
            raise DataError(
                f"{type(self.processor).__name__} writes no placeholder (token {self.placeholder_id}) for image {digest}; "
                "name the processor of the model"
            )
        arrays = {name: value for name, value in made.items() if isinstance(value, Tensor) and name not in OF_TEXT}
        return ProcessedImage(arrays, block, count, self._count_patches(arrays))

    def _count_patches(self, arrays: Mapping[str, Tensor]) -> int:
        """Patches of pixel values [..., patches, values], or of tiles [..., channels, H, W].

        Example: [36, 96] has 36; [1, 3, 28, 56] in patches of 14 has 2 * 4."""
        pixels = next(array for name, array in arrays.items() if name.startswith("pixel_values"))
        if pixels.ndim <= 3:
            return pixels.numel() // pixels.shape[-1]
        return max(1, pixels.numel() // pixels.shape[-3] // self._patch_size**2)

    def _check_tokens(self, config: Any) -> None:
        ids = self.tokenizer(self.marker, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ConfigError(
                f"the tokenizer reads {self.marker!r}, the mark of an image, as {len(ids)} tokens; it must be one special token, "
                "and split_special_tokens must be off"
            )
        vocabulary = getattr(config.get_text_config(), "vocab_size", None) or getattr(config, "vocab_size", None)
        if vocabulary is not None and not 0 <= self.placeholder_id < vocabulary:
            raise ConfigError(f"the placeholder of images is token {self.placeholder_id}, of a vocabulary of {vocabulary}")


def attach_processor(model: nn.Module, processor: ImageProcessor) -> None:
    """Let `model`, its copies and the processor's tokenizer read images with `processor`."""
    object.__setattr__(unwrap_transformer(model), PROCESSOR, processor)
    processor.read_with(processor.tokenizer)


def refuse_images(model: nn.Module, reason: str) -> None:
    """Let `model` and its copies read text alone, and `require_processor` say the `reason`."""
    object.__setattr__(unwrap_transformer(model), _REASON, reason)


def find_processor(model: Any) -> ImageProcessor | None:
    """The processor that was attached to the model; None for a model that reads text alone."""
    return getattr(unwrap_transformer(model), PROCESSOR, None)


def require_processor(model: nn.Module) -> ImageProcessor:
    """The processor that was attached to the model. Raises ConfigError without one, and says
    why."""
    processor, inner = find_processor(model), unwrap_transformer(model)
    if processor is None:
        reason = getattr(inner, _REASON, "it has no tower for them; name a model that has one, or leave out the images")
        raise ConfigError(f"the data have images, and {type(inner).__name__} cannot read them: {reason}")
    return processor
