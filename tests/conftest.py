"""What holds for all tests."""

import torch

# The tensors here are tiny: a second thread costs more in hand-over than it computes.
torch.set_num_threads(1)
