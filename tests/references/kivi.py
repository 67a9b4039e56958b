"""KIVI written out number by number: what one head's later queries meet, how many bytes it takes, and which form fits a budget."""

import math

import numpy


def coded(numbers, bits):
    """Return the codes of a group of numbers and what they are restored to: equal steps from the least to the largest number."""
    least, most = min(numbers), max(numbers)
    scale = (most - least) / (2**bits - 1)
    codes = [int(numpy.rint((number - least) / scale)) if scale else 0 for number in numbers]
    return codes, [code * scale + least for code in codes]


def keys_met(keys, bits, group, residual):
    """Return `keys` [tokens, size] as they are met after the last token: all that fill a residual are coded, channel by channel."""
    met = numpy.array(keys)
    waiting = []
    for token in range(len(keys)):
        waiting.append(token)
        if len(waiting) == max(residual, group):
            for first in range(0, len(waiting), group):
                together = waiting[first : first + group]
                for channel in range(keys.shape[1]):
                    met[together, channel] = coded([keys[i, channel] for i in together], bits)[1]
            waiting = []
    return met


def values_met(values, bits, group, residual):
    """Return `values` [tokens, size] as they are met after the last token: all but the newest `residual` are coded, one by one."""
    met = numpy.array(values)
    size = values.shape[1]
    while size % group:
        group -= 1
    for token in range(max(0, len(values) - residual)):
        for first in range(0, size, group):
            met[token, first : first + group] = coded(list(values[token, first : first + group]), bits)[1]
    return met


def bytes_held(tokens, bits, group, residual, size):
    """Return the bytes of a head's keys and values, `size` numbers each, after `tokens` tokens; a number in full takes 2."""
    unit = max(residual, group)
    total = 0
    for token in range(tokens):
        in_codes = token < tokens - tokens % unit
        if not in_codes:
            total += 2 * size
        elif token % group == 0:
            total += size * (math.ceil(group * bits / 8) + 2 + 2)
        if token >= tokens - residual:
            total += 2 * size
        else:
            total += size // group * (math.ceil(group * bits / 8) + 2 + 2)
    return total


def fitting(tokens, allowance, group, size):
    """Return the most bits, then the longest residual, that take no more bytes than `allowance` tokens in full; else the least."""
    for bits in (4, 2):
        for groups in reversed(range(tokens // group + 2)):
            if bytes_held(tokens, bits, group, groups * group, size) <= allowance * 4 * size:
                return bits, groups * group
    return 2, 0
