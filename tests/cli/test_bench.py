"""`bench`: an experiment with its table, resumed."""

from tests.helpers.cli import call


def test_bench_runs_resumes_and_writes_its_table(place):
    (place / "models.toml").write_text(
        '[[model]]\ncheckpoint = "sym.safetensors"\n\n[[model]]\ncheckpoint = "rpc.safetensors"\niterations = 1\n'
    )
    arguments = (
        "bench",
        "paper-attacks",
        "--models",
        "models.toml",
        "--data",
        "folder:pictures",
        "--out",
        "bench",
        "--reference",
    )
    done = call(*arguments, cwd=place)
    assert done.returncode == 0, done.stderr
    text = (place / "bench" / "paper-attacks.md").read_text()
    assert "(1iter/layer1)" in text.replace("\\", "")
    assert "No result here has a published counterpart" in text
    assert (place / "bench" / "paper-attacks.tex").is_file()
    before = {p: p.stat().st_mtime_ns for p in (place / "bench").rglob("*.parquet")}
    assert call(*arguments, cwd=place).returncode == 0
    assert {p: p.stat().st_mtime_ns for p in (place / "bench").rglob("*.parquet")} == before
    wrong = call(
        "bench", "paper-robustness", "--models", "models.toml", "--data", "folder:pictures", "--out", "b2", cwd=place
    )
    assert (wrong.returncode, "expected --data for imagenet" in wrong.stderr) == (2, True)
    (place / "wrong.toml").write_text('[[model]]\nname = "symvit"\nlambda = "x"\n')
    wrong = call("bench", "paper-attacks", "--models", "wrong.toml", "--data", "digits", "--out", "b3", cwd=place)
    assert (wrong.returncode, "number 1: lambda" in wrong.stderr) == (2, True)
