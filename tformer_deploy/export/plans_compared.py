"""New plans beside the graphs that they were compiled from: the first ones of TensorRT 8.6.0 on an H200 were wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..base.errors import EngineError, MissingExtra
from ..base.notes import Progress, unseen
from ..bundle.manifest import Bundle, open_bundle
from ..bundle.plans import Profile, Stamp, trt_variant
from ..check.generated import generated_sources
from ..check.observe import CheckOptions
from ..check.parity import check
from ..check.reference import make_reference
from ..engines import make_engine
from ..engines.names import recipe_of
from ..engines.trt.api import require_gpu
from ..engines.trt.engine import TrtEngine

SENTENCES, TOKENS = 8, 24
"""That are decoded with each profile, and generated for each."""


class WrongPlans(EngineError):
    """Plans that compute something else than their graphs."""


def compare_plans(directory: Path, stamp: Stamp, profiles: Sequence[Profile], progress: Progress = unseen) -> str:
    """Decode generated sentences with the plans of each profile, and with ONNX Runtime on their graphs.

    Returns a line that says what was compared, or why nothing was. Raises WrongPlans where outputs differ by more than
    `tformer check` allows for the precision.
    """
    try:
        require_gpu("the comparison with the graphs")
        for profile in profiles:
            progress(stage=f"comparison {profile}")
            if failures := differences(open_bundle(directory), stamp, profile):
                raise WrongPlans(
                    f"the plans of {profile} for {stamp} compute something else than their graphs on ONNX Runtime: "
                    f"{failures[0]}: they are not kept: try another version of TensorRT"
                )
    except WrongPlans:
        raise
    except (EngineError, MissingExtra) as error:
        return f"not compared with their graphs: {error}"
    return f"as their graphs on ONNX Runtime, within the check's limits: {SENTENCES} generated sentences a profile"


def differences(bundle: Bundle, stamp: Stamp, profile: Profile) -> list[str]:
    """What is wrong with the plans of one profile. Raises EngineError where they, or their graphs, do not run here."""
    name, config = f"trt:{stamp.precision}", bundle.config
    sources = generated_sources(config.src_vocab, config.eos_id, profile.src_len)
    picked = [sources[i * (len(sources) - 1) // (SENTENCES - 1)] for i in range(SENTENCES)]
    beams, tokens = profile.beams, min(TOKENS, profile.capacity)
    options = CheckOptions(tokens, beams, beams, invariance=0, positions=tokens, wide=0, vocabulary=False, walks=0)
    about = {"corpus": "generated", "weights_sha256": bundle.weights_sha256, "machine": {}}
    with make_engine(f"ort:{trt_variant(bundle)}", bundle) as graphs:
        reference = make_reference(graphs, picked, options, about)
    engine = TrtEngine(bundle, stamp.precision, profile)
    if engine.look().plans.stamp != stamp:
        raise EngineError(f"this host runs those for {engine.plans.stamp}")
    with engine:
        return check(engine, name, reference, recipe_of(name, bundle).limits(stamp.precision), set())[0].failures
