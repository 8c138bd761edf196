"""vLLM servers of tiny models that see images, of seven architectures: the server writes the images
of a prompt out as the trainer does, and its log-probabilities are the model's."""

import asyncio

import pytest
import tiny_vision
import torch
from real_vllm import READY_S, vllm_or_skip
from safetensors.torch import load_file, save_file
from tiny_vision import make_picture, make_tiny_vision

from ludic.images.content import image_part
from ludic.inference import ChatCompletionRequest, ReturnSpec, SamplingParams, VLLMChatClient
from ludic.inference.servers.ports import free_port
from ludic.inference.vllm.launch import start_vllm_server, stop_vllm_server, wait_for_vllm_health
from ludic.models.images.features import encode_images
from ludic.models.images.rows import RowImages
from ludic.models.saving import save_policy

pytestmark = [pytest.mark.integration, pytest.mark.slow]
CLOSE = 1e-4
HEADS = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
"""vLLM's attention on a CPU has no head of 16 dimensions."""
SECTIONS = {"qwen2_vl": [4, 6, 6], "qwen2_5_vl": [4, 6, 6], "qwen3_vl": [6, 5, 5]}
OLDER_NAMES = ("llava", "llava_next")
"""vLLM 0.32 knows their towers by the names of older checkpoints."""


def logprobs(model, processor, trace):
    """[C] of the sampled tokens, among those that are no tokens of images."""
    ids = torch.tensor([[*trace.prompt_token_ids, *trace.completion_token_ids]])
    with torch.no_grad():
        features = encode_images(model, [processor.process(span.digest) for span in trace.images])
        known = dict(zip([span.digest for span in trace.images], features, strict=True))
        images = RowImages(processor.placeholder_id, [tuple(trace.images)], None, known)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        logits = model(**batch, **images.keywords(model, batch)).logits[0, len(trace.prompt_token_ids) - 1 : -1]
    logits[:, list(processor.banned_ids)] -= 100
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(list(trace.completion_token_ids))[:, None]).squeeze(1)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "idefics3", "internvl"])
def test_a_server_reads_images_as_the_trainer_does(name, tmp_path, monkeypatch):
    vllm_or_skip()
    text = {**tiny_vision.CONFIGS[name]["text_config"], **HEADS}
    if name in SECTIONS:
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": SECTIONS[name]}
    monkeypatch.setitem(tiny_vision.CONFIGS, name, {**tiny_vision.CONFIGS[name], "text_config": text})
    model, processor = make_tiny_vision(name)
    folder, file = tmp_path / "model", tmp_path / "model" / "model.safetensors"
    save_policy(model, processor.tokenizer, folder)
    if name in OLDER_NAMES:
        weights = {key.replace("vision_tower.", "vision_tower.vision_model."): value for key, value in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    first, second = (processor.store.add(make_picture(*size, seed=seed)) for seed, size in enumerate(((32, 32), (32, 16))))
    parts = [{"type": "text", "text": "What\n"}, image_part(first), {"type": "text", "text": "\n?"}, image_part(second)]

    async def ask(port):
        async with VLLMChatClient(port=port, tokenizer=processor.tokenizer) as client:
            sampling, messages = SamplingParams(temperature=1.0, max_tokens=12), [{"role": "user", "content": parts}]
            requests = (ChatCompletionRequest("tiny", messages, sampling, ReturnSpec.for_rl(), seed=seed) for seed in range(4))
            return [response.to_trace() for response, _ in await asyncio.gather(*map(client.complete, requests))]

    port, log = free_port(), tmp_path / "server.log"
    proc = start_vllm_server(
        str(folder), "127.0.0.1", port, served_model_name="tiny", extra_args=["--max-model-len", "512"], log_path=log
    )
    try:
        wait_for_vllm_health("127.0.0.1", port, proc, timeout_s=READY_S)
        traces = asyncio.run(ask(port))
    finally:
        stop_vllm_server(proc)
    for trace in traces:
        assert [span.digest for span in trace.images] == [first, second]
        assert (logprobs(model, processor, trace) - torch.tensor(trace.completion_logprobs)).abs().max() < CLOSE
