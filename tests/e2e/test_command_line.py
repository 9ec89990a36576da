"""The command line refuses errors all at once, quickly, with the nearest known names, and without a traceback."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.e2e.processes import Place, Run


def refused(run: Run, status: int = 1) -> str:
    """What it said; checks that it is an error for the user, and nothing of a run was written."""
    assert run.process.returncode == status, run.text()
    assert "Traceback" not in run.text()
    return run.text()


def test_every_bad_key_is_told_at_once_with_its_near_miss(place: Place) -> None:
    said = refused(
        place.call("train", "algoritm=gspo", "algorithm=gsop", "learner.tpp=2", "train.steps=-1", "seed=x", "run.dir=r")
    )
    assert "algoritm='gspo': no such key (did you mean 'algorithm'?)" in said
    assert "no such file (did you mean 'gspo'?)" in said
    assert "learner.tpp=2: no such key (did you mean 'learner.tp'?)" in said
    assert "train.steps=-1: must be greater than or equal to 0" in said
    assert "seed='x'" in said
    assert not (place.folder / "r").exists()


def test_rules_between_keys_name_both_numbers(place: Place) -> None:
    said = refused(
        place.call_in_fork("train", "learner.ep=2", "learner.tp=3", "learner.etp=2", "learner.vpp=2", "run.dir=r")
    )
    assert "learner.vpp=2 needs a pipeline, but learner.pp=1" in said


def test_no_torch_is_imported_before_the_configuration_is_good(place: Place) -> None:
    code = (
        "import sys\nfrom launcher.__main__ import main\ntry:\n    main(['train', 'nonsense=1'])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=place.folder)
    assert out.stdout.strip() == "1 False False"
    assert "error: nonsense=1: no such key" in out.stderr


def test_an_unknown_command_or_option_is_a_usage_error(place: Place) -> None:
    assert "No such command" in refused(place.call("trian"), status=2)
    assert "No such option" in refused(place.call_in_fork("train", "--resum"), status=2)


def test_a_bad_reward_function_is_told_before_a_folder_is_made(place: Place) -> None:
    expected = {
        "exact_mach": "reward.function='exact_mach' is unknown; did you mean 'exact_match'?",
        "my_reward:even": "no module 'my_reward'; install it or put its folder on PYTHONPATH",
        "my_rewards:evn": "'evn' of my_rewards is not there; did you mean 'even'?",
    }
    for function, text in expected.items():
        assert text in refused(place.call_in_fork("train", f"reward.function={function}", "run.dir=r"))
    assert not (place.folder / "r").exists()


def test_names_of_runs(place: Place) -> None:
    old = place.folder / "runs/old"
    old.mkdir(parents=True)
    said = refused(place.call_in_fork("train", "run.name=old"))
    assert "runs/old exists; add --resume to continue it, from its start if it has no checkpoint, or take" in said
    said = refused(place.call_in_fork("train", "run.name=nothing", "--resume"))
    assert "--resume: runs/nothing does not exist" in said
    said = refused(place.call_in_fork("train", "run.dir=empty", "--resume"))
    assert "--resume: there is no run 'tiny_cpu' in empty" in said
    assert "run.name='../up'" in refused(place.call_in_fork("train", "run.name=../up"))
    assert list(old.iterdir()) == []


def test_a_finished_run_its_name_and_its_configuration(place: Place) -> None:
    keys = ("learner.ep=1", "reward.function=my_rewards:even", "warm_start.steps=0", "train.steps=1")
    (hold := place.folder / "hold").touch()
    first = place.fork("unnamed", *keys, "run.name=null")
    first.until((place.folder / "holding").exists, "its first reward")
    second = place.fork("busy", *keys, "run.name=tiny_cpu", resume=True)
    assert second.end() == 1
    assert "runs/tiny_cpu: another process runs in it" in second.text()
    hold.unlink()
    third = place.fork("third", *keys, "run.name=null")
    for run in (first, third):
        run.finish()
    assert (place.folder / "runs/tiny_cpu/metrics.jsonl").exists()
    assert (place.folder / "runs/tiny_cpu-2/metrics.jsonl").exists()

    other = place.fork("tiny_cpu", *keys, "data.digits=3", "algorithm=cispo", "learner.ep=2", resume=True)
    assert other.end() == 1
    said = refused(other)
    assert "data.digits: 2 then, 3 now" in said
    assert "algorithm.objective: 'clip' then, 'cispo' now" in said
    assert "learner.ep" not in said
    assert "train.steps" not in said

    longer = place.call_in_fork("train", "--config", "runs/tiny_cpu/config.yaml", "--resume", "train.steps=2")
    assert longer.process.returncode == 0, longer.text()
    assert [row["step"] for row in _rows(place, "tiny_cpu")] == [0, 1, 2]
    again = place.call_in_fork("train", "--config", "runs/tiny_cpu/config.yaml", "--resume")
    assert again.process.returncode == 0, again.text()
    assert "step_000002: the run is at its last step; give a larger train.steps" in again.text()
    fewer = place.call_in_fork("train", "--config", "runs/tiny_cpu/config.yaml", "--resume", "train.steps=1")
    assert fewer.process.returncode == 1
    assert "train.steps=1, but runs/tiny_cpu/checkpoints/step_000002 is of step 2; give train.steps=2" in fewer.text()
    assert [row["step"] for row in _rows(place, "tiny_cpu")] == [0, 1, 2]


def test_the_doctor_of_a_mismatch(place: Place) -> None:
    """On the run of the test before: nothing is wrong with it, but with what it is asked to sample with."""
    sound = place.call_in_fork("doctor", "mismatch", "runs/tiny_cpu", "--prompts", "8", "--completions", "2")
    assert sound.process.returncode == 0, sound.text()
    assert "runs/tiny_cpu/checkpoints/step_000002" in sound.text()
    sick = place.call_in_fork("doctor", "mismatch", "runs/tiny_cpu", "rollout.top_p=0.5", "learner.tp=2")
    assert sick.process.returncode == 1, sick.text()
    report = json.loads((place.folder / "runs/tiny_cpu/doctor/mismatch.json").read_text())
    found = {f["cause"]: f for f in report["findings"]}
    assert [cause for cause, f in found.items() if f["verdict"] == "guilty"] == ["sampling parameters"]
    assert "top_p 0.5 (the learner: 1)" in found["sampling parameters"]["evidence"]
    assert "set rollout.top_p=1" in found["sampling parameters"]["fix"]
    assert "tensors compared" in found["weights"]["evidence"]
    assert "nothing" in refused(place.call_in_fork("doctor", "mismatch", "nothing"))
    keys = ("rollout=vllm", "rollout.server.colocated=true")
    assert "add rollout.server.colocated=false" in refused(place.call_in_fork("doctor", "mismatch", "tiny_cpu", *keys))


def _rows(place: Place, name: str) -> list[dict[str, float]]:
    return Run(folder=place.folder / "runs" / name, process=place.runs[0].process, output=place.runs[0].output).rows()
