"""The harness itself: normalisation, counts, and what the last line says."""

import json

import pytest
from whisper.normalizers import EnglishTextNormalizer

import eval as evaluation


def test_counts_by_hand():
    reference = "a b c d e f".split()
    assert evaluation.count_errors(reference, "a x c d e f g".split()) == (1, 0, 1)
    assert evaluation.count_errors(reference, "a c d e f".split()) == (0, 1, 0)
    assert evaluation.count_errors([], ["x", "y"]) == (0, 0, 2)
    assert evaluation.count_errors(reference, []) == (0, 6, 0)


def test_errors_have_a_place():
    reference = "a b c d e f".split()
    assert evaluation.error_places(reference, "a x c e f g h".split()) == [0, 1, 0, 1, 0, 2]
    assert evaluation.error_places(reference, "z a b c d e f".split()) == [1, 0, 0, 0, 0, 0]
    assert evaluation.error_places(reference, []) == [1] * 6
    assert evaluation.error_places([], ["x"]) == []


def rows_of(file_errors: list[list[int]]) -> list[evaluation.Row]:
    """Two readings of each of several files, with errors at each word."""
    rows = []
    for n, places in enumerate(file_errors):
        for name in (f"{n}.wav", f"{n}.wav+50ms"):
            figures = (10.0, 1.0, len(places), sum(places), 0, 0, 0, places)
            rows.append(evaluation.Row(name, f"{n}.wav", "en", *figures))
    return rows


def test_a_difference_has_an_interval():
    """By hand: one block, half a block, none; readings of a file are no more evidence than one."""
    ours = [[1, 0] * 20, [0] * 20, []]
    theirs = [[1, 1] * 20, [1] * 10 + [0] * 10, []]
    equal = evaluation.difference(rows_of(ours), rows_of(ours))
    assert equal == {"points": 0.0, "interval": [0.0, 0.0]}
    same_everywhere = evaluation.difference(rows_of(ours), rows_of(theirs))
    assert same_everywhere == {"points": 50.0, "interval": [50.0, 50.0]}
    one_block_of_many = [[20 * (n == 0), *[0] * 19] for n in range(10)]
    out = evaluation.difference(rows_of([[0] * 20] * 10), rows_of(one_block_of_many))
    assert out["points"] == 10.0
    assert out["interval"] == [0.0, 30.0]  # drawn up to three times of ten, 97.5 % of the time
    back = evaluation.difference(rows_of(one_block_of_many), rows_of([[0] * 20] * 10))
    assert back == {"points": -10.0, "interval": [-30.0, 0.0]}
    assert evaluation.difference(rows_of([[]]), rows_of([[]])) == {}


def test_normalisation_by_language():
    assert evaluation.normalise("Mr. Smith paid $20,000!", "en") == (
        EnglishTextNormalizer()("Mr. Smith paid $20,000!").split()
    )
    assert evaluation.normalise("Schöne Grüße!", "de") == ["schöne", "grüße"]
    assert evaluation.normalise("你好，世界", "zh") == ["你", "好", "世", "界"]


def test_repeats_beyond_the_reference():
    phrase = "one two three four five".split()
    assert evaluation.count_repeats(phrase * 3, phrase * 3) == 0
    assert evaluation.count_repeats(phrase, phrase * 3) >= 2
    assert evaluation.count_repeats(phrase, phrase) == 0


@pytest.fixture
def manifest(tmp_path, samples):
    text = (samples / "short.txt").read_text(encoding="utf-8")
    rows = [
        {"audio": str(samples / "short.wav"), "duration_s": 11.795, "text": text,
         "language": "en", "kind": "short", "set": "synthetic"},
        {"audio": str(samples / "short.wav"), "duration_s": 11.795, "text": text,
         "language": "de", "kind": "long", "set": "synthetic"},
    ]  # fmt: skip
    path = tmp_path / "manifest.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_last_line_is_json_with_the_figures(manifest, tiny_en, capsys):
    args = ["--manifest", str(manifest), "--language", "en", "--model", "tiny.en"]
    assert evaluation.main(args) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["systems"]["whisper-fast"]
    assert figures["files"] == 1 and figures["words"] > 30
    assert 0 < figures["wer"] < 25
    errors = figures["substitutions"] + figures["deletions"] + figures["insertions"]
    assert figures["wer"] == pytest.approx(100 * errors / figures["words"], abs=0.01)
    assert figures["windows_per_30s"] == pytest.approx(30 / 11.795, abs=0.01)


def test_delays_read_each_file_again(manifest, tiny_en, capsys, tmp_path):
    args = ["--manifest", str(manifest), "--language", "en", "--model", "tiny.en"]
    texts = tmp_path / "texts.json"
    assert evaluation.main([*args, "--delays_ms", "0", "40", "2000", "--texts", str(texts)]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["systems"]["whisper-fast"]
    assert figures["files"] == 3 and 0 < figures["wer"] < 25
    names = [name.rpartition("/")[2] for name in json.loads(texts.read_text())["whisper-fast"]]
    assert names == ["short.wav", "short.wav+40ms", "short.wav+2000ms"]
    with pytest.raises(SystemExit):
        evaluation.main([*args, "--delays_ms", "-5"])


def test_languages_choose_files(manifest, capsys):
    with pytest.raises(SystemExit):
        evaluation.main(["--manifest", str(manifest), "--language", "each"])
    assert "every file is read in its own" in capsys.readouterr().err
    for wrong in (["--peers_only"], ["--texts", str(manifest / "nowhere" / "texts.json")]):
        with pytest.raises(SystemExit):
            evaluation.main(["--manifest", str(manifest), *wrong])


def test_nothing_to_do_is_an_error(manifest, capsys):
    assert evaluation.main(["--manifest", str(manifest), "--language", "fr"]) == 1
    assert "no file of the manifest" in capsys.readouterr().err
