"""Attention over the paged KV pool, by interchangeable backends."""
