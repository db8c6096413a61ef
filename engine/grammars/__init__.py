"""From what structured output asks for to the masks of a step."""
