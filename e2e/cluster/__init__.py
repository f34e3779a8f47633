"""One machine's Kubernetes: its binaries (`build`), its control plane, a node with real pods."""
