"""`models`, `attacks`, `datasets`, `runs`: what exists."""

from tests.helpers.cli import call


def test_inspect(place):
    text = call("models", "--inspect", "rpc.safetensors", cwd=place).stdout
    assert "RPC-SymViT-w16d2h2 (2iter/layer1)" in text
    assert "iterations 2, lambda 1" in text


def test_lists(place):
    text = call("models").stdout
    for name in ("rpc-symvit-2iter-all", "RPC-SymViT-micro (6iter/layer1)", "symvit-base", "timm:NAME"):
        assert name in text
    text = call("attacks").stdout
    for name in ("clean", "pgd-paper", "fgsm", "corruptions", "normalised space, not clipped"):
        assert name in text
    text = call("datasets").stdout
    for name in ("fashion-mnist", "MIT licence", "digits", "folder"):
        assert name in text
    assert all(len(line.split()) > 2 for line in text.splitlines())
