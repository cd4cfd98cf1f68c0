"""Chunk results -> one transcript: timed words, then sentence-size segments.

`stitch` joins the words [n_words] of overlapping pieces of audio, `uncovered` finds speech that no
word covers, `insert` puts the words of a second decoding there, `split_segments` makes sentences.
Levels come as `energy_db` [n_frames], dBFS of 10 ms frames. Decoding is left to `decode.py`,
judging what was decoded to `quality.py`. A word may be a character or a token where a script has no
spaces.

Sources: the alignment's scores and the gap rules are from a measured study of long audio (dev set
of 26 minutes), in which time and text together lost the fewest words at joins; text alone lost a
third of them. Its single cut at one common word is replaced by the path in `_choose`: 1.4 instead
of 5.8 words lost in 100 joins of the tests' simulated decoder, 0.1 doubled by either.
"""

import functools
import itertools
import math
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

import numpy as np

FRAME_RATE = 100  # frames of `energy_db` and `is_voiced` a second
MIN_WORD_S = 0.01  # s, so that word times increase and no cue is empty; one frame

# Alignment of two copies: the study's scores, but a shift costs more (simulation: fewer losses).
MARGIN_S = 1.0  # s beyond the overlap in which words are still compared: their times are not exact
EQUAL, SIMILAR, OTHER, GAP = 2.0, 1.0, -0.3, -0.4
SHIFT_PER_S = 1.5  # a repetition said again is farther off than a copy
MAX_SHIFT_S = 1.5  # s between two copies of one word
SIMILAR_RATIO = 0.6  # difflib ratio of spellings of one word

# Choice between two copies, in units of one certain word.
EDGE_S = 0.5  # s from a window's own edge within which its words are trusted less
CUT_COST = 0.2  # to change windows where the copies share no word, in the quietest place
LOUD_COST = 0.6  # more in the loudest place, where the cut may go through a word
LONE_PROB = 0.3  # trust below which a word that one of two sides did not hear counts against
ANCHOR_COST = 0.05  # to change windows at a word both have: only for a gain
CENTRE_COST = 0.1  # more at the ends of the overlap: both windows are at their best in its middle
SMOOTH_FRAMES = 15  # 150 ms: longer than the closure of a stop consonant, shorter than a pause

# Speech that no word covers.
COVER_S = 0.25  # s that a word covers around itself: alignment is that exact
STRETCH_S, STRETCH_PER_LETTER_S = 0.9, 0.12  # s no spoken word exceeds; longer: speech was skipped
MIN_RUN_S = 0.7  # s of voice; shorter runs are breaths, laughs and alignment errors
MIN_GAP_S = 1.25  # s of voice in a gap, in one run or in several
CLOSE_S = 0.4  # s of pause inside one run
NEAR_S = 1.5  # s between runs of one gap

# Segments.
PAUSE_S = 1.0  # s of silence that always ends a segment
MAX_SEGMENT_S = 30.0  # s, one window
MAX_SEGMENT_CHARS = 200  # two to three subtitles; a long sentence
CLAUSE_S = 0.3  # s of pause that a comma is worth where a long sentence has to be split
SENTENCE_ENDS = ".!?…。！？．｡؟۔।॥።៕"
CLAUSE_ENDS = ",;:，、；：،؛—–"
CLOSERS = "\"'”’»)]}）」』】〉》"
ABBREVIATIONS = frozenset("mr mrs ms dr prof st sr jr vs fig".split())


@dataclass(frozen=True)
class Word:
    """One word, or one character or token of a script without spaces."""

    text: str  # as decoded, with its leading space: the joined texts are the transcript
    start_s: float  # s from the start of the audio
    end_s: float
    prob: float  # mean token probability, 0 to 1


@dataclass(frozen=True)
class Piece:
    """The words decoded from one stretch of audio, in order."""

    start_s: float  # s, the audio that was decoded
    end_s: float
    words: tuple[Word, ...]


@dataclass(frozen=True)
class Segment:
    """A sentence or a part of one."""

    start_s: float
    end_s: float
    text: str  # without space around it
    words: tuple[Word, ...]


