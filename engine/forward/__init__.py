"""From a ScheduleBatch to logits and sampled ids: device state, batches, runners, the worker."""
