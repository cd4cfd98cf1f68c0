"""Word times of one decoded window, from the cross-attention of the alignment heads.

tokens and the heads' attention [n_tokens + 1, n_audio_ctx'] -> Words with start, end, probability.
A few heads of every Whisper model look at the audio that the next token is about. While decoding,
the model keeps those heads' queries (`CrossAttention.q_cache`), so that the attention of a finished
row costs one small product here and no second pass through the decoder.

Source: the published alignment of openai-whisper (`timing.py`): normalise each head over the
tokens, median filter over time, average, dynamic time warping; compared with it in the tests.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import Whisper
from stitch import Word
from tokenizer import Tokenizer

POSITIONS_PER_S = 50  # encoder positions a second
MEDIAN_POSITIONS = 7  # of the median filter over time, as openai-whisper
# fmt: off
MEDIAN_SWAPS = (  # finds the median of seven; Devillard, "Fast median search", 1998
    (0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6), (2, 3), (3, 6), (4, 5), (1, 4), (1, 3),
    (3, 4),
)
# fmt: on
MAX_TOKENS_PER_CHARACTER = 4  # a UTF-8 character has at most four bytes
# Languages whose words are not set apart by spaces; every character group is a unit there.
UNSPACED_LANGUAGES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})


def align_words(
    model: Whisper,
    tokenizer: Tokenizer,
    row: int,
    sample_begin: int,
    tokens: list[int],
    probs: list[float],
    is_complete: bool,
    start_s: float,
    end_s: float,
    language: str,
) -> list[Word]:
    """Words of a row's sampled `tokens`, timed within start_s..end_s s, the audio of its window.

    `sample_begin` is the position of the first of them, `probs` their probabilities; `is_complete`
    says that the decoder read the last one too (it ended by itself). Padding beyond `end_s` is
    left out of the attention, so that no word can fall into it.
    """
    words = split_words(tokenizer, tokens, language in UNSPACED_LANGUAGES)
    if not words:
        return []
    n_positions = round((end_s - start_s) * POSITIONS_PER_S)
    n_positions = max(1, min(n_positions, model.args.n_audio_ctx))
    n_read = len(tokens) + is_complete
    attention = alignment_attention(model, row, sample_begin - 1, n_read, n_positions)
    begins = start_s + token_begins(attention.cpu().numpy()) / POSITIONS_PER_S  # [n_read] s
    begins = np.append(begins, end_s).clip(max=end_s).tolist()
    timed, first = [], 0
    for text, n_tokens in words:
        last = first + n_tokens
        if text:
            prob = sum(probs[first:last]) / n_tokens
            timed.append(Word(text, begins[first], begins[last], prob))
        first = last
    return timed


def split_words(
    tokenizer: Tokenizer, tokens: list[int], by_character: bool
) -> list[tuple[str, int]]:
    """(text, number of tokens) of each word; "" for a run of timestamps or other special ids.

    The texts together are the decoded text. A word starts at a space, or at every character group
    in a script without spaces; punctuation stays with the word before it.
    """
    words: list[tuple[str, int]] = []
    group: list[int] = []  # tokens until a whole character is there
    for token in tokens:
        group.append(token)
        text = tokenizer.decode(group)
        if "\N{REPLACEMENT CHARACTER}" in text and len(group) < MAX_TOKENS_PER_CHARACTER:
            continue
        starts = text.startswith(" ") or (by_character and any(map(str.isalnum, text)))
        if words and not starts and bool(words[-1][0]) == bool(text):
            words[-1] = (words[-1][0] + text, words[-1][1] + len(group))
        else:
            words.append((text, len(group)))
        group = []
    if group:  # a character that was cut off
        words.append((tokenizer.decode(group), len(group)))
    return words


def alignment_attention(
    model: Whisper, row: int, first_pos: int, n_rows: int, n_positions: int
) -> Tensor:
    """Normalised mean attention [n_rows, n_positions], float32, after `first_pos` and on."""
    weights = []
    for layer in model.decoder.layers:
        cross_attn = layer.cross_attn
        if cross_attn.q_cache is None:
            continue
        q = cross_attn.q_cache[row, :, first_pos : first_pos + n_rows].float()  # [h, n_rows, D]
        k = cross_attn.kv_cache.keys(slice(row, row + 1), cross_attn.alignment_index)[0]
        scores = q @ k[:, :n_positions].float().transpose(1, 2) * q.shape[-1] ** -0.5
        weights.append(scores.softmax(dim=-1))  # [h, n_rows, n_positions]
    weights = torch.cat(weights)  # [n_heads, n_rows, n_positions]
    std, mean = torch.std_mean(weights, dim=1, keepdim=True, unbiased=False)
    weights = (weights - mean) / std.clamp(min=1e-12)
    return median_filter(weights).mean(dim=0)


def median_filter(x: Tensor) -> Tensor:
    """Running median of seven over the last dimension, mirrored at the ends; x if it is too short.

    Thirteen compare-and-swap steps leave the median of seven shifted copies in the middle one: four
    times as fast as sorting windows.
    """
    n, half = x.shape[-1], MEDIAN_POSITIONS // 2
    if n <= half:
        return x
    padded = F.pad(x, (half, half), mode="reflect")
    copies = [padded[..., i : i + n] for i in range(MEDIAN_POSITIONS)]
    for low, high in MEDIAN_SWAPS:
        first, second = copies[low], copies[high]
        copies[low], copies[high] = torch.minimum(first, second), torch.maximum(first, second)
    return copies[half]


def token_begins(attention: np.ndarray) -> np.ndarray:
    """First position [n_rows] of each row on the best monotonic path through the attention.

    Dynamic time warping: the path goes from the first row and position to the last ones, one step
    in either or both, and has the largest sum. Within a row the recurrence
    cost[j] = min(before[j], cost[j - 1]) - attention[j] becomes a running minimum once the row's
    cumulative sum is taken off, so a row is a handful of array operations.
    """
    n_rows, n_positions = attention.shape
    cost = np.full((n_rows + 1, n_positions + 1), np.inf)
    cost[0, 0] = 0.0
    for i in range(1, n_rows + 1):
        gain = np.cumsum(attention[i - 1], dtype=np.float64)
        before = np.minimum(cost[i - 1, :-1], cost[i - 1, 1:])  # from the row above
        before[1:] += gain[:-1]
        cost[i, 1:] = np.minimum.accumulate(before) - gain
    begins = np.zeros(n_rows, dtype=np.int64)
    i, j = n_rows, n_positions
    while i > 0 and j > 0:
        begins[i - 1] = j - 1
        step = np.argmin((cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]))
        i, j = i - (step != 2), j - (step != 1)
    return begins
