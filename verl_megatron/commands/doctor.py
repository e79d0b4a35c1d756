"""Looks at this machine before a run: what is wrong, why it matters, and what to do about it.

It checks Python and packages, GPUs with their links and CUDA IPC, environment variables, limits of the
system, the disk of the output folder and, with a recipe, whether its run is valid and fits. Where there is
no GPU, what needs one is left out. Exit status: 0 without problems, 1 with one; warnings do not count.
"""

import json
import shutil
import sys
from pathlib import Path

from parallel.runtime.refusal import nearest, short_repr
from verl_megatron.config import RunConfig
from verl_megatron.launch.bases import find_recipe, shipped_names
from verl_megatron.launch.options import Options, whole_number
from verl_megatron.launch.recipe import SHIPPED, own_recipe

EXAMPLES = (
    "",
    "grpo_8b actor.path=llama3-8b data.train= reward.function=match --ranks 4",
    "--config mine.yaml --ranks 4 --disk /scratch/run --json",
)


def run(arguments: list[str]) -> int:
    """Print the report and return the exit status."""
    from verl_megatron.doctor.checks import examine
    from verl_megatron.doctor.finding import Case, Finding
    from verl_megatron.doctor.text import as_data, heading, lines_of, summary
    from verl_megatron.observe.tracking import wants_colour

    given = _parser().parse_args(arguments)
    recipes = [word for word in given.recipe if "=" not in word] + ([given.config] if given.config else [])
    if len(recipes) > 1:
        raise ValueError(f"recipes {' and '.join(recipes)}: the doctor looks at one; name one of them")
    if given.config:
        own_recipe(given.config)
    elif recipes and not recipes[0].endswith(".yaml") and not find_recipe(recipes[0], [SHIPPED]):
        names = shipped_names()
        raise ValueError(
            f"recipe {short_repr(recipes[0])} is not known{nearest(recipes[0], names)}; choose one of "
            f"{', '.join(names)}, or name a .yaml file"
        )
    case = Case(
        folder=Path(given.disk),
        recipe=recipes[0] if recipes else "",
        settings=tuple(word for word in given.recipe if "=" in word),
        ranks=given.ranks,
    )
    if case.settings and not case.recipe:
        raise ValueError(f"{case.settings[0]} is a setting without a recipe; name the recipe before it")
    if case.ranks and not case.recipe:
        raise ValueError(f"--ranks {case.ranks} are those of a recipe's run; name one, or leave it out")
    colour, width = wants_colour(sys.stdout), min(shutil.get_terminal_size((100, 0)).columns, 120)
    findings: list[tuple[str, Finding]] = []
    last = ""
    for part, finding in examine(case):
        findings.append((part, finding))
        if given.json:
            continue
        if part != last:
            print(f"{heading(part, colour=colour)}", flush=True)
        last = part
        print("\n".join(lines_of(finding, colour=colour, width=width)), flush=True)
    print(json.dumps(as_data(findings), indent=1) if given.json else summary([each for _, each in findings]))
    return int(any(finding.status == "problem" for _, finding in findings))


def _parser() -> Options:
    parser = Options(prog="verl-megatron doctor", description=__doc__, examples=EXAMPLES)
    parser.add_argument(
        "recipe",
        nargs="*",
        metavar="RECIPE [SETTING=VALUE ...]",
        help="a shipped recipe, or a .yaml file, and more settings: is its run valid, and does it fit?",
    )
    parser.add_argument("--config", metavar="FILE", help="the same for a recipe of your own")
    parser.add_argument(
        "--ranks", type=whole_number(1, 1 << 17), default=0, help="ranks of that run (as many as would start)"
    )
    parser.add_argument(
        "--disk", metavar="DIR", default=RunConfig().output_dir, help="output folder to look at (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="the report as data")
    return parser