def stitch(pieces: Sequence[Piece], energy_db: np.ndarray) -> list[Word]:
    """Join pieces that overlap, abut or leave holes into words that increase in time.

    A piece inside others corrects them only where it adds words.
    """
    words: list[Word] = []
    covered_to_s = -math.inf
    for piece in sorted(pieces, key=lambda piece: (piece.start_s, piece.end_s)):
        _merge_into(words, covered_to_s, piece, energy_db)
        covered_to_s = max(covered_to_s, piece.end_s)
    return words


def insert(
    words: Sequence[Word], gap: tuple[float, float], piece: Piece, energy_db: np.ndarray
) -> list[Word]:
    """Put the words of a piece around `gap` (s, s) into `words`; no gain in words, no change.

    Words stretched over the gap are taken out first: the piece has heard them where they are.
    """
    low = bisect_left(words, gap[0] - COVER_S, key=lambda word: word.end_s)
    high = bisect_right(words, gap[1] + COVER_S, key=lambda word: word.start_s)
    spoken = [word for word in words[low:high] if word.end_s - word.start_s <= _longest_s(word)]
    rest = [*words[:low], *spoken, *words[high:]]
    _merge_into(rest, math.inf, piece, energy_db)
    return rest if len(rest) > len(words) else list(words)


def _merge_into(
    words: list[Word], covered_to_s: float, piece: Piece, energy_db: np.ndarray
) -> None:
    """Join `piece` to `words`, which hold the audio up to `covered_to_s`, in place."""
    head = _ordered(piece.words, piece.start_s, piece.end_s)
    if piece.start_s >= covered_to_s:  # nothing was heard twice
        words += head
        return
    overlap = _Overlap(piece, covered_to_s, len(energy_db) / FRAME_RATE)
    low = bisect_right(words, overlap.start_s - MARGIN_S, key=lambda word: word.end_s)
    high = bisect_left(words, overlap.end_s + MARGIN_S, key=lambda word: word.start_s)
    n_head = bisect_left(head, overlap.end_s + MARGIN_S, key=lambda word: word.start_s)
    columns = _align(words[low:high], head[:n_head], overlap)
    merged = _choose(columns, overlap, energy_db) + head[n_head:]
    from_s = words[low - 1].end_s if low else 0.0
    after = [word.start_s for word in words[high : high + 1]]
    to_s = max(after or [word.end_s for word in [*words[-1:], *head[-1:]]], default=from_s)
    words[low:high] = _ordered(merged, from_s, to_s)


def _ordered(words: Sequence[Word], low_s: float, high_s: float) -> list[Word]:
    """The words with times inside [low_s, high_s] that increase and never overlap.

    Two words that overlap meet in the middle of what they share. Each keeps MIN_WORD_S, or its
    share of the stretch where words are more than it has room for.
    """
    starts = [min(max(word.start_s, low_s), high_s) for word in words]
    ends = [min(max(word.end_s, low_s), high_s) for word in words]
    for i in range(1, len(words)):
        if starts[i] < ends[i - 1]:
            middle = (max(starts[i - 1], starts[i]) + min(ends[i - 1], ends[i])) / 2
            ends[i - 1] = starts[i] = max(middle, starts[i - 1])
    shortest_s = min(MIN_WORD_S, max(0.0, high_s - low_s) / max(1, len(words)))
    limit_s = low_s
    for i in range(len(words)):
        starts[i] = max(starts[i], limit_s)
        limit_s = ends[i] = max(ends[i], starts[i] + shortest_s)
    limit_s = high_s
    for i in reversed(range(len(words))):
        ends[i] = min(ends[i], limit_s)
        limit_s = starts[i] = max(low_s, min(starts[i], ends[i] - shortest_s))
    return [
        replace(word, start_s=start_s, end_s=end_s)
        for word, start_s, end_s in zip(words, starts, ends, strict=True)
    ]


