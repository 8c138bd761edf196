"""The models here are too small for a second thread to help."""

import torch

torch.set_num_threads(1)
