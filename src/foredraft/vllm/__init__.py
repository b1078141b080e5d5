"""Foredraft's drafters inside vLLM, as its `custom_class`.

vLLM imports `foredraft.vllm.Proposer`; nothing here imports vLLM, and nothing in vLLM is patched. `proposer.py` turns
vLLM's arrays into the steps of a drafter, `row_tracker.py` recognises requests in them, and `text_drafter.py` makes the
drafter from the settings in `settings.py`.
"""

from foredraft.vllm.proposer import Proposer as Proposer
