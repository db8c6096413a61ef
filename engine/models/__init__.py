"""Model architectures: the forward pass and where each checkpoint tensor goes."""
