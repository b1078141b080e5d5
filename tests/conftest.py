"""Settings every test shares."""

import torch
from hypothesis import settings

# tests run beside each other: one thread each; and no deadline, for no test measures time
torch.set_num_threads(1)
settings.register_profile("foredraft", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("foredraft")
