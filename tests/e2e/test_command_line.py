"""The command line refuses errors all at once, quickly, with the nearest known names, and without a traceback."""

from __future__ import annotations

import subprocess
import sys

from tests.e2e.conftest import Refused
from tests.e2e.processes import Place


def test_every_bad_key_is_told_at_once_with_its_near_miss_before_torch_is_imported(place: Place) -> None:
    keys = ["algoritm=gspo", "algorithm=gsop", "learner.tpp=2", "train.steps=-1", "seed=x", "run.dir=r"]
    code = (
        "import sys\nfrom launcher.__main__ import main\ntry:\n    main(['train', *sys.argv[1:]])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *keys]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=place.folder)
    assert ended.stdout.strip() == "1 False False"
    assert "Traceback" not in ended.stderr
    assert "algoritm='gspo': no such key (did you mean 'algorithm'?)" in ended.stderr
    assert "no such file (did you mean 'gspo'?)" in ended.stderr
    assert "learner.tpp=2: no such key (did you mean 'learner.tp'?)" in ended.stderr
    assert "train.steps=-1: must be greater than or equal to 0" in ended.stderr
    assert "seed='x'" in ended.stderr
    assert not (place.folder / "r").exists()


def test_rules_between_keys_name_both_numbers(refused: Refused) -> None:
    said = refused("train", "learner.ep=2", "learner.tp=3", "learner.etp=2", "learner.vpp=2", "run.dir=r")
    assert "learner.vpp=2 needs a pipeline, but learner.pp=1" in said


def test_an_unknown_command_or_option_is_a_usage_error(refused: Refused) -> None:
    assert "No such command" in refused("trian", status=2)
    assert "No such option" in refused("train", "--resum", status=2)


def test_a_bad_reward_function_is_told_before_a_folder_is_made(place: Place, refused: Refused) -> None:
    expected = {
        "exact_mach": "reward.function='exact_mach' is unknown; did you mean 'exact_match'?",
        "my_reward:even": "no module 'my_reward'; install it or put its folder on PYTHONPATH",
        "my_rewards:evn": "'evn' of my_rewards is not there; did you mean 'even'?",
    }
    for function, text in expected.items():
        assert text in refused("train", f"reward.function={function}", "run.dir=r")
    assert not (place.folder / "r").exists()


def test_names_of_runs(place: Place, refused: Refused) -> None:
    old = place.folder / "runs/old"
    old.mkdir(parents=True)
    said = refused("train", "run.name=old")
    assert "runs/old exists; add --resume to continue it, from its start if it has no checkpoint, or take" in said
    assert "--resume: runs/nothing does not exist" in refused("train", "run.name=nothing", "--resume")
    assert "--resume: there is no run 'tiny_cpu' in empty" in refused("train", "run.dir=empty", "--resume")
    assert "run.name='../up'" in refused("train", "run.name=../up")
    assert list(old.iterdir()) == []
