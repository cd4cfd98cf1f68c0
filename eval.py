"""Quality on a manifest of audio files with reference texts, beside rivals in the same run.

In:  a manifest, one JSON object a line: audio (path beside the manifest), duration_s, text,
     language, kind, set.
Out: a table on stderr, then one JSON line on stdout with the same figures.

Words are compared after OpenAI's English normaliser, or its basic one for other languages; Chinese,
Japanese and Korean are counted by character. A file whose reference is empty and whose set is
`nospeech` must give no words: what it gives is invented.

Rounding, or a window that starts a little later, moves some words either way. With `--delays_ms
0 50 100 150` every file is read four times, with so much silence before it, so that two systems
differ by less chance; how much chance is left, the interval of each rival's difference says.

    python eval.py --manifest ../shared/corpus/manifest.jsonl --kind long --language en
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jiwer
import numpy as np
import soundfile
import torch
from tqdm import tqdm
from whisper.normalizers import BasicTextNormalizer, EnglishTextNormalizer

from chunk_audio import SAMPLE_RATE, WINDOW_S, load_audio
from generate import (
    add_options,
    decode_step_from_args,
    load_from_args,
    options_from_args,
    peak_memory_gb,
    transcribe,
)
from model import Whisper
from rivals import RIVALS, System, add_rival_options, load_rival
from tokenizer import Tokenizer, language_code

CHARACTER_LANGUAGES = ("zh", "ja", "ko")
BLOCK_WORDS = 20  # whose errors are drawn together: one error leads to others
N_DRAWS = 2000


@dataclass(frozen=True)
class Row:
    """What one system made of one file."""

    audio: str
    file: str  # the same without the silence that was put before it
    language: str
    duration_s: float
    seconds: float
    n_words: int  # of the reference, normalised
    substitutions: int
    deletions: int
    insertions: int
    repeats: int  # 5-grams that occur more often than in the reference
    places: list[int]  # errors at each word of the reference
    n_windows: int | None = None  # encoder runs; unknown for rivals
    n_retries: int | None = None
    text: str = ""

    @property
    def n_errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions


def normalise(text: str, language: str) -> list[str]:
    """Words, or characters, to compare."""
    if language == "en":
        return EnglishTextNormalizer()(text).split()
    by_character = language in CHARACTER_LANGUAGES
    return BasicTextNormalizer(split_letters=by_character)(text).split()


def count_errors(reference: list[str], hypothesis: list[str]) -> tuple[int, int, int]:
    """Substitutions, deletions, insertions of the best alignment."""
    if not reference or not hypothesis:
        return 0, len(reference), len(hypothesis)
    out = jiwer.process_words(" ".join(reference), " ".join(hypothesis))
    return out.substitutions, out.deletions, out.insertions


def error_places(reference: list[str], hypothesis: list[str]) -> list[int]:
    """Errors at each word of the reference; an insertion counts at the word after it."""
    if not reference or not hypothesis:
        return [1] * len(reference)
    places = [0] * (len(reference) + 1)
    (alignment,) = jiwer.process_words(" ".join(reference), " ".join(hypothesis)).alignments
    for part in alignment:
        if part.type == "insert":
            places[part.ref_start_idx] += part.hyp_end_idx - part.hyp_start_idx
        elif part.type != "equal":
            for i in range(part.ref_start_idx, part.ref_end_idx):
                places[i] += 1
    return [*places[:-2], places[-2] + places[-1]]


def count_repeats(reference: list[str], hypothesis: list[str], n: int = 5) -> int:
    """n-grams of the hypothesis that it has more often than the reference, beyond once."""

    def grams(words: list[str]) -> Counter:
        return Counter(zip(*(words[i:] for i in range(n)), strict=False))

    allowed = grams(reference)
    return sum(max(0, k - max(1, allowed[g])) for g, k in grams(hypothesis).items())


# ---- systems ---------------------------------------------------------------------------------


def our_system(args: argparse.Namespace, model: Whisper, tokenizer: Tokenizer) -> System:
    options = options_from_args(args)
    step = decode_step_from_args(args)

    def run(path: Path, language: str) -> tuple[str, int, int]:
        file_options = dataclasses.replace(options, language=language)
        result = transcribe(model, tokenizer, path, file_options, step)
        return result.text, result.stats.n_windows, result.stats.n_retries

    return run


def build_systems(args: argparse.Namespace) -> dict[str, System]:
    """The systems asked for by name, ours first."""
    systems = {} if args.peers_only else {"whisper-fast": our_system(args, *load_from_args(args))}
    systems |= {peer: load_rival(peer, args) for peer in args.peer}
    return systems


# ---- scores ----------------------------------------------------------------------------------


def evaluate(system: System, item: dict) -> Row:
    """Run one system on one file and compare."""
    start = time.perf_counter()
    text, n_windows, n_retries = system(item["path"], item["language"])
    seconds = time.perf_counter() - start
    reference = normalise(item.get("text") or "", item["language"])
    hypothesis = normalise(text, item["language"])
    substitutions, deletions, insertions = count_errors(reference, hypothesis)
    return Row(
        item["audio"], item["file"], item["language"], item["duration_s"], seconds,
        len(reference), substitutions, deletions, insertions,
        count_repeats(reference, hypothesis), error_places(reference, hypothesis),
        n_windows, n_retries, text,
    )  # fmt: skip


def summarise(rows: list[Row]) -> dict:
    """Totals over files; error rates in percent of reference words."""
    spoken = [row for row in rows if row.n_words]
    empty = [row for row in rows if not row.n_words]
    audio_s, n_words = sum(r.duration_s for r in rows), sum(r.n_words for r in spoken)
    out = {
        "files": len(rows),
        "audio_s": round(audio_s, 1),
        "words": n_words,
        "wer": round(100 * sum(r.n_errors for r in spoken) / max(1, n_words), 2),
        "substitutions": sum(r.substitutions for r in spoken),
        "deletions": sum(r.deletions for r in spoken),
        "insertions": sum(r.insertions for r in spoken),
        "repeats": sum(r.repeats for r in rows),
        "invented": sum(r.insertions for r in empty),
        "x_realtime": round(audio_s / max(1e-9, sum(r.seconds for r in rows)), 2),
    }
    if rows and rows[0].n_windows is not None:
        out["windows_per_30s"] = round(sum(r.n_windows for r in rows) * WINDOW_S / audio_s, 2)
        out["retries"] = sum(r.n_retries for r in rows)
    return out


def difference(rows: list[Row], others: list[Row]) -> dict:
    """WER of `others` less that of `rows`, points, and the interval that holds it in 95 % of draws.

    Blocks of the references are drawn with replacement, all readings of a block together. An
    interval that holds 0 decides nothing.
    Source: Bisani and Ney, "Bootstrap estimates for confidence intervals", ICASSP 2004.
    """
    blocks: dict[tuple[str, int], np.ndarray] = {}
    for row, other in zip(rows, others, strict=True):
        for i in range(0, row.n_words, BLOCK_WORDS):
            ours, theirs = (r.places[i : i + BLOCK_WORDS] for r in (row, other))
            block = np.array([sum(theirs) - sum(ours), len(ours)])
            blocks[row.file, i] = blocks.get((row.file, i), 0) + block
    if not blocks:
        return {}
    table = np.stack(list(blocks.values()))  # [n_blocks, 2]
    draws = np.random.default_rng(0).integers(len(table), size=(N_DRAWS, len(table)))
    errors, words = table[draws].sum(axis=1).T  # [N_DRAWS] each
    interval = np.percentile(100 * errors / words, (2.5, 97.5)).round(2).tolist()
    errors, words = table.sum(axis=0).tolist()
    return {"points": round(100 * errors / words, 2), "interval": interval}


def print_table(name: str, rows: list[Row]) -> None:
    print(
        f"\n{name}\n{'WER %':>6} {'sub':>4} {'del':>4} {'ins':>4} {'rep':>4}  file", file=sys.stderr
    )
    for row in rows:
        rate = f"{100 * row.n_errors / row.n_words:6.2f}" if row.n_words else "     -"
        print(
            f"{rate} {row.substitutions:4} {row.deletions:4} {row.insertions:4} {row.repeats:4}  "
            f"{row.audio}", file=sys.stderr,
        )  # fmt: skip


def read_manifest(args: argparse.Namespace) -> list[dict]:
    """Files with a reference, or that must be empty, of the kinds and languages asked for."""
    lines = args.manifest.read_text(encoding="utf-8").splitlines()
    language = None if args.language in ("auto", "each") else language_code(args.language)
    items = []
    for item in map(json.loads, lines):
        scored = item.get("text") or item.get("set") == "nospeech"
        wanted = (args.kind is None or item.get("kind") in args.kind) and (
            args.only is None or any(part in item["audio"] for part in args.only)
        )
        if scored and item.get("duration_s") and wanted:
            if language is None or item["language"] == language:
                items.append(item)
    return items


def add_paths(items: list[dict], folder: Path, delays_ms: list[int], to: Path) -> list[dict]:
    """Each item once for each silence before it, ms, with the `path` of its audio.

    Copies with silence are written into `to`.
    """
    out = []
    for item in items:
        for ms in delays_ms:
            path, name = folder / item["audio"], item["audio"]
            if ms:
                waveform = load_audio(path).clamp(-1, 1)
                samples = torch.cat((torch.zeros(ms * SAMPLE_RATE // 1000), waveform * 32767))
                path, name = to / f"{len(out)}.wav", f"{name}+{ms}ms"
                soundfile.write(path, samples.round().short().numpy(), SAMPLE_RATE)
            out.append({**item, "path": path, "audio": name, "file": item["audio"]})
    return out


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Word error rates over a manifest.")
    add_options(parser)
    add = parser.add_argument
    add("--manifest", type=Path, required=True, help="JSON lines; see the top of this file")
    add("--kind", nargs="+", help="only files of these kinds: short, long, hard")
    add("--only", nargs="+", help="only files whose name contains one of these")
    add("--peer", nargs="+", default=[], choices=RIVALS, help="rivals to run on the same files")
    add("--peers_only", action="store_true", help="leave our own run out")
    add("--delays_ms", nargs="+", type=int, default=[0], help="read each file after such silences")
    add("--warm_up", action="store_true", help="run the first file once before timing")
    add_rival_options(parser)
    add("--texts", type=Path, help="write every transcript to this JSON file")
    args = parser.parse_args(argv)
    if args.language == "each":
        parser.error("--language each: every file is read in its own; name one to choose files")
    if args.peers_only and not args.peer:
        parser.error("--peers_only: name them with --peer")
    if args.texts and not args.texts.resolve().parent.is_dir():
        parser.error(f"--texts {args.texts}: its folder does not exist")
    if min(args.delays_ms) < 0:
        parser.error(f"--delays_ms {args.delays_ms}: allowed: 0 and above")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        return run(args)
    except (OSError, ValueError, ImportError) as error:
        print(f"eval.py: {error}", file=sys.stderr)
        return 1


def run(args: argparse.Namespace) -> int:
    items = read_manifest(args)
    if not items:
        raise ValueError(
            "no file of the manifest is of that kind and language, and has a duration_s and a text"
        )
    summary, texts, first_rows = {}, {}, None
    with tempfile.TemporaryDirectory() as delayed:
        items = add_paths(items, args.manifest.parent, args.delays_ms, Path(delayed))
        for name, system in build_systems(args).items():
            if args.warm_up:
                evaluate(system, items[0])
            rows = [evaluate(system, item) for item in tqdm(items, desc=name)]
            print_table(name, rows)
            summary[name] = summarise(rows)
            if first_rows is None:
                first_rows = rows
            else:
                summary[name]["difference"] = difference(first_rows, rows)
            texts[name] = {row.audio: row.text for row in rows}
    for name, figures in summary.items():
        print(f"{name}: {figures}", file=sys.stderr)
    if args.texts:
        args.texts.write_text(json.dumps(texts, ensure_ascii=False, indent=1), encoding="utf-8")
    threads = torch.get_num_threads()
    memory_gb = round(peak_memory_gb(torch.device(args.device)), 3)  # of all systems that ran
    print(json.dumps({
        "systems": summary, "process_peak_memory_gb": memory_gb, "threads": threads,
        "torch": torch.__version__,
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
