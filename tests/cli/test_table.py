"""`table`: stored runs as the paper's tables."""

from tests.helpers.cli import call


def test_tables_of_stored_runs(run, place):
    text = call(
        "table", "run", "--layout", "attacks", "--format", "markdown", "--intervals", "--significance", cwd=place
    ).stdout
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert "fgsm 8/255 top-1 ↑" in rows[0]
    assert "**" in text
    written = call("table", "run", "--layout", "budgets", "--format", "latex", "--out", "t.tex", cwd=place)
    assert written.returncode == 0
    assert r"\toprule" in (place / "t.tex").read_text()
    assert "RPC-SymViT" in call("table", "run", "--layout", "runtime", cwd=place).stdout


def test_the_receipt_is_in_brief_on_the_terminal_and_whole_in_files(run, place):
    shown = " ".join(call("table", "run", "--layout", "budgets", cwd=place).stdout.split())
    whole = call("table", "run", "--layout", "budgets", "--format", "markdown", cwd=place).stdout
    assert "n = 20, seed 0, float32, cpu; run " in shown
    for said in ("ids ", "batch size", "in pixels is"):
        assert said in whole
        assert said not in shown


def test_captions_and_labels_are_taken_as_they_are_or_refused(run, place):
    latex = ("table", "run", "--layout", "budgets", "--format", "latex")
    assert r"\caption{}" in call(*latex, "--caption", "", cwd=place).stdout
    for label in ("", "a b", "a%"):
        refused = call(*latex, "--label", label, cwd=place)
        assert refused.returncode == 2
        assert f"--label: expected letters, digits and : . _ / -, got {label!r}" in refused.stderr


def test_odd_paths_are_printed_as_they_are(place):
    done = call(
        "eval",
        "--checkpoint",
        "sym.safetensors",
        "--data",
        "folder:pictures",
        "--attack",
        "clean",
        "--out",
        "[/b] [red]x",
        cwd=place,
    )
    assert (done.returncode, "[/b] [red]x" in done.stdout) == (0, True)
    (place / "[/bold].pth").write_bytes(b"PK")
    done = call("eval", "--model", "symvit", "--checkpoint", "sym.safetensors", "--model", "vit", "--checkpoint",
                "[/bold].pth", "--data", "folder:pictures", "--attack", "fgsm", "--out", "odd", cwd=place)  # fmt: skip
    assert done.returncode == 1
    shown = call("table", "odd", "--layout", "budgets", cwd=place)
    assert shown.returncode == 0
    assert "[/bold]" in shown.stdout.replace("\n", "")
