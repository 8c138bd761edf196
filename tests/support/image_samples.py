"""Samples with images, read by transformers' own path (`pixel_values`) and in the layouts of a
trainer."""

from dataclasses import dataclass

import numpy as np
import torch
from tiny_vision import make_picture

from ludic import _core
from ludic.models.images.features import encode_images
from ludic.models.images.processor import find_processor
from ludic.models.images.rows import IMAGES, KEY, RowImages, key_ids
from ludic.models.packed_attention import PACKED, set_attention
from ludic.models.prefix_trees import PREFIX_TREES, PrefixTrees
from ludic.training.algorithm import forward_logits
from ludic.training.batching.packing import to_tensors
from ludic.types import ImageSpan

LAYOUTS = ("padded", "padding_free", "trees")


@dataclass(frozen=True)
class Sample:
    ids: list[int]
    spans: tuple[ImageSpan, ...]
    inputs: dict[str, torch.Tensor]
    """What transformers reads, [1, T] and the processor's arrays."""


def make_sample(processor, parts, answer):
    """A sample whose prompt has the `parts`: texts and digests."""
    digests = [part for part in parts if processor.store.has(part)]
    marked = [processor.marker if part in digests else part for part in parts]
    inputs = {"input_ids": processor.tokenizer(["".join(marked)], return_tensors="pt", add_special_tokens=False)["input_ids"]}
    if digests:
        images = [processor.store.open(digest) for digest in digests]
        inputs = dict(processor.processor(text=["".join(marked)], images=[images], return_tensors="pt"))
    ids, spans = inputs["input_ids"][0].tolist(), []
    for digest in digests:
        image, begin = processor.process(digest), spans[-1].start + spans[-1].length if spans else 0
        places = [place for place in range(begin, len(ids)) if ids[place] == processor.placeholder_id][: image.num_placeholders]
        spans.append(ImageSpan(digest, places[0], places[-1] + 1 - places[0]))
    ids += answer
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = torch.nn.functional.pad(inputs[name], (0, len(answer)))
    inputs |= {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    return Sample(ids, tuple(spans), inputs)


def seven_samples(processor, *, sizes=((32, 32), (32, 16)), pairs=True):
    """Three answers to one image, one to another image of equal size, two to two images, of which
    one is the first again, and one of text."""
    first, other = (processor.store.add(make_picture(*sizes[0], seed=seed)) for seed in (1, 2))
    second = processor.store.add(make_picture(*sizes[1], seed=3))
    draw = np.random.default_rng(0)

    def answer(length):
        return draw.integers(97, 123, length).tolist()

    def ask(digest):
        return ["Look at this: ", digest, " and say what it shows."]

    both = ["compare ", second, " with ", first, "!"] if pairs else ["and ", second, "!"]
    return [
        *(make_sample(processor, ask(first), answer(length)) for length in (5, 9, 3)),
        make_sample(processor, ask(other), answer(5)),
        *(make_sample(processor, both, answer(length)) for length in (4, 7)),
        make_sample(processor, ["Nothing to see"], answer(6)),
    ]


@torch.no_grad()
def read_alone(model, sample):
    """[T - 1] log-probabilities of the sample's tokens, by transformers' own path."""
    named = {name: value for name, value in sample.inputs.items() if name not in ("labels", "text_replacement_offsets")}
    return to_logps(model(**named, use_cache=False).logits[0], sample.ids)


def to_logps(logits, ids):
    return torch.log_softmax(logits[: len(ids) - 1].float(), -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def bind_features(model, images):
    """`images` with the features of each, computed once."""
    processor, digests = find_processor(model), images.distinct
    features = encode_images(model, [processor.process(digest) for digest in digests])
    return images.bind(dict(zip(digests, features, strict=True)))


def make_batch(processor, samples, layout, *, min_shared=1):
    """(tensors of a micro-batch, indices of the samples in its order, shares of the trees)."""
    digests = dict.fromkeys(span.digest for sample in samples for span in sample.spans)
    numbers = {digest: number for number, digest in enumerate(digests)}
    keyed = [key_ids(sample.ids, sample.spans, numbers) for sample in samples]
    lengths = np.array([len(ids) for ids in keyed])
    bounds = np.concatenate([[0], lengths.cumsum()])
    table = _core.SampleTable.from_columns(np.concatenate(keyed), np.ones(bounds[-1], dtype=np.uint8), bounds)
    rows, spans = list(range(len(samples))), [sample.spans for sample in samples]
    images = RowImages(processor.placeholder_id, spans)
    tensors = to_tensors(table.collate(rows, 0) if layout == "padded" else table.collate_padding_free(rows), "cpu")
    if layout == "trees":
        order, shared, _, _ = table.plan_trees(rows, int(bounds[-1]), min_shared)
        arrays = table.collate_trees(order, shared)
        arrays["input_ids"] = np.where(arrays["input_ids"] >= KEY, processor.placeholder_id, arrays["input_ids"])
        tensors[PREFIX_TREES] = PrefixTrees.from_arrays(arrays, lengths[order], shared, "cpu", order)
        computed = [tuple(span for span in spans[at] if span.start >= common) for at, common in zip(order, shared, strict=True)]
        images = RowImages(processor.placeholder_id, [spans[at] for at in order], computed)
    ids = tensors["input_ids"]
    return {**tensors, "input_ids": torch.where(ids >= KEY, processor.placeholder_id, ids), IMAGES: images}


@torch.no_grad()
def read_together(model, samples, layout, *, attention=PACKED):
    """The log-probabilities of each sample, all in one forward pass."""
    set_attention(model, attention)
    batch = make_batch(find_processor(model), samples, layout)
    logits = forward_logits(model, {**batch, IMAGES: bind_features(model, batch[IMAGES])})
    if PREFIX_TREES in batch:
        logits = logits[:, batch[PREFIX_TREES].places]
    parts = logits if layout == "padded" else logits[0].split([len(sample.ids) for sample in samples])
    return [to_logps(part, sample.ids) for part, sample in zip(parts, samples, strict=True)]
