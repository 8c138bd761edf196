"""The settings of quantised weights under adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass
class QuantizationSection:
    """Frozen weights of linear layers in 4 or 8 bits, under adapters (QLoRA); needs `lora.rank`.
    `quantization=nf4` is short for `quantization.kind=nf4`."""

    kind: Optional[str] = None  # noqa: UP045  OmegaConf reads this annotation at run time
    """nf4, fp4 (both need `pip install 'ludic[qlora]'`) or int8; null: none."""
    double: bool = False
    """Store the scales of nf4 and fp4 in 8 bits too, which saves 0.37 bits a weight."""
    compute_dtype: Optional[str] = None  # noqa: UP045
    """What weights are dequantised to for a product: float32, bfloat16 or float16; null:
    `dtype`."""
