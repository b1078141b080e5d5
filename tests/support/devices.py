"""Device and type of the tiny models: the CPU in float64, or those of an environment variable.

On a machine with a GPU, `make test` runs the invariants on it. float32 is there for the kernels, which do not take
float64. FOREDRAFT_TEST_DEVICE=pretend runs them on the pretended GPU: a check that nothing is made on another device.
"""

import os

import torch

from tests.support.pretend_gpu import DEVICE

VARIABLE = "FOREDRAFT_TEST_DEVICE"
CHOICE = os.environ.get(VARIABLE, "cpu")
IS_PRETENDED = CHOICE == "pretend"
TEST_DEVICE = DEVICE if IS_PRETENDED else torch.device(CHOICE)
TEST_DTYPE = torch.float32 if CHOICE.startswith("cuda") else torch.float64
