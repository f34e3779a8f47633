"""Attention over a paged KV pool, hooked into transformers' models."""
