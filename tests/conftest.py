"""Settings for all tests."""

import torch

# The tensors are tiny: synchronising a second thread costs more than it saves.
torch.set_num_threads(1)
