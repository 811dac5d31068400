"""Search settings of `tformer train` by the validation of short runs, with Optuna (tree of Parzen estimators).

Options of `tformer train` follow after `--`. A value of --try has a dot for what `--set` takes, else it is an option:
`train.lr=0.001..0.006` is drawn between its ends by its logarithm, `vocab-size=2000,5000` is one of these. Each trial
is a run folder in OUT, named by its values. Those that do worse than the median of the others at the same update are
stopped early. After Ctrl-C or a kill, the same command goes on, also with the trial that was not done.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

MEASURES = {"valid_loss": "minimize", "bleu": "maximize", "chrf": "maximize"}
"""What validation is compared by. Losses of different vocabularies are not to be compared."""


def main() -> None:
    """Make trials until there are as many, then print them, the best first."""
    parser = argparse.ArgumentParser(prog="benchmarks.search", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the runs and for search.log")
    parser.add_argument("--try", dest="tried", action="append", required=True, metavar="NAME=VALUES")
    parser.add_argument("--trials", type=int, default=20, help="in all, with those of earlier calls")
    parser.add_argument("--measure", choices=MEASURES, default="bleu")
    parser.add_argument("train", nargs="+", metavar="-- OPTIONS", help="of tformer train")
    options = parser.parse_args()
    space = dict(each.partition("=")[::2] for each in options.tried)
    if wrong := [name for name, values in space.items() if not values]:
        parser.error(f"--try {wrong[0]}: give values, such as {wrong[0]}=1,2 or {wrong[0]}=1..2")
    options.out.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name=options.measure,
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(options.out / "search.log"))),
        direction=optuna.study.StudyDirection[MEASURES[options.measure].upper()],
        load_if_exists=True,
    )
    while len(ended(study)) < options.trials:
        if begun := begun_only(study):
            study.enqueue_trial(begun)
        study.optimize(lambda trial: measured(trial, options.out, space, options.measure, options.train), n_trials=1)
    sign = -1 if MEASURES[options.measure] == "maximize" else 1
    for trial in sorted(ended(study), key=lambda trial: (trial.state, sign * (trial.value or 0.0))):
        found = f"{options.measure} {trial.value:.4g}" if trial.state == TrialState.COMPLETE else "stopped"
        print(found, trial.user_attrs["run"], sep="  ")


def ended(study: optuna.Study) -> list[FrozenTrial]:
    """Trials that have a result, or were stopped as they did worse than others."""
    return study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED])


def begun_only(study: optuna.Study) -> dict[str, object]:
    """The values of a trial that Ctrl-C or a kill ended; {}: there is none."""
    done = [trial.params for trial in ended(study)]
    begun = study.get_trials(states=[TrialState.FAIL, TrialState.RUNNING])
    return next((trial.params for trial in begun if trial.params not in done), {})


def drawn(trial: Trial, name: str, values: str) -> str:
    """This trial's value of a setting."""
    low, between, high = values.partition("..")
    if between:
        return f"{trial.suggest_float(name, float(low), float(high), log=True):.3g}"
    return str(trial.suggest_categorical(name, values.split(",")))


def measured(trial: Trial, out: Path, space: dict[str, str], measure: str, options: list[str]) -> float:
    """The measure of the kept weights. Raises TrialPruned where it is not worth the time."""
    values = {name: drawn(trial, name, values) for name, values in space.items()}
    run = out / ",".join(f"{name}={value}" for name, value in values.items())
    trial.set_user_attr("run", run.name)
    settings = [
        word
        for name, value in values.items()
        for word in (["--set", f"{name}={value}"] if "." in name else [f"--{name}", value])
    ]
    started = ["--resume"] if (run / "checkpoint.json").exists() else [*options, *settings, "--force"]
    command = [sys.executable, "-m", "tformer_deploy", "train", "--out", str(run), "--json", *started]
    print(f"trial {trial.number}: {run.name}", file=sys.stderr)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        worse = watched(trial, process, run / "metrics.jsonl", measure)
        said = process.communicate()[0]
    if worse:
        raise optuna.TrialPruned
    if process.returncode:
        sys.exit(f"search: the trial {run.name} failed: mend what it says above, and give the same command again")
    return float(json.loads(said)[measure])


def watched(trial: Trial, process: subprocess.Popen[str], metrics: Path, measure: str) -> bool:
    """Report validations while a trial runs; True if it was stopped, because others did better."""
    reported = 0
    while process.poll() is None:
        time.sleep(1)
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        for found in (json.loads(line) for line in lines if line.endswith("\n")):
            if found.get(measure) is None or found["update"] <= reported:
                continue
            reported = found["update"]
            trial.report(found[measure], reported)
            if trial.should_prune():
                process.send_signal(signal.SIGINT)
                return True
    return False


if __name__ == "__main__":
    main()