class _Overlap:
    """Audio that both sides heard; the left side is read before it."""

    def __init__(self, piece: Piece, left_end_s: float, audio_end_s: float) -> None:
        self.start_s, self.end_s = piece.start_s, min(piece.end_s, left_end_s)
        self.is_last = piece.end_s > left_end_s  # the right side is read after it, else the left
        # s, the sides' own edges; the ends of the audio are none
        self.left_end_s = left_end_s if self.is_last else math.inf
        self.right_start_s = piece.start_s if piece.start_s > 0 else -math.inf
        self.right_end_s = piece.end_s if piece.end_s < audio_end_s - MIN_WORD_S else math.inf

    def trust(self, time_s: float) -> tuple[float, float]:
        """How far a word of the left and of the right side at `time_s` can be trusted, 0 to 1.

        Less within EDGE_S of the side's own edge, where a word may be cut, if the other side
        has heard that place.
        """
        left_s = self.left_end_s - time_s if time_s > self.start_s else EDGE_S
        right_s = min(time_s - self.right_start_s, self.right_end_s - time_s)
        right_s = right_s if time_s < self.end_s else EDGE_S
        return min(1.0, max(0.0, left_s / EDGE_S)), min(1.0, max(0.0, right_s / EDGE_S))

    def was_heard_twice(self, time_s: float) -> bool:
        return self.start_s < time_s < self.end_s

    def gap(self, word: Word) -> float:
        """Score of a word that has no copy: none outside what both sides heard."""
        return GAP if self.was_heard_twice((word.start_s + word.end_s) / 2) else 0.0


@dataclass(frozen=True)
class _Column:
    """A place of the alignment: two copies of one word, or a word that one side has."""

    left: Word | None
    right: Word | None
    is_equal: bool = False

    @property
    def middle_s(self) -> float:
        words = [word for word in (self.left, self.right) if word]
        return sum(word.start_s + word.end_s for word in words) / (2 * len(words))


def _align(left: Sequence[Word], right: Sequence[Word], overlap: _Overlap) -> list[_Column]:
    """Pair the copies of words in order, for the best total score.

    A word without a copy costs only where the other side heard. Words of one side between two
    pairs come in order of time.
    """
    left_keys, right_keys = [_key(word.text) for word in left], [_key(word.text) for word in right]
    left_gaps, right_gaps = ([overlap.gap(word) for word in side] for side in (left, right))
    score = [[0.0, *itertools.accumulate(right_gaps)]]  # [n_left + 1][n_right + 1]
    step = [["right"] * (len(right) + 1)]
    for i, word in enumerate(left):
        score.append([score[i][0] + left_gaps[i]])
        step.append(["left"])
        for j, other in enumerate(right):
            pair = _pair_score(word, other, left_keys[i], right_keys[j])
            best, kind = max(
                (score[i][j] + pair, "pair"),
                (score[i][j + 1] + left_gaps[i], "left"),
                (score[i + 1][j] + right_gaps[j], "right"),
            )
            score[i + 1].append(best)
            step[i + 1].append(kind)
    i, j = len(left), len(right)
    columns, lone = [], []
    while i or j:
        kind = step[i][j]
        i, j = i - (kind != "right"), j - (kind != "left")
        if kind != "pair":
            lone.append(_Column(left[i], None) if kind == "left" else _Column(None, right[j]))
            continue
        columns += sorted(lone, key=lambda column: -column.middle_s)
        columns.append(_Column(left[i], right[j], left_keys[i] == right_keys[j] != ""))
        lone = []
    return (columns + sorted(lone, key=lambda column: -column.middle_s))[::-1]


def _pair_score(left: Word, right: Word, left_key: str, right_key: str) -> float:
    """How well two words fit as copies of one; -inf where they cannot be.

    The nearer of both ends counts: a window's first word is often stretched back to the window's
    start, its last word forward to the end.
    """
    shift_s = min(abs(left.start_s - right.start_s), abs(left.end_s - right.end_s))
    is_equal = left_key == right_key != ""
    if shift_s > MAX_SHIFT_S or bool(left_key) != bool(right_key):  # punctuation fits only its like
        return -math.inf
    similar = SIMILAR if _is_similar(left_key, right_key) else OTHER
    return (EQUAL if is_equal else similar) - SHIFT_PER_S * shift_s


