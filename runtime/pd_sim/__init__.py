"""PURE. A cluster in simulated time: the product's own decisions over models of engines."""
