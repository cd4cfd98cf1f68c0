"""The benchmark and its rivals run; what they measure is for people to read."""

import argparse
import json

import pytest

import benchmark
from rivals import RivalProcess, add_rival_options, load_rival


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_stages_steps_and_a_file(tiny_en, samples, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "load_from_args", lambda args: tiny_en)
    reference = tmp_path / "reference.txt"
    reference.write_text("nothing of the kind", encoding="utf-8")
    common = ["--audio", samples / "short.wav", "--reference", reference, "--language", "English"]
    common += ["--runs", "1", "--batch_sizes", "1", "2", "--peers", "whisper.cpp"]
    assert benchmark.main([str(word) for word in common]) == 0
    out = last_line(capsys)
    assert [step["rows"] for step in out["steps"]] == [1, 2]
    assert all(step["tok_s"] > 0 and 0 < step["share_of_read"] < 2 for step in out["steps"])
    (ours,) = out["files"].values()  # the rival that cannot run here was left out
    assert ours["wer"] > 100 and ours["seconds"] > 0 and ours["peak_memory_gb"] > 0.1
    assert tiny_en[0].decode_state is None or tiny_en[0].decode_state.suppress_mask.isfinite().any()


def test_random_weights_and_wrong_options(capsys):
    common = ["--random", "tiny", "--runs", "1", "--batch_sizes", "1"]
    for more in ([], ["--quantize", "int8"], ["--quantize", "int4", "--cache_dtype", "fp32"]):
        assert benchmark.main(common + more) == 0
        assert last_line(capsys)["stages"]["encoder_s"] > 0
    wrong = [["--random", "tiny", "--audio", "x.wav"], ["--quantize", "int8"]]
    wrong += [["--audio", "x.wav", "--reference", "x.txt"], ["--peers", "whisper.cpp"]]
    wrong += [["--random", "tiny", "--runs", "0"], ["--random", "tiny", "--batch_sizes", "0"]]
    for options in wrong:  # words are compared, and rivals run, in one language
        with pytest.raises(SystemExit):
            benchmark.main(options)


def test_a_rival_without_weights_is_named():
    parser = argparse.ArgumentParser()
    add_rival_options(parser)
    args = parser.parse_args([])
    with pytest.raises(ValueError, match="--ct2_path"):
        RivalProcess("faster-whisper", args)
    with pytest.raises(ValueError, match="--ggml_path"):
        load_rival("whisper.cpp", args)
    args.batch_size, args.ct2_path, args.device = 1, "nowhere", "cpu"
    with pytest.raises(RuntimeError):  # with what that process said
        RivalProcess("faster-whisper", args)
