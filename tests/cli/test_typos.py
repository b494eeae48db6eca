"""What is misspelt is said in one line, before torch is imported."""

import json
import subprocess
import sys

CASES = """
eval --model symvitt --attack pgd                                | unknown model 'symvitt'. Did you mean 'symvit'?
eval --model symvit --attack pgdd                                | unknown attack 'pgdd'. Did you mean 'pgd'?
eval --model symvit --attack pgd --data fashion                  | unknown data 'fashion'. Did you mean 'fashion-mnist'?
eval --model symvit --attack pgd --data folder:none              | data folder:none: 'none' is not a folder
eval --model vit --attack pgd --in-distribution imagenet:x       | it goes with imagenet-o, got data fashion-mnist
eval --checkpoint none.pth --attack pgd                          | checkpoint none.pth: expected a file, found nothing there
eval --model vit,checkpoint=a.pth --checkpoint b.pth --attack pgd | --checkpoint: expected one for each --model that has none
eval --model symvit --attack pgd --device gpu                    | --device: expected auto, cpu, cuda or cuda:N, got 'gpu'
eval --model symvit --attack pgd --dtype fp8                     | --dtype: expected float32 or bf16, got 'fp8'
eval --model symvit --attack pgd --iterationss 4                 | no such option: --iterationss
eval --model symvit                                              | --attack: expected at least one of clean,
eval --model symvit --attack pgd --eps x                         | eps: expected a number such as 8/255 or 0.03, got 'x'
eval --models none.toml --attack pgd                             | models none.toml: No such file
diagnose --model symvitt                                         | unknown model 'symvitt'. Did you mean 'symvit'?
diagnose --model symvit --data nothing                           | unknown data 'nothing'
train --model symvitt --data digits --out a.safetensors          | unknown model 'symvitt'. Did you mean 'symvit'?
train --model symvit --data digitz --out a.safetensors           | unknown data 'digitz'. Did you mean 'digits'?
train --model symvit --data digits --recipe no --out a.safetensors | unknown recipe 'no'
train --model symvit --data digits --set no=1 --out a.safetensors | --set: expected KEY=VALUE with one of epochs
table none --layout budgets                                      | run none: expected a run folder
table none --layout budget                                       | expected robustness, attacks, budgets, corruptions or runtime
report none --out r.md                                           | run none: expected a run folder
export none --images o                                           | run none: expected a run folder
check none --baseline none                                       | --baseline none: nothing there
analyze symvitt                                                  | unknown model 'symvitt'. Did you mean 'symvit'?
analyze symvit --data nope                                       | unknown data 'nope'
bench paper-attack --models m.toml --data digits --out o         | unknown experiment 'paper-attack'. Did you mean 'paper-attacks'?
bench paper-attacks --models none.toml --data digits --out o     | models none.toml: No such file
profile --model symvitt                                          | unknown model 'symvitt'. Did you mean 'symvit'?
evall --model symvit                                             | no such command 'evall'. Did you mean 'eval'?
""".strip().splitlines()  # noqa: E501 (a table)
SCRIPT = """
import contextlib, io, json, sys, time
from robustkpca.cli.app import run
for line in json.load(sys.stdin):
    printed, began = io.StringIO(), time.process_time()
    sys.argv = ["robustkpca", *line.split()]
    with contextlib.redirect_stderr(printed):
        code = run()
    print(json.dumps([code, printed.getvalue(), "torch" in sys.modules, time.process_time() - began]))
"""


def test_each_is_one_line_without_torch(tmp_path):
    words, expected = zip(*([part.strip() for part in case.split("|")] for case in CASES), strict=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(words),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(words)
    for line, message, (code, printed, torch, seconds) in zip(words, expected, answers, strict=True):
        assert (code, printed.count("\n"), torch) == (2, 1, False), (line, printed)
        assert message in printed, (line, printed)
        assert seconds < 2, (line, seconds)  # of the processor; 0.03 to 0.8 alone
    assert list(tmp_path.iterdir()) == []