@functools.lru_cache(maxsize=1 << 16)
def _key(text: str) -> str:
    """What makes two words equal: letters, marks and digits, without case; '' if none."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(char for char in folded if unicodedata.category(char)[0] in "LMN")


@functools.lru_cache(maxsize=1 << 16)
def _is_similar(left_key: str, right_key: str) -> bool:
    """Another spelling, or the half of a word that a window's edge left over."""
    short, long = sorted((left_key, right_key), key=len)
    is_half = long.startswith(short) or long.endswith(short)
    return is_half or SequenceMatcher(None, short, long).ratio() >= SIMILAR_RATIO


def _choose(columns: Sequence[_Column], overlap: _Overlap, energy_db: np.ndarray) -> list[Word]:
    """Read each column from the left or the right side, for the most trusted words in all.

    A word counts its probability times `_Overlap.trust`, so that a word only one side heard is
    kept unless it lies at that side's edge, and of two wordings the longer, surer one farther
    from its edge wins. Changing sides costs little where both have the same words, more
    elsewhere, least in the quietest place there.
    """
    if not columns:
        return []
    costs = _change_costs(columns, overlap, energy_db)  # [n_columns + 1]
    best = (0.0, -math.inf)  # total of the paths that read left, right
    came_from = []  # [n_columns + 1] x (side before left, side before right)
    gains = [_gains(column, overlap) for column in columns] + [(0.0, 0.0)]
    for cost, gain in zip(costs, gains, strict=True):
        to_left, to_right = best[1] - cost, best[0] - cost
        came_from.append((int(to_left > best[0]), int(best[1] >= to_right)))
        best = (max(best[0], to_left) + gain[0], max(best[1], to_right) + gain[1])
    side = came_from[-1][int(overlap.is_last)]
    chosen = []
    for column, sides in zip(reversed(columns), reversed(came_from[:-1]), strict=True):
        chosen.append((column.left, column.right)[side])
        side = sides[side]
    return [word for word in reversed(chosen) if word]


def _gains(column: _Column, overlap: _Overlap) -> tuple[float, float]:
    """Worth of reading a column from the left and from the right."""
    left_trust, right_trust = overlap.trust(column.middle_s)
    if column.is_equal:  # the text is the same: only times and punctuation may differ
        return left_trust, right_trust
    left = column.left.prob * left_trust if column.left else 0.0
    right = column.right.prob * right_trust if column.right else 0.0
    is_lone = not (column.left and column.right) and overlap.was_heard_twice(column.middle_s)
    if is_lone and left + right < LONE_PROB:  # more often invented than missed by the other side
        return left - LONE_PROB * bool(column.left), right - LONE_PROB * bool(column.right)
    return left, right


def _change_costs(
    columns: Sequence[_Column], overlap: _Overlap, energy_db: np.ndarray
) -> list[float]:
    """Cost of changing sides before each column and after the last, [n_columns + 1]."""
    times = [column.middle_s for column in columns]
    bounds = [times[0] - MARGIN_S, *times, times[-1] + MARGIN_S]
    is_equal = [False, *(column.is_equal for column in columns), False]
    first_s = min(bounds)
    loudness = _loudness(energy_db, first_s, max(bounds))
    centre_s, length_s = (overlap.start_s + overlap.end_s) / 2, overlap.end_s - overlap.start_s
    costs = []
    for between, are_equal in zip(
        itertools.pairwise(bounds), itertools.pairwise(is_equal), strict=True
    ):
        low, high = (round((time_s - first_s) * FRAME_RATE) for time_s in sorted(between))
        quietest = low + int(loudness[low : high + 1].argmin())
        time_s = first_s + quietest / FRAME_RATE
        cost = CUT_COST + LOUD_COST * float(loudness[quietest])
        if any(are_equal):
            time_s, cost = sum(between) / 2, ANCHOR_COST
        if overlap.is_last:
            cost += CENTRE_COST * abs(time_s - centre_s) / (length_s + 0.2)
        costs.append(cost)
    return costs


