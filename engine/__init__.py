"""The engine: requests, planning, the step loop, text and tensors."""
