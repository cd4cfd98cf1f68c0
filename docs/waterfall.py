"""Draw docs/waterfall.png: one file, from plain PyTorch to all that this project has, bar by bar.

Each bar is a run of `benchmark.py` in a process of its own, on the same weights and file, with its
command under it; rivals first and last. Needs matplotlib and the files named by the options.

    python docs/waterfall.py --audio columbia.flac --reference columbia.txt \
      --checkpoint_folder checkpoints/base --openai_path base.pt --ct2_path ct2/base
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
INT8 = "--checkpoint_path model_int8.safetensors"
# label, options of benchmark.py, the system of that run to show
BARS = [
    ("openai-whisper\nfp32, cache grows", "--peers openai-whisper --openai_path", "openai-whisper"),
    ("static cache\nfp32, eager, batch 1", "--batch_size 1", "whisper-fast"),
    ("+ compile", "--batch_size 1 --compile", "whisper-fast"),
    ("+ int8 weights", f"--batch_size 1 --compile {INT8} --cache_dtype fp32", "whisper-fast"),
    ("+ int8 cache", f"--batch_size 1 --compile {INT8} --cache_dtype int8", "whisper-fast"),
    ("+ batch 8", f"--batch_size 8 --compile {INT8} --cache_dtype int8", "whisper-fast"),
    (
        "faster-whisper\nint8, batch 8",
        "--peers faster-whisper-batched --ct2_path",
        "faster-whisper-batched",
    ),
]


def measure(args: argparse.Namespace, options: str, system: str) -> dict:
    """Seconds, x real time and WER of one system, in a process of its own."""
    words = options.split()
    for name in ("openai_path", "ct2_path"):
        if words[-1] == f"--{name}":
            words.append(str(getattr(args, name)))
    words = [str(args.checkpoint_folder / w) if w.endswith(".safetensors") else w for w in words]
    if "--checkpoint_path" not in words:
        words += ["--checkpoint_path", str(args.checkpoint_folder / "model.safetensors")]
    common = ["--audio", args.audio, "--reference", args.reference, "--language", "en"]
    common += ["--runs", str(args.runs), "--only", system, "--batch_sizes"]
    command = [sys.executable, ROOT / "benchmark.py", *words, *common]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"waterfall.py: {options}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])["files"][system]


def draw(results: list[dict], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(11, 5.5), layout="constrained")
    colours = ["#b9b9b9" if "whisper-fast" != bar[2] else "#3b6fb6" for bar in BARS]
    speeds = [result["x_realtime"] for result in results]
    bars = axes.bar(range(len(BARS)), speeds, color=colours)
    labels = [f"{x:.1f}×\nWER {r['wer']:.2f} %" for x, r in zip(speeds, results, strict=True)]
    axes.bar_label(bars, labels, padding=3, fontsize=9)
    ticks = [f"{label}\n\n{_wrapped(options)}" for label, options, _ in BARS]
    axes.set_xticks(range(len(BARS)), ticks, fontsize=8)
    axes.set_ylabel("× real time, whole file")
    axes.set_ylim(0, 1.15 * max(speeds))
    axes.set_title("A speech of 199 s, Whisper base, 2 CPU cores")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _wrapped(options: str) -> str:
    """One option a line."""
    return options.replace(" --", "\n--").replace(" model", "\nmodel")


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the waterfall of speeds.")
    for name in ("audio", "reference", "checkpoint_folder", "openai_path", "ct2_path"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3, help="measured runs of each bar")
    args = parser.parse_args()
    results = []
    for label, options, system in BARS:
        results.append(measure(args, options, system))
        print(label.replace("\n", ", "), json.dumps(results[-1]), flush=True)
    draw(results, ROOT / "docs" / "waterfall.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
