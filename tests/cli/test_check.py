"""`check` as CI calls it."""

from tests.helpers.cli import call


def test_check_writes_what_ci_reads(run, place):
    call("check", "run", "--baseline", "base.parquet", "--update-baseline", cwd=place)
    (place / "limits.toml").write_text('[[cell]]\nattack = "pgd"\ntolerance = 5\n')
    done = call(
        "check", "run", "--baseline", "base.parquet", "--tolerances", "limits.toml", "--summary", "out/s.md",
        "--junit", "out/j.xml",
        cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "### robustkpca: holds" in (place / "out" / "s.md").read_text()
    assert (place / "out" / "j.xml").read_text().count("<testcase") == 15
    both = call(
        "check", "run", "--baseline", "base.parquet", "--tolerance", "1", "--tolerances", "limits.toml", cwd=place
    )
    assert (both.returncode, "got both" in both.stderr) == (2, True)
    (place / "limits.toml").write_text("tolerence = 5\n")
    wrong = call("check", "run", "--baseline", "base.parquet", "--tolerances", "limits.toml", cwd=place)
    assert (wrong.returncode, "tolerence" in wrong.stderr) == (2, True)
