"""Images, spans, traces and samples with images."""

import numpy as np
from hypothesis import strategies as st

from ludic.images.content import image_part
from ludic.types import ImageSpan

PLACEHOLDER = 259


def draw_picture(seed):
    """[6, 6, 3] uint8."""
    return np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)


@st.composite
def span_lists(draw, digests, max_images=3, max_text=4):
    """(ids, spans): texts with images of 1 to 5 placeholders between them."""
    ids, spans = [], []
    for _ in range(draw(st.integers(0, max_images))):
        ids += draw(st.lists(st.integers(0, 250), max_size=max_text))
        length = draw(st.integers(1, 5))
        spans.append(ImageSpan(draw(st.sampled_from(digests)), len(ids), length))
        ids += [PLACEHOLDER] * length
    ids += draw(st.lists(st.integers(0, 250), min_size=0 if ids else 1, max_size=max_text))
    return ids, tuple(spans)


def parts(*values):
    """Content: a digest of 32 digits is an image, other text is text."""
    return [image_part(value) if len(value) == 32 else {"type": "text", "text": value} for value in values]
