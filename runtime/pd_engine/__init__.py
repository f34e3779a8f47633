"""The engine: one worker of a pool, in role prefill, decode or both."""