def _loudness(energy_db: np.ndarray, low_s: float, high_s: float) -> np.ndarray:
    """Smoothed level of the frames from `low_s` to `high_s`, from 0, the quietest, to 1."""
    half = SMOOTH_FRAMES // 2
    frames = np.arange(-half, round((high_s - low_s) * FRAME_RATE) + half + 1)
    frames = np.clip(frames + round(low_s * FRAME_RATE), 0, max(0, len(energy_db) - 1))
    level = energy_db[frames] if len(energy_db) else np.zeros(len(frames))
    level = np.convolve(level, np.full(SMOOTH_FRAMES, 1 / SMOOTH_FRAMES), mode="valid")
    return (level - level.min()) / max(level.max() - level.min(), 1.0)


def uncovered(
    words: Sequence[Word], is_voiced: np.ndarray, masked: Iterable[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Stretches (s, s) of voice that no word covers, outside those of `masked` (s, s).

    `is_voiced` is bool [n_frames] of 10 ms. A word with more voice inside it than any spoken
    word has covers nothing.
    """
    n_frames = len(is_voiced)
    is_covered, is_masked = np.zeros(n_frames, bool), np.zeros(n_frames, bool)
    for word in words:
        n_voiced = is_voiced[_frames(word.start_s, word.end_s, n_frames)].sum()
        if n_voiced <= _longest_s(word) * FRAME_RATE:
            is_covered[_frames(word.start_s - COVER_S, word.end_s + COVER_S, n_frames)] = True
    for start_s, end_s in masked:
        is_masked[_frames(start_s, end_s, n_frames)] = True
    is_lost = is_voiced & ~is_covered & ~is_masked
    gaps: list[tuple[int, int]] = []
    for start, end in _runs(is_lost, round(CLOSE_S * FRAME_RATE)):
        if is_lost[start:end].sum() < MIN_RUN_S * FRAME_RATE:
            continue
        near = gaps and start - gaps[-1][1] < NEAR_S * FRAME_RATE
        if near and not is_masked[gaps[-1][1] : start].any():
            start = gaps.pop()[0]
        gaps.append((start, end))
    gaps = [(a, b) for a, b in gaps if is_lost[a:b].sum() >= MIN_GAP_S * FRAME_RATE]
    return [(start / FRAME_RATE, end / FRAME_RATE) for start, end in gaps]


def _frames(start_s: float, end_s: float, n_frames: int) -> slice:
    """The frames from `start_s` to `end_s` that exist."""
    start = min(max(0, round(start_s * FRAME_RATE)), n_frames)
    return slice(start, min(max(start, round(end_s * FRAME_RATE)), n_frames))


def _runs(is_set: np.ndarray, n_close: int) -> list[tuple[int, int]]:
    """Runs [start, end) of true values, those less than `n_close` apart as one."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], is_set.astype(np.int8), [0]))))
    runs: list[tuple[int, int]] = []
    for start, end in edges.reshape(-1, 2).tolist():
        if runs and start - runs[-1][1] < n_close:
            start = runs.pop()[0]
        runs.append((start, end))
    return runs


def _longest_s(word: Word) -> float:
    """The longest time, s, that speaking the word may take; a digit is a word of four letters."""
    key = _key(word.text)
    n_letters = len(key) + 3 * sum(char.isdigit() for char in key)
    return STRETCH_S + STRETCH_PER_LETTER_S * n_letters


def tighten(words: Sequence[Word], is_voiced: np.ndarray) -> list[Word]:
    """The words without the silence that the alignment gave them, by voice of 10 ms frames.

    A word that holds no voice keeps its times.
    """
    tight = []
    for word in words:
        inside = _frames(word.start_s, word.end_s, len(is_voiced))
        voiced = np.flatnonzero(is_voiced[inside])
        if len(voiced):
            start_s = max(word.start_s, (inside.start + int(voiced[0])) / FRAME_RATE)
            end_s = min(word.end_s, (inside.start + int(voiced[-1]) + 1) / FRAME_RATE)
            word = replace(word, start_s=start_s, end_s=max(end_s, start_s + MIN_WORD_S))
        tight.append(word)
    return tight


def split_segments(words: Sequence[Word], energy_db: np.ndarray) -> list[Segment]:
    """Split at sentence ends, at pauses, and where a sentence is too long.

    Words that the alignment stretched are cut to their loudest part first, so that no segment
    starts before its speech or sits through a silence. The joined word texts stay the transcript.
    """
    if not words:
        return []
    words = _ordered(words, 0.0, max(word.end_s for word in words) + MIN_WORD_S)
    words = _unstretched(words, energy_db)
    segments, sentence = [], []
    for word, following in itertools.zip_longest(words, words[1:]):
        sentence.append(word)
        has_pause = following is None or following.start_s - word.end_s >= PAUSE_S
        if has_pause or _ends_sentence(sentence, following):
            for part in _split_long(sentence):
                text = "".join(word.text for word in part).strip()
                segments.append(Segment(part[0].start_s, part[-1].end_s, text, tuple(part)))
            sentence = []
    return [segment for segment in segments if segment.text]


def _unstretched(words: Sequence[Word], energy_db: np.ndarray) -> list[Word]:
    """The words, those longer than speech can be cut to the loudest part of that length."""
    total = np.concatenate(([0.0], np.cumsum(energy_db, dtype=np.float64)))
    shorter = []
    for word in words:
        inside = _frames(word.start_s, word.end_s, len(energy_db))
        n_kept = round(_longest_s(word) * FRAME_RATE)
        if inside.stop - inside.start > n_kept:
            sums = total[inside.start + n_kept : inside.stop + 1]
            sums = sums - total[inside.start : inside.stop + 1 - n_kept]
            start_s = max(word.start_s, (inside.start + int(sums.argmax())) / FRAME_RATE)
            end_s = min(word.end_s, start_s + n_kept / FRAME_RATE)
            word = replace(word, start_s=start_s, end_s=end_s)
        shorter.append(word)
    return shorter


def _ends_sentence(words: Sequence[Word], following: Word) -> bool:
    """Whether a sentence ends after the last of `words`.

    Not in "3.5", "Mr. X", "J. S. Bach", before a small letter, or before a closing mark.
    """
    text = "".join(word.text for word in words[-4:]).strip().rstrip(CLOSERS)
    rest = following.text.strip()
    if not text or text[-1] not in SENTENCE_ENDS or not rest:
        return False
    if all(char in CLOSERS + SENTENCE_ENDS + CLAUSE_ENDS for char in rest):
        return False
    if text[-1] not in ".!?…":
        return True
    if not following.text[0].isspace() or rest.lstrip("\"'“‘«([")[:1].islower():
        return False
    last = text.split()[-1].rstrip(".").rpartition(".")[2].lstrip("\"'“‘«([").casefold()
    is_initial = len(last) == 1 and last.isalpha() and last != "i"
    return text[-1] != "." or not (is_initial or last in ABBREVIATIONS)


def _split_long(words: list[Word]) -> list[list[Word]]:
    """Parts within the limits, each cut at the longest pause of its second half.

    One word over the limits stays whole.
    """
    parts, part = [], []
    for word in words:
        part.append(word)
        while len(part) > 1 and _is_long(part):
            worth = [_pause_worth(*pair) for pair in itertools.pairwise(part)]
            cut = max(range(len(part) // 2, len(part)), key=lambda cut, w=worth: (w[cut - 1], cut))
            parts.append(part[:cut])
            part = part[cut:]
    return [*parts, part]


def _is_long(words: Sequence[Word]) -> bool:
    n_chars = sum(len(word.text) for word in words)
    return n_chars > MAX_SEGMENT_CHARS or words[-1].end_s - words[0].start_s > MAX_SEGMENT_S


def _pause_worth(word: Word, following: Word) -> float:
    """Seconds of pause after a word, and what a comma is worth."""
    has_comma = word.text.strip().rstrip(CLOSERS)[-1:] in tuple(CLAUSE_ENDS + SENTENCE_ENDS)
    return following.start_s - word.end_s + CLAUSE_S * has_comma
