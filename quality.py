"""Is a window's text to be believed, and what is to be done about it if not.

Judgements of decoded windows (speech, nothing, loop, suspiciously little), and the windows to
decode again: halves of a window that failed, and stretches of speech that no word covers. Pure
functions of levels, texts and the decoder's own probabilities; `long_audio.py` has them decoded.

Source of the thresholds: a measured study of long audio (26 minutes of speech to choose, 19 more
to check, 24 files without speech), starting from openai-whisper's (compression ratio 2.4, average
log-probability -1, no-speech probability 0.6).
"""

import zlib
from typing import Literal

import numpy as np

from chunk_audio import FRAME_RATE, HOP_LENGTH, SILENCE_DB, Chunk, best_pause
from stitch import COVER_S

MAX_COMPRESSION_RATIO = 2.4  # openai; genuine repetition reaches 4, so never alone a reason
MAX_CHARS_PER_S = 28.0  # of voiced audio; fast speech has 20
MIN_RETRY_LOGPROB = -0.7  # a second decoding has to be surer than a first one
MAX_WINDOW_S = 26.0  # s of a gap's window; longer gaps are split at a pause
Verdict = Literal["ok", "drop", "loop", "thin"]


def voiced_frames(energy_db: np.ndarray) -> np.ndarray:
    """Which 10 ms frames are louder than the file's own background, [n_frames] bool.

    Steady sound counts as voiced: whether it is speech is for the decoder to say. Holes of up to
    0.2 s are closed, blips of less than 0.07 s dropped.
    """
    if not len(energy_db):
        return np.zeros(0, bool)
    quiet, loud = np.percentile(energy_db, (10, 95))
    threshold = max(SILENCE_DB, min(loud - 12, max(quiet + 8, loud - 35)))
    return _smooth(_smooth(energy_db > threshold, 20, fill=True), 6, fill=False)


def _smooth(is_set: np.ndarray, longest: int, fill: bool) -> np.ndarray:
    """Give runs of `not fill` of up to `longest` frames inside the array the value `fill`."""
    out = is_set.copy()
    edges = np.flatnonzero(np.diff(is_set)) + 1
    bounds = np.concatenate(([0], edges, [len(is_set)]))
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        at_edge = fill and (start == 0 or end == len(is_set))
        if is_set[start] != fill and end - start <= longest and not at_edge:
            out[start:end] = fill
    return out


def voiced_s(is_voiced: np.ndarray, chunk: Chunk) -> float:
    """Seconds of voiced audio in a chunk."""
    inside = is_voiced[chunk.start // HOP_LENGTH : -(-chunk.end // HOP_LENGTH)]
    return float(inside.sum()) / FRAME_RATE


def compression_ratio(text: str) -> float:
    """How much shorter zlib makes the text (UTF-8); high where it repeats itself."""
    raw = text.encode("utf-8")
    return len(raw) / len(zlib.compress(raw)) if raw else 0.0


def judge(
    text: str,
    n_words: int,
    avg_logprob: float,
    no_speech_prob: float,
    is_complete: bool,
    voiced: float,
) -> Verdict:
    """What a window's text is worth, `voiced` being its seconds of voiced audio.

    ok: speech. drop: nothing was said, or nothing that can be believed. loop: it repeats itself
    or says more than can be said in the time. thin: hardly any text for much voice. `n_words`
    counts characters where a script has no spaces.
    """
    chars_per_s, words_per_s = len(text) / max(voiced, 0.1), n_words / max(voiced, 0.1)
    repeats = compression_ratio(text) > MAX_COMPRESSION_RATIO
    if repeats and (not is_complete or chars_per_s > MAX_CHARS_PER_S):
        return "loop"
    if len(text) > 20 and chars_per_s > 45:
        return "loop"
    if words_per_s < 0.3 and voiced > 6 and no_speech_prob <= 0.6:
        return "thin"  # before the log-probability counts: a decoder that stops early is unsure
    is_plausible = avg_logprob > -1.3 and words_per_s >= 1.2 and no_speech_prob < 0.4
    if avg_logprob < -1.0 and not is_plausible:
        return "drop"
    if no_speech_prob > 0.6 and avg_logprob < (-0.4 if n_words <= 2 else -0.7):
        return "drop"
    return "ok"


def is_sure(text: str, avg_logprob: float, verdict: Verdict) -> bool:
    """Whether a second decoding may add words or replace a first one."""
    repeats = compression_ratio(text) > MAX_COMPRESSION_RATIO
    return verdict == "ok" and avg_logprob >= MIN_RETRY_LOGPROB and not repeats


# ---- windows to decode again -----------------------------------------------------------------


def halves(chunk: Chunk, energy_db: np.ndarray) -> list[Chunk]:
    """Two chunks that meet in the pause nearest the middle, with 0.3 s in common."""
    start, end = chunk.start // HOP_LENGTH, chunk.end // HOP_LENGTH
    quarter = (end - start) // 4
    cut = best_pause(energy_db, start + quarter, end - quarter) * HOP_LENGTH
    margin = 30 * HOP_LENGTH
    return [
        Chunk(chunk.start, min(cut + margin, chunk.end)),
        Chunk(max(cut - margin, chunk.start), chunk.end),
    ]


def gap_windows(
    gap: tuple[float, float], n_tried: int, energy_db: np.ndarray, n_samples: int
) -> list[Chunk]:
    """Chunks to decode for a gap (s, s) that was decoded `n_tried` times before; [] to give it up.

    With little context at first, since the speech before may be what made the decoder stop; then
    with more, since a stretch may need it to be understood; then cut in two, since a decoder that
    leaves one speaker out for another finds both when they are apart.
    """
    length_s, max_s = gap[1] - gap[0], MAX_WINDOW_S
    if n_tried == 0:
        context_s = (1.5, 1.5)
    elif n_tried == 1 and length_s >= 1.5:
        context_s = (7.0, 5.0)
    elif n_tried == 2 and length_s >= 4.0:
        context_s, max_s = (0.5, 0.5), min(MAX_WINDOW_S, length_s * 0.75)
    else:
        return []
    return _windows_around(gap, context_s, max_s, energy_db, n_samples)


def _windows_around(
    gap: tuple[float, float],
    context_s: tuple[float, float],
    max_s: float,
    energy_db: np.ndarray,
    n_samples: int,
) -> list[Chunk]:
    """Chunks of at most `max_s` that hold the gap (s, s) and up to `context_s` around it.

    They start, end and meet in pauses. `margin`: a gap begins that long after the last word, so
    the lost word began earlier.
    """
    margin = round(COVER_S * FRAME_RATE)
    low, high = (round(t * FRAME_RATE) for t in gap)
    before, after = (round(t * FRAME_RATE) for t in context_s)
    first = best_pause(energy_db, low - before, low - margin)
    last = best_pause(energy_db, high + margin, high + after)
    chunks, longest = [], round(max_s * FRAME_RATE)
    while last - first > longest:
        cut = best_pause(energy_db, first + longest // 2, first + longest)
        chunks.append(Chunk(first * HOP_LENGTH, cut * HOP_LENGTH))
        first = cut
    chunks.append(Chunk(first * HOP_LENGTH, min(last * HOP_LENGTH, n_samples)))
    return [chunk for chunk in chunks if chunk.end > chunk.start]
