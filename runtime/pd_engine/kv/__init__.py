"""The KV plane: memory, frames, transports."""
