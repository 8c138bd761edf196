from ludic.rollouts.training.datasets.data_buffer import (
    DataBuffer as DataBuffer,
    create_buffer_from_jsonl as create_buffer_from_jsonl,
    load_prompts_from_jsonl as load_prompts_from_jsonl,
    load_prompts_from_list as load_prompts_from_list,
)
