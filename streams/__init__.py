"""CUDA streams, events, graphs, staging and tickets, and the CPU twin of each. Knows nothing of tokens, requests or models."""
