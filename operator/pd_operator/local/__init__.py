"""A small kubelet: Kubernetes manifests as processes on this machine (Linux)."""
