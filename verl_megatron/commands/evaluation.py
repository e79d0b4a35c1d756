"""`generate` and `evaluate`: responses of a model folder to a file of prompts, without training."""

import json
from argparse import Namespace
from collections.abc import Iterable

from parallel.runtime.refusal import short_repr
from verl_megatron.launch.options import (
    COUNT,
    Options,
    add_launcher_options,
    check_output,
    launcher_options,
)

GENERATE = """\
Writes the responses of MODEL to PROMPTS, a data file as for training, as JSON lines.
"""
EVALUATE = """\
Prints the mean score of the responses of MODEL to PROMPTS, a data file as for training.
"""
COMMON = """\
Settings are those of `verl-megatron train`, such as rollout.max_tokens=512 data.prompt_key=question.
data.validation_temperature is 1 by default, as in the validation of a run; 0 is greedy.
"""
ARGUMENTS = {"actor.path": "MODEL", "data.validation": "PROMPTS", "reward.function": "--reward"}
PLACES = "outputs/toy/ppo/actor outputs/toy/val.jsonl"
GENERATE_EXAMPLES = (
    f"{PLACES} --out samples.jsonl",
    f"{PLACES} --out samples.jsonl --samples 4 data.validation_temperature=0.7 rollout.max_tokens=8",
)
EVALUATE_EXAMPLES = (
    f"{PLACES} --reward match",
    f"{PLACES} --reward my_reward.py:score --out scored.jsonl --ranks 2",
)


def generate(arguments: list[str]) -> int:
    """Write responses."""
    return _run(arguments, scored=False)


def evaluate(arguments: list[str]) -> int:
    """Score responses."""
    return _run(arguments, scored=True)


def _parser(*, scored: bool) -> Options:
    examples = EVALUATE_EXAMPLES if scored else GENERATE_EXAMPLES
    parser = Options(description=(EVALUATE if scored else GENERATE) + "\n" + COMMON, examples=examples)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="Hugging Face folder, such as OUTPUT_DIR/actor of a run; or a hub name or a URL",
    )
    parser.add_argument("prompts", metavar="PROMPTS", help="data file or folder, as data.validation of a run")
    if scored:
        parser.add_argument(
            "--reward",
            default="",
            metavar="FUNCTION",
            help="a built-in one, or FILE.py:NAME; without it: match",
        )
    parser.add_argument(
        "--out", required=not scored, default="", metavar="FILE", help="JSON lines of all samples"
    )
    parser.add_argument("--samples", type=COUNT, default=1, metavar="N", help="responses to each prompt (1)")
    add_launcher_options(parser, usual="as many GPUs as there are, else the fewest that rollout.tp needs")
    parser.add_argument(
        "settings", nargs="*", default=[], metavar="SECTION.SETTING=VALUE", help="of `verl-megatron train`"
    )
    return parser


def _run(arguments: list[str], *, scored: bool) -> int:
    launched, rest = launcher_options(arguments)
    given = _parser(scored=scored).parse_intermixed_args(rest)
    if given.out:
        check_output("--out", given.out, inputs=_inputs(given))
    values = {"actor.path": _folder(given.model), "data.validation": given.prompts}
    values |= {"reward.function": given.reward} if scored and given.reward else {}
    from verl_megatron.checks.problems import refuse
    from verl_megatron.evaluation import Evaluation
    from verl_megatron.launch.command_line import settings_of
    from verl_megatron.launch.ranks import ranks_of, start

    _, settings = settings_of(given.settings)
    for name, value in values.items():
        section, _, setting = name.partition(".")
        own = settings.setdefault(section, {})
        if not isinstance(own, dict):
            raise ValueError(
                f"{section}={short_repr(own)} is no section with settings; give its settings one by one"
            )
        if setting in own:
            raise ValueError(f"{name} is an argument of its own; leave the setting out")
        own[setting] = value
    evaluation = Evaluation(settings=settings, out=given.out, samples=given.samples, scored=scored)
    ranks = launched.ranks or ranks_of(evaluation.config())
    note = evaluation.fit_lengths()
    refuse([_as_given(problem, values) for problem in evaluation.problems(world_size=ranks)])
    if note:
        print(note)
    start(
        "verl_megatron.evaluation",
        [json.dumps(vars(evaluation))],
        ranks=ranks,
        restarts=launched.max_restarts,
    )


def _inputs(given: Namespace) -> list[str]:
    """Return the files and folders that a command line names to be read."""
    from verl_megatron.data.formats.sources import parts_of
    from verl_megatron.rewards.plan import functions_of

    files = [function.rpartition(":")[0] for function in functions_of(getattr(given, "reward", ""))]
    try:
        prompts = [part.path for part in parts_of(given.prompts)]
    except ValueError:
        prompts = []  # of wrong weights, which are refused
    return [given.model, *prompts, *filter(None, files)]


def _folder(model: str) -> str:
    """Return the folder of MODEL, which is fetched if it is a hub name or a URL.

    Raises:
        ValueError: it cannot be fetched.
    """
    from parallel.weights.remote.models import is_remote, local_folder, shown

    if not is_remote(model):
        return model
    try:
        return local_folder(model, whole=True)
    except ValueError as error:
        raise ValueError(f"MODEL {shown(model)}: {error}") from None


def _as_given(problem: str, settings: Iterable[str]) -> str:
    """Name an argument of the command line instead of the setting that it becomes.

    Args:
        settings: those that are given by arguments.
    """
    for setting in settings:
        if problem.startswith(f"{setting}="):
            return f"{ARGUMENTS[setting]} {problem.removeprefix(setting)[1:]}"
    return problem
