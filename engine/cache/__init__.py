"""Host-side state of the KV cache: page and row indices, and the radix tree over them. No torch, no tensors."""
