"""Random numbers as a function of (seed, position, token id), so that a choice never depends on batch-mates or history.

Plain integer arithmetic on 32-bit words; `sampling.py` computes the same words on the card. No triton here.
"""

import torch

_WORD = 0xFFFFFFFF
_SMALLEST_REST = 2.0**-26


def mix(word: torch.Tensor) -> torch.Tensor:
    """The finaliser of MurmurHash3 on int64 tensors that hold 32-bit words."""
    word = (word ^ (word >> 16)) * 0x85EBCA6B & _WORD
    word = (word ^ (word >> 13)) * 0xC2B2AE35 & _WORD
    return word ^ (word >> 16)


def random_words(seeds: torch.Tensor, positions: torch.Tensor, num_ids: int) -> torch.Tensor:
    """One 32-bit word a token id. Shapes: seeds [B] int64 (all 64 bits count), positions [B] int, result [B, num_ids] int64."""
    low, high = seeds & _WORD, (seeds >> 32) & _WORD
    first = mix(mix((low + 0x9E3779B9) & _WORD) ^ (positions.long() & _WORD))
    second = mix(first ^ high ^ 0x85EBCA6B)
    ids = torch.arange(num_ids, device=seeds.device)
    return mix((mix(ids ^ first[:, None]) + second[:, None]) & _WORD)


def exponential_noise(seeds: torch.Tensor, positions: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Exponentially distributed fp32 noise E [B, num_ids]; `argmax(logits / temperature - log(E))` draws from the softmax.

    E = -log(1 - u) with u = (word + 1/2) / 2^32, by its series where u is small: the smallest E decide who wins, and
    1 - u would lose their low bits.
    """
    u = (random_words(seeds, positions, num_ids).float() + 0.5) * 2.0**-32
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    return torch.where(u < 2.0**-10, series, -torch.log((1.0 - u).clamp(min=_SMALLEST_REST)))
