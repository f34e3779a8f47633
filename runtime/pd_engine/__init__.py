"""The engine: one worker of a pool, in role prefill, decode or both."""

import os

# Read by libraries when they are first imported, so set before any module of ours does.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# OpenMP's threads sleep while they wait: spinning, two workers that share cores slow each
# other down forty-fold.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
