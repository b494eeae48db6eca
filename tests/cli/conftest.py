import pytest

from tests.helpers.cli import BOTH, call, make_place


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with two small checkpoints whose classes are Fashion-MNIST's, and pictures to evaluate them on."""
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="session")
def run(place):
    """What `eval` printed, when it made the run `run` in `place`."""
    done = call("eval", *BOTH, "--attack", "pgd", "--attack", "fgsm", "--out", "run", cwd=place)
    assert done.returncode == 0, done.stderr
    return done
