from ludic.rollouts.training.datasets.data_buffer import (
    DataBuffer as DataBuffer,
    create_buffer_from_jsonl as create_buffer_from_jsonl,
    load_prompts_from_jsonl as load_prompts_from_jsonl,
    load_prompts_from_list as load_prompts_from_list,
)
from ludic.rollouts.training.datasets.dataset_loaders import (
    compute_loss_mask as compute_loss_mask,
    load_dataset_with_answers as load_dataset_with_answers,
    load_rl_prompts as load_rl_prompts,
    load_sft_dataset as load_sft_dataset,
    prepare_sft_sample as prepare_sft_sample,
    tokenize_conversation as tokenize_conversation,
)
