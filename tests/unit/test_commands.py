"""The command line: help, what it refuses, recipes anywhere, and how many ranks a run gets."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds import ROOT, environment_of_ranks
from verl_megatron.commands import COMMANDS, main
from verl_megatron.commands.benchmark import BENCHMARKS
from verl_megatron.config import SCHEMAS, ModelConfig, RolloutConfig, SFTConfig, TrainerConfig
from verl_megatron.config.section import sections_of
from verl_megatron.launch import ranks as launching
from verl_megatron.launch.command_line import settings_of
from verl_megatron.launch.help import recipe_summaries, settings_help
from verl_megatron.launch.options import launcher_options
from verl_megatron.launch.ranks import ranks_of


def said_by(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "verl_megatron", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment_of_ranks(), capture_output=True, text=True, timeout=120
    )


# ---- help ------------------------------------------------------------------------------------------------


def test_help_lists_every_command_and_loads_nothing_heavy(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    code = "import sys; from verl_megatron.commands import main; main([]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment_of_ranks(), check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    try:
        status = main([name, "--help"])
    except SystemExit as ended:  # of an argument parser
        status = ended.code
    assert status == 0 and len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.parametrize("schema", SCHEMAS)
def test_help_has_every_setting_with_default_values_and_meaning(schema):
    shown = settings_help(schema)
    for name, section in sections_of(SCHEMAS[schema]()).items():
        for field in vars(section):
            assert f"  {name}.{field}=" in shown, f"{name}.{field}"
    assert "rollout.tp=1  (≥ 1" in settings_help("train", "rollout")


def test_help_before_a_command_is_that_of_the_command(capsys):
    assert main(["help", "train", "run.seed"]) == 0
    assert "run.seed=1" in capsys.readouterr().out


def test_help_of_a_section_is_that_section(capsys):
    assert main(["train", "--help", "rollout"]) == 0
    shown = capsys.readouterr().out
    assert "rollout.max_tokens=" in shown and "actor.lr" not in shown


def test_help_of_a_setting_is_that_setting(capsys):
    assert main(["train", "--help", "run.seed"]) == 0
    shown = capsys.readouterr().out
    assert "run.seed=1  (≥ 0" in shown and "seed of data order" in shown and shown.count("=") == 1
    assert main(["sft", "--help=run.seed=3"]) == 0
    assert capsys.readouterr().out == shown
    assert main(["train", "--help", "run.seed", "run.iterations"]) == 0
    assert (shown + "\n  run.iterations=") in capsys.readouterr().out


def test_recipes_say_what_they_are_for():
    summaries = recipe_summaries()
    assert {"grpo_8b", "ppo_toy_cpu", "toy_cpu/grpo", "sft"} <= summaries.keys()
    assert all(len(summary) > 20 for summary in summaries.values()), summaries


# ---- refusals --------------------------------------------------------------------------------------------

REFUSED = [
    (["trian"], "'trian' is no command, did you mean \"train\"?"),
    (
        ["convert", "inspct", "x"],
        "'inspct' is not known, did you mean \"inspect\"?; choose one of hf-to-mcore",
    ),
    (["plan", "--modell", "x", "--gpus", "8"], 'unrecognized arguments: --modell, did you mean "--model"?'),
    (["quickstart", "foo"], "'foo' is no setting; settings are SECTION.SETTING=VALUE"),
    (["ppo"], "'ppo' is no command; write verl-megatron train --config-name RECIPE algorithm.name=ppo"),
    (["train", "--help", "rolout"], 'there is no such section or setting, did you mean "rollout"?'),
    (["train", "--help", "run.sed"], 'there is no such section or setting, did you mean "run.seed"?'),
    (["train", "--help", "seed"], "there is no such section or setting, did you mean run.seed?"),
    (["sft", "--help", "rollout"], "'rollout': there is no such section or setting"),
    (["recipes", "list", "nothing"], "'nothing': it is no folder"),
    (["recipes", "show", "nothing.yaml"], "'nothing.yaml' is no recipe"),
    (["train", "--config", "none.yaml"], "--config 'none.yaml' does not exist; name a recipe file"),
    (["train", "--rank", "4"], 'unrecognized arguments: --rank, did you mean "--ranks"?'),
    (["train", "ppo_toy_cpu"], "is no setting; write --config-name ppo_toy_cpu for that recipe"),
    (["train", "my recipe.yaml"], "write --config 'my recipe.yaml' for that recipe"),
    (["train", "rollout"], "'rollout' is no setting; settings are SECTION.SETTING=VALUE"),
    (["sft", "--config-name", "ppo_toy_cpu"], "recipe 'ppo_toy_cpu' is for another command; start it with "),
    (["train", "--config-name", "dpo_toy_cpu"], "for another command; start it with verl-megatron dpo"),
    (["train", "data.train=x", "critic.layout=tp999999999"], "need 999,999,999 ranks, and this"),
    (["train", "data.train=x", "actor.devices=0-99999999"], "need 100,000,000 ranks, and this"),
    (["train", "data.train=x", "rollout.devices=4-99999999"], "name rank 99999999, and a run has at most"),
    (["train", "data.train=x", "rollout.devices=1", "--role", "reward"], "choose train, rollout"),
    (["train", "data.train=x", "rollout.devices=1+2", "--role", "rollout:2"], "choose train, rollout:0, r"),
    (["train", "data.train=x", "--role", "rollout"], "--role rollout: this run has one world; leave it out"),
    (["sft", "data.train=x", "--role", "rollout"], "--role rollout: sft has one world; leave it out"),
    (["train", "data.train=x", "rollout.tp=0"], "rollout.tp=0 lies outside [1, 131072]"),
    (["train", "data.train=x", "actor.path=no", "run.seed=-1", "--dry-run"], "  - run.seed=-1 lies outside"),
    (["train", "data.train=x", "actor.path=no", "run.seed=-1", "--dry-run"], "  - actor.path='no' is"),
    (["train", "data.train=x", "actor.layout=tp2", "algorithm.name=no"], "error: 3 settings cannot work:"),
    (["train", "--ranks", "none"], "--ranks 'none' must be a whole number from 1"),
    (["train", "--ranks", "0"], "--ranks '0' must be a whole number from 1"),
    (["train", "--ranks"], "--ranks: expected one argument"),
    (["train", "--max-restarts", "-1"], "--max-restarts"),
    (["benchmark", "nothing"], "'nothing' is no benchmark"),
    (["recipes", "show", "grpo_8"], "'grpo_8' is no recipe, did you mean \"grpo_8b\"?"),
    (["recipes", "copy"], "recipes copy needs a recipe's name"),
    (["data", "chekc"], "data 'chekc' is no command"),
    (["data", "check", "none.jsonl"], "data file none.jsonl does not exist"),
    (["evaluate", "none", "none.jsonl"], "MODEL 'none': model folder none does not exist"),
    (["generate", "a", "b", "--out", "c", "rollout.temperature=0.5"], "  - rollout.temperature=0.5 is for t"),
    (
        ["generate", "a", "b", "--out", "c", "--samples", "4", "data.validation_temperature=0"],
        "  - --samples 4 of a prompt are identical",
    ),
    (["evaluate", "none", "none.jsonl"], "PROMPTS 'none.jsonl' does not exist; name a .jsonl"),
    (["evaluate", "none", "none.jsonl", "--reward", "none.py:f"], "--reward 'none.py:f': file 'none.py'"),
    (["generate", "none/none", "none.jsonl", "--out", "x"], "MODEL none/none: there is no folder"),
    (["evaluate", "none", "none.jsonl", "--samples", "0"], "argument --samples: '0' is not accepted"),
    (["generate", "none", "none.jsonl", "--out", "/nowhere/at/all"], "--out /nowhere/at/all cannot be"),
    (["generate", "none", "none.jsonl", "--out", "n" * 300], "n cannot be written"),
    (["generate", "none", "none.jsonl", "--out="], "argument --out: its value is empty; give one, or leave"),
    (["train", "--config", ""], "argument --config: its value is empty"),
    (["train", "--config-name", "ppo_toy_cpu", "--gpu", " ", "--dry-run"], "argument --gpu: its value is e"),
    (["evaluate", "none", "none.jsonl", "--reward", ""], "argument --reward: its value is empty"),
    (["data", "check", "none.jsonl", "--model", ""], "argument --model: its value is empty"),
    (["reward-server", "none", "--host", ""], "argument --host: its value is empty"),
    (["reward-server", "none", "--port", "8_000"], "argument --port: '8_000' is not accepted; write a whole"),
    (["reward-server", "none", "--port", "65536"], "argument --port: '65536' is not accepted"),
    (["reward-server", "none", "--max-tokens", "1"], "argument --max-tokens: '1' is not accepted"),
    (["evaluate", "a", "b", "--samples", "1_0"], "argument --samples: '1_0' is not accepted; write a whole"),
    (["plan", "--model", "llama3-1b", "--gpus", "1_0"], "argument --gpus: '1_0' is not accepted"),
    (["export", "run", "--step", "1_0"], "argument --step: '1_0' is not accepted; write a whole number"),
    (["convert", "verify", "a", "b", "--memory-gib", "abc"], "--memory-gib: 'abc' is not accepted; write"),
    (["convert", "hf-to-mcore", "a", "b", "--file-gib", "1e-30"], "--file-gib: '1e-30' is not accepted"),
    (["recipes", "show", "ppo_toy_cpu", "third"], "recipes show does not take 'third'; leave it out"),
    (["generate"], "error: the following arguments are required: MODEL, PROMPTS, --out (--help"),
    (["generate", "none"], "error: the following arguments are required: --out (--help"),
    (["evaluate", "none"], "error: the following arguments are required: PROMPTS (--help"),
    (["train", "--ranks="], "--ranks '' must be a whole number"),
    (["train", "--ranks=--"], "--ranks [] must be a whole number"),
    (["plan", "--model", "llama3-1b", "--gpus=--"], "argument --gpus: expected one argument"),
    (["convert", "verify", "a", "b", "--workers", "-1"], "argument --workers: '-1' is not accepted"),
    (["recipes", "copy", "ppo_toy_cpu", "n" * 300], "cannot be written (File name too long); name a folder"),
    (["report", "n" * 300], "File name too long; name another file or folder"),
    (["evaluate", "a", "b", "actor.path=c"], "actor.path is an argument of its own"),
    (["generate", "a", "b", "--out", "c", "reward.function=match"], "  - reward.function='match' is for sc"),
    (["train", "--ranks", "\u0663"], "must be a whole number from 1 to 1024; change it"),
    (["train", "data.train=x", "--gpu", "h100"], "--gpu 'h100' is for a plan; give --dry-run too, or"),
    (["train", "data.train=x", "--resolve"], "--resolve is for what --cfg shows; give --cfg job too, or"),
    (
        ["train", "--nnodes", "2"],
        "--ranks of verl-megatron train); rename it\n",
    ),
    (["doctor", "--ranks", "2"], "--ranks 2 are those of a recipe's run; name one, or leave it out"),
    (["convert", "hf-to-mcore", "a", ""], "argument DST: its value is empty; give one (--help"),
    (["convert", "hf-to-mcore", "a", "b", "--dtype", "x"], "arguments: --dtype x (--help lists the options)"),
    (["export", ""], "argument RUN: its value is empty; give one (--help lists the options)"),
    (["report", "outputs/toy/ppo", " "], "argument DIR: its value is empty; give one (--help"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=[f"{' '.join(g)}: {s}" for g, s in REFUSED])
def test_what_cannot_be_meant_is_refused_in_a_sentence(arguments, said, capfd, monkeypatch):
    def end(status):
        raise SystemExit(status)

    monkeypatch.setattr("parallel.runtime.process.end", end)
    monkeypatch.setattr(launching, "may_go_ahead", lambda ranks, forked: False)  # but wait for the checks
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capfd.readouterr().err
    assert ended.value.code == 2 and said in shown and shown.count("error: ") == 1, shown


def test_variables_are_looked_at_before_ranks_start(monkeypatch):
    monkeypatch.setenv("GRACE_S", "soon")
    with pytest.raises(ValueError, match="GRACE_S='soon' must be greater than 0"):
        COMMANDS["train"].load()(["--config-name", "ppo_toy_cpu", "--dry-run"])


def test_a_rank_takes_no_options_of_the_launcher():
    environment = environment_of_ranks() | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "verl_megatron", "train", "--ranks=2"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2 and "starts ranks, and RANK=0 says that this is one" in ended.stderr


# ---- recipes ---------------------------------------------------------------------------------------------


def test_a_recipe_anywhere_extends_a_shipped_one(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "base.yaml").write_text("defaults: [toy_cpu/grpo, _self_]\nactor: {lr: 2.0e-5}\n")
    (tmp_path / "mine" / "own.yaml").write_text("defaults: [base, _self_]\nrun: {iterations: 7}\n")
    monkeypatch.chdir(tmp_path)
    _, settings = settings_of(["--config", "mine/own.yaml", "rollout.max_tokens=9"])
    assert settings["run"]["iterations"] == 7 and settings["actor"]["lr"] == 2e-5
    assert settings["algorithm"]["name"] == "grpo"  # of toy_cpu/grpo, which extends toy_cpu/group
    assert settings["data"]["samples_per_prompt"] == 4 and settings["rollout"]["max_tokens"] == 9


@pytest.mark.filterwarnings("error")
def test_own_settings_win_without_self_and_without_a_warning(tmp_path):
    (tmp_path / "own.yaml").write_text("defaults: [ppo_toy_cpu]\nrun: {iterations: 7}\n")
    _, settings = settings_of(["--config", str(tmp_path / "own.yaml")])
    assert settings["run"]["iterations"] == 7


def test_a_recipe_that_is_extended_is_checked_as_well(tmp_path):
    (tmp_path / "base.yaml").write_text("run:\n  seed: 3\n  seed: 4\n")
    (tmp_path / "own.yaml").write_text("defaults: [base, _self_]\n")
    with pytest.raises(ValueError, match="base.yaml, line 3: 'seed' stands there twice"):
        settings_of(["--config", str(tmp_path / "own.yaml")])


@pytest.mark.parametrize(
    ("base", "circle"), [("base", "base -> base"), ("own", "own -> base -> own"), ("x", "base -> x -> base")]
)
def test_recipes_that_extend_themselves_are_named(tmp_path, base, circle):
    (tmp_path / "x.yaml").write_text("defaults: [base, _self_]\n")
    (tmp_path / "base.yaml").write_text(f"defaults: [{base}, _self_]\n")
    (tmp_path / "own.yaml").write_text("defaults: [ppo_toy_cpu, base, _self_]\n")
    with pytest.raises(ValueError, match=rf"extends itself \({circle}\); take one of them out"):
        settings_of(["--config", str(tmp_path / "own.yaml")])


def test_a_recipe_that_is_a_circle_of_links_is_refused(tmp_path):
    (tmp_path / "own.yaml").symlink_to("own.yaml")
    with pytest.raises(ValueError, match="is no .yaml file; name a recipe file"):
        settings_of(["--config", str(tmp_path / "own.yaml")])


def test_recipes_of_subfolders_extend_each_other_and_shipped_ones(tmp_path, monkeypatch):
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "deep/base.yaml").write_text("defaults: [ppo_toy_cpu]\nrun: {iterations: 5, seed: 5}\n")
    (tmp_path / "deep/deeper/more.yaml").write_text("defaults:\n- ../base\nrun: {iterations: 6}\n")
    (tmp_path / "deep/deeper/self.yaml").write_text("run: {save_interval: 8}\n")
    (tmp_path / "own.yaml").write_text(
        "defaults: [./deep/deeper/more, deep/deeper/self]\nactor: {lr: 1e-6}\n"
    )
    monkeypatch.chdir(tmp_path)
    for given in (["--config", "own.yaml"], ["--config-path", ".", "--config-name", "own"]):
        _, settings = settings_of(given)
        run = settings["run"]
        assert (run["iterations"], run["seed"], run["save_interval"]) == (6, 5, 8)
        assert settings["actor"]["lr"] == 1e-6 and settings["actor"]["layout"] == "tp2pp2"


def test_the_order_of_defaults_is_that_of_their_settings(tmp_path):
    (tmp_path / "base.yaml").write_text("run: {iterations: 1, seed: 1, save_interval: 1}\n")
    (tmp_path / "a.yaml").write_text("defaults: [base]\nrun: {iterations: 2, seed: 2}\n")
    (tmp_path / "b.yaml").write_text("defaults: [base]\nrun: {seed: 3}\n")
    (tmp_path / "own.yaml").write_text("defaults: [a, _self_, b]\nrun: {seed: 4, iterations: 4}\n")
    run = settings_of(["--config", str(tmp_path / "own.yaml")])[1]["run"]
    assert run == {"iterations": 4, "seed": 3, "save_interval": 1}


def test_lists_and_mappings_of_other_recipes_are_replaced_by_each_other(tmp_path):
    (tmp_path / "base.yaml").write_text("reward: {function: {a: match, b: exact}}\nrollout: {stop: [a, b]}\n")
    (tmp_path / "own.yaml").write_text(
        "defaults: [base]\nreward: {function: [match]}\nrollout: {stop: [c]}\n"
    )
    given = ["--config", str(tmp_path / "own.yaml")]
    settings = settings_of(given)[1]
    assert settings == {"reward": {"function": ["match"]}, "rollout": {"stop": ["c"]}}
    settings = settings_of([*given, "reward.function={c:json}", "rollout.stop={a:b}"])[1]
    assert settings == {"reward": {"function": {"c": "json"}}, "rollout": {"stop": {"a": "b"}}}


def test_a_recipe_extends_the_shipped_one_of_its_name(tmp_path):
    (tmp_path / "ppo_toy_cpu.yaml").write_text("defaults: [ppo_toy_cpu]\nrun: {seed: 9}\n")
    _, settings = settings_of(["--config", str(tmp_path / "ppo_toy_cpu.yaml")])
    assert settings["run"]["seed"] == 9 and settings["actor"]["layout"] == "tp2pp2"


@pytest.mark.parametrize(
    ("defaults", "said"),
    [
        ("[nothing]", "line 2, defaults: there is no recipe 'nothing'"),
        ("\n- grpo_8b\n- ppo_toy_cp", 'line 4, defaults: .* did you mean "ppo_toy_cpu"'),
        ("[/etc/base]", "line 2, defaults: '/etc/base' is an absolute path"),
        ("[./grpo_8b]", "line 2, defaults: there is no recipe './grpo_8b'"),
        ("[folder]", "line 2, defaults: there is no recipe 'folder'"),
        ("[no_recipe]", "no_recipe.yaml must be sections with settings"),
        ("[folder/wrong]", "folder/wrong.yaml, line 1, defaults: there is no recipe 'grpo'"),
        ("grpo_8b", "line 2, defaults: it is no list; write names"),
        ("[{grpo_8b: x}]", "line 2, defaults: it has an entry that is no name"),
        ("[_self_, _self_]", "line 2, defaults: it has _self_ twice"),
        ("[folder/circle]", r"circle.yaml, line 2, .* extends itself \(own -> circle -> own\)"),
    ],
)
def test_wrong_defaults_are_named_with_file_and_line(defaults, said, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/wrong.yaml").write_text("defaults: [grpo]\n")
    (tmp_path / "folder/circle.yaml").write_text("# a circle\ndefaults: [../own]\n")
    (tmp_path / "no_recipe.yaml").write_text("- a\n- b\n")
    (tmp_path / "own.yaml").write_text(f"# mine\ndefaults: {defaults}\n")
    with pytest.raises(ValueError, match=said) as error:
        settings_of(["--config", str(tmp_path / "own.yaml")])
    assert str(error.value).count("\n") == 0


def test_defaults_that_are_not_there_are_named_with_the_recipe(tmp_path):
    (tmp_path / "own.yaml").write_text("defaults: [nothing_like_it]\n")
    with pytest.raises(ValueError, match="own.yaml, line 1, defaults: there is no recipe 'nothing_like_it'"):
        settings_of(["--config", str(tmp_path / "own.yaml")])


def test_a_recipe_is_copied_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "ppo_toy_cpu"]) == 0
    assert (tmp_path / "ppo_toy_cpu.yaml").read_text() == (ROOT / "recipes/ppo_toy_cpu.yaml").read_text()
    _, settings = settings_of(["--config", "ppo_toy_cpu.yaml"])
    assert settings["actor"]["layout"] == "tp2pp2"
    assert main(["recipes", "copy", "llama3_8b_grpo.sh", "scripts"]) == 0
    assert (tmp_path / "scripts/launch/local.sh").is_file()


def test_a_recipe_is_copied_with_those_that_it_extends(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "toy_cpu/grpo", "mine"]) == 0
    copied, shipped = (
        settings_of(given)[1] for given in (["--config", "mine/grpo.yaml"], ["--config-name", "toy_cpu/grpo"])
    )
    assert copied == shipped
    (tmp_path / "mine/sub").mkdir()
    (tmp_path / "mine/own.yaml").write_text("# My run. It learns.\ndefaults: [grpo_8b, sub/base]\n")
    (tmp_path / "mine/sub/base.yaml").write_text("run: {seed: 7}\n")
    assert main(["recipes", "copy", "mine/own.yaml", "other"]) == 0
    assert settings_of(["--config", "other/own.yaml"])[1]["run"]["seed"] == 7
    capsys.readouterr()
    assert main(["recipes", "list", "mine"]) == 0
    assert "own       My run\n" in capsys.readouterr().out
    assert main(["recipes", "show", "mine/sub/base.yaml"]) == 0
    assert capsys.readouterr().out == "run: {seed: 7}\n"


# ---- ranks -----------------------------------------------------------------------------------------------


def test_a_run_gets_the_fewest_ranks_that_its_layouts_need(monkeypatch):
    config = TrainerConfig(actor=ModelConfig(layout="tp2pp2"), rollout=RolloutConfig(tp=1))
    assert ranks_of(config) == 4
    config.rollout.tp = 3
    assert ranks_of(config) == 12
    config.rollout.devices = "0-7"  # colocated
    assert ranks_of(config) == 8
    assert ranks_of(SFTConfig(actor=ModelConfig(layout="tp2dp3"))) == 6
    assert ranks_of(SFTConfig(actor=ModelConfig(devices="0-4"))) == 5
    assert ranks_of(SFTConfig(actor=ModelConfig(layout="nonsense"))) == 1  # the checks say why
    monkeypatch.setattr(launching.device, "visible_gpus", lambda: 7)
    assert ranks_of(SFTConfig(actor=ModelConfig(layout="tp2"))) == 6
    assert ranks_of(SFTConfig(actor=ModelConfig(layout="tp8"))) == 8  # too many: the launcher says so


def test_options_of_the_launcher_are_split_off():
    given, rest = launcher_options(["--ranks", "3", "run.seed=2", "--dry-run", "--max-restarts=1"])
    assert (given.ranks, given.max_restarts, rest) == (3, 1, ["run.seed=2", "--dry-run"])


def test_a_dry_run_plans_for_the_ranks_that_are_needed(tmp_path):
    settings = ["actor.path=llama3-1b", "data.train=", "data.validation="]
    said = said_by(
        "train", f"--config={ROOT}/recipes/ppo_toy_cpu.yaml", "--dry-run", *settings, folder=tmp_path
    )
    assert said.returncode == 0 and "dry run: 4 ranks on one host" in said.stdout, said.stderr
    more = said_by(
        "train", "--config-name", "ppo_toy_cpu", "--ranks", "8", "--dry-run", *settings, folder=tmp_path
    )
    assert more.returncode == 0 and "dry run: 8 ranks on one host" in more.stdout, more.stderr


def test_benchmarks_are_modules_that_explain_themselves():
    for benchmark in BENCHMARKS.values():
        path = ROOT / "verl_megatron" / "benchmarks" / f"{benchmark.module.replace('.', '/')}.py"
        assert '__name__ == "__main__"' in path.read_text()
