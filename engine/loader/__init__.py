"""From a model's name to weights in a model's parameters: find, convert, read, check, fill."""
