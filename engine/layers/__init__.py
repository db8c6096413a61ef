"""The parts that models are made of: linear, norm, rotary embedding, attention, gated MLP."""
