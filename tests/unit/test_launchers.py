"""What launchers tell each node, and what they refuse."""

import re
import sys
from inspect import signature

import pytest
import yaml

from parallel.runtime.preemption import Preemption
from parallel.runtime.seal import TOKEN
from tests.launchers import LAUNCH, environment, hostfile, operator, say, say_hostfile, say_recipe
from tests.worlds import ROOT

SCRIPT = "llama3_70b_ppo"
RECIPE = f"recipes/{SCRIPT}.sh"
GIVEN = {"MODEL": "/models/it's mine", "DATA": "mine.jsonl"}  # a quote has to arrive, too


def option(arguments: tuple[str, ...], name: str) -> str:
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("# nothing\n\n", "names no host"),
        ("worker-0\n", "line 1: 'worker-0' is not understood; write a host and its GPUs: worker-0 slots=8"),
        ("worker-0 slots=8\nworker-1 slots=eight\n", "line 2: 'worker-1 slots=eight' is not understood"),
        ("worker-0 slots=0\n", "line 1"),
        ("worker-0 slots=8 max=9\n", "line 1"),
        ("-oProxyCommand=x slots=8\n", "line 1"),
        ("me@-oProxyCommand slots=8\n", "line 1"),
        ("$(touch_me) slots=8\n", "line 1"),
        ("worker-0;id slots=8\n", "line 1"),
        ("worker-0 slots=8\n\n# more\nworker-1 slots=4", "line 4: slots=4, and hosts before it have slots=8"),
        ("worker-0 slots=8\nworker-0 slots=8\n", "line 2: worker-0 stands there twice"),
    ],
)
def test_a_hostfile_that_cannot_be_is_refused(text, message, tmp_path):
    (tmp_path / "hosts").write_text(text)
    said = say_hostfile(tmp_path / "hosts", RECIPE, folder=tmp_path)
    assert said.code == 2 and message in said.stderr and not said.calls


@pytest.mark.parametrize("arguments", [[], ["hosts"], ["nowhere", RECIPE]])
def test_hostfile_and_recipe_are_needed(arguments, tmp_path):
    said = say_hostfile(*arguments, folder=tmp_path)
    assert said.code == 2 and said.stderr.startswith("hostfile.sh: ")


@pytest.mark.parametrize("name", ["MASTER_PORT", "STOP_S"])
@pytest.mark.parametrize("value", ["1; touch {}", "$(touch {})", "a[$(touch {})]", "0", "-1", "port"])
def test_a_number_that_is_none_runs_nothing(name, value, tmp_path):
    """Neither here nor, as a part of the line that it gets, on another host."""
    hosts = hostfile(tmp_path / "hosts", nodes=1, slots=2)
    for more in ([], ["--dry-run"]):
        said = say_hostfile(
            hosts, RECIPE, *more, folder=tmp_path, **{name: value.format(tmp_path / "ran")}, **GIVEN
        )
        assert (
            said.code == 2
            and f"{name}=" in said.stderr
            and "has to be a whole number" in said.stderr
            and not said.calls
        )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NODE_RANK", "a[$(touch {})]"),
        ("NODE_RANK", "2"),
        ("MAX_RESTARTS", "x"),
        ("MASTER_PORT", "65536"),
        ("NODE_ADDR", "-x"),
        ("MASTER_ADDR", "a b"),
    ],
)
def test_what_a_node_is_told_is_checked(name, value, tmp_path):
    told = (
        {"NNODES": "2", "GPUS": "8", "MASTER_ADDR": "worker-0", "MASTER_PORT": "1234"}
        | GIVEN
        | {name: value.format(tmp_path / "ran")}
    )
    said = say_recipe(SCRIPT, folder=tmp_path, **told)
    assert (
        said.code == 2
        and said.stderr.startswith(f"error: {name}=")
        and not said.calls
        and not (tmp_path / "ran").exists()
    )


@pytest.mark.parametrize("launcher", ["local.sh", "hostfile.sh", "slurm.sbatch", "ray.py"])
@pytest.mark.parametrize(
    "recipe", [["recipes/nope.sh"], ["recipes/nope.sh", "--dry-run"], ["--dry-run"]], ids=" ".join
)
def test_a_recipe_that_does_not_exist_is_named_with_those_that_do(launcher, recipe, tmp_path):
    before = [hostfile(tmp_path / "hosts", nodes=2, slots=8)] if launcher == "hostfile.sh" else []
    said = say(
        sys.executable if launcher == "ray.py" else "bash",
        LAUNCH / launcher,
        *before,
        *recipe,
        folder=tmp_path,
    )
    assert said.code and not said.stdout and not said.calls
    assert (
        re.fullmatch(
            rf"\S+: recipe '{recipe[0]}' does not exist; choose one of (recipes/\S+\.sh ?)+\n", said.stderr
        )
        and RECIPE in said.stderr
    )


def test_one_of_several_nodes_says_what_is_wrong(tmp_path):
    """Node 0; another one where node 0 says nothing."""
    (tmp_path / "ssh").write_text('shift; exec bash -c "$*"')
    hosts = hostfile(tmp_path / "hosts", nodes=3, slots=8)
    refused = {"FAIL": "--dry-run", "FAIL_STATUS": "2"} | GIVEN
    said = say_hostfile(
        hosts, RECIPE, folder=tmp_path, SSH=f"bash {tmp_path}/ssh", LOGS=str(tmp_path / "logs"), **refused
    )
    assert said.code == 2 and not any(call.starts_ranks for call in said.calls)
    assert said.stdout.count("asked to fail") == 1 and "worker-0: error: asked to fail" in said.stdout
    (tmp_path / "bin/sleep").symlink_to("/bin/true")
    said = say_recipe(SCRIPT, folder=tmp_path, NNODES="3", NODE_RANK="2", MASTER_ADDR="worker-0", **refused)
    assert (said.code, said.stderr) == (2, "error: asked to fail\n")


def test_every_node_of_a_hostfile_gets_its_line(tmp_path):
    """The lines of a dry run, carried out here one after the other in an empty environment, as ssh would."""
    hosts = hostfile(tmp_path / "hosts", nodes=3, slots=4)
    carried = GIVEN | {"NCCL_DEBUG": "WARN", "EDITOR": "none"}
    said = say_hostfile(
        hosts,
        RECIPE,
        "reward.function=a b",
        "--dry-run",
        folder=tmp_path,
        SSH="ssh -p 99",
        MAX_RESTARTS="3",
        **carried,
    )
    assert said.code == 0, said.stderr
    lines = [line for line in said.stdout.splitlines() if line.startswith("worker-")]
    assert len(lines) == 3
    for node, line in enumerate(lines):
        before, _, command = line.partition(f": ssh -p 99 worker-{node} ")
        assert before == f"worker-{node}" and "NCCL_DEBUG='WARN'" in command and "EDITOR" not in command
        call = (
            say(
                "env",
                "-i",
                f"RECORD={tmp_path}/record",
                "bash",
                "-c",
                command.replace("'--dry-run'", "actor.lr=1"),
                folder=tmp_path,
                told="\n",  # no secrets
            )
            .calls[-1]
            .arguments
        )
        assert (
            option(call, "--nproc-per-node") == "4"
            and option(call, "--node-rank") == str(node)
            and option(call, "--nnodes") == "3"
            and option(call, "--max-restarts") == "3"
        )
        assert (
            option(call, "--rdzv-endpoint") == "worker-0:29500"
            and option(call, "--local-addr") == f"worker-{node}"
        )
        assert option(call, "--rdzv-conf") == f"is_host={int(node == 0)}"
        assert {"actor.path=/models/it's mine", "reward.function=a b"} <= set(call)


def test_secrets_reach_every_node_and_no_command_line(tmp_path):
    """ssh's stand-in notes the command line that it gets, and carries it out."""
    (tmp_path / "ssh").write_text(
        f'echo "$*" >>{tmp_path}/lines; shift; exec env -i RECORD=$RECORD bash -c "$*"'
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/bash").symlink_to("/bin/bash")
    recipe = tmp_path / "recipe.sh"
    recipe.write_text(f'echo "$NODE_RANK $VERL_MEGATRON_TOKEN $WANDB_API_KEY" >{tmp_path}/told$NODE_RANK')
    hosts = hostfile(tmp_path / "hosts", nodes=2, slots=1)
    key = "a 'key' of two\nlines"
    ssh = {"SSH": f"bash {tmp_path}/ssh", "LOGS": str(tmp_path / "logs")}
    said = say_hostfile(hosts, recipe, folder=tmp_path, WANDB_API_KEY=key, **ssh)
    assert said.code == 0, said.stderr
    told = [(tmp_path / f"told{node}").read_text() for node in (0, 1)]
    token = told[0].split()[1]
    assert re.fullmatch("[0-9a-f]{32}", token), "one of the run's own"
    assert told == [f"{node} {token} {key}\n" for node in (0, 1)]
    lines = (tmp_path / "lines").read_text()
    assert lines.count("recipe.sh") == 2 and token not in lines and "key" not in lines
    planned = say_hostfile(hosts, RECIPE, "--dry-run", folder=tmp_path, WANDB_API_KEY="mine1", **GIVEN)
    assert planned.code == 0 and "mine1" not in planned.stdout and "TOKEN" not in planned.stdout


SLURM = {
    "scontrol": "#!/bin/sh\n[ \"$*\" = 'show hostnames gpu[1-2]' ] && printf 'gpu1\\ngpu2\\n'\n",
    "srun": "#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\n"
    'for node in 0 1; do SLURM_NODEID=$node SLURMD_NODENAME=gpu$((node + 1)) "$@"; done\n',
}


def test_every_node_of_a_slurm_allocation_knows_its_place(tmp_path):
    """Slurm's batch script, run from a copy as Slurm does; scontrol and srun stand in for two nodes."""
    (tmp_path / "bin").mkdir()
    for name, text in SLURM.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    copy = tmp_path / "job"
    copy.write_text((ROOT / LAUNCH / "slurm.sbatch").read_text())
    told = {
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_ID": "70001",
        "SLURM_JOB_NODELIST": "gpu[1-2]",
    }
    said = say("bash", copy, RECIPE, "actor.layout=tp8pp2sp", folder=tmp_path, **told | GIVEN)
    assert said.code == 0, said.stderr
    started = [call for call in said.calls if call.starts_ranks]
    assert len(started) == 2
    for node, call in enumerate(started):
        assert (
            option(call.arguments, "--nnodes") == "2"
            and option(call.arguments, "--rdzv-endpoint") == "gpu1:20001"
        )
        assert (
            option(call.arguments, "--local-addr") == f"gpu{node + 1}"
            and option(call.arguments, "--rdzv-id") == "70001"
        )
        assert option(call.arguments, "--rdzv-conf") == f"is_host={int(node == 0)}"


def test_nodes_of_a_slurm_allocation_share_a_secret(tmp_path):
    """srun hands its environment on; nothing of it is an argument."""
    (tmp_path / "bin").mkdir()
    for name, text in SLURM.items():
        (tmp_path / "bin" / name).write_text(
            text.replace("#!/bin/bash\n", f'#!/bin/bash\necho "$*" >{tmp_path}/line\n')
        )
        (tmp_path / "bin" / name).chmod(0o755)
    recipe = tmp_path / "recipe.sh"
    recipe.write_text('echo "$VERL_MEGATRON_TOKEN"')
    told = {
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "gpu[1-2]",
    }
    said = say("bash", LAUNCH / "slurm.sbatch", recipe, folder=tmp_path, **told)
    first, second = said.stdout.split()
    assert first == second and re.fullmatch("[0-9a-f]{32}", first)
    assert first not in (tmp_path / "line").read_text()


def test_pods_agree_on_the_world(tmp_path):
    """Replicas, ranks of a pod and its GPUs are one world, in which each pod's command finds its place."""
    job = yaml.safe_load((ROOT / LAUNCH / "kubernetes.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    gpus = int(job["spec"]["nprocPerNode"])
    pods = [
        spec["template"]["spec"]
        for spec in (replicas["Master"], replicas["Worker"])
        for _ in range(spec["replicas"])
    ]
    assert replicas["Master"]["replicas"] == 1 and {spec["restartPolicy"] for spec in replicas.values()} == {
        "Never"
    }
    for node, pod in enumerate(pods):
        (container,) = pod["containers"]
        assert container["name"] == "pytorch" and container["resources"]["limits"]["nvidia.com/gpu"] == gpus
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        }
        secret = next(entry for entry in container["env"] if entry["name"] == TOKEN)
        assert secret["valueFrom"]["secretKeyRef"] == {"name": job["metadata"]["name"], "key": "token"}
        own = {entry["name"]: entry.get("value", f"of-pod-{node}") for entry in container["env"]}
        command = container["command"] + container["args"]
        told = operator(len(pods), gpus, node) | own
        call = say(*command, folder=tmp_path, **told).calls[-1].arguments
        assert option(call, "--nnodes") == str(len(pods)) and option(call, "--nproc-per-node") == str(gpus)
        assert (
            option(call, "--rdzv-endpoint") == "llama3-70b-ppo-master-0:23456"
            and option(call, "--rdzv-conf") == f"is_host={int(node == 0)}"
        )
        assert option(call, "--local-addr") == f"of-pod-{node}" and f"actor.path={own['MODEL']}" in call
        planned = say(*command, "--dry-run", folder=tmp_path, **told).calls[-1]
        assert (planned.world_size, planned.local_world_size) == (str(len(pods) * gpus), str(gpus))


def test_pods_have_time_to_save():
    """A pod waits longer than torchrun waits for its ranks, and torchrun longer than a rank for itself."""
    job = yaml.safe_load((ROOT / LAUNCH / "kubernetes.yaml").read_text())
    grace = {
        spec["template"]["spec"]["terminationGracePeriodSeconds"]
        for spec in job["spec"]["pytorchReplicaSpecs"].values()
    }
    waits = re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-(\d+)", (ROOT / LAUNCH / "local.sh").read_text())[1]
    assert min(grace) > int(waits) > signature(Preemption).parameters["grace_s"].default


def test_a_rank_that_was_started_by_a_launcher_starts_no_others(tmp_path):
    said = say_recipe(SCRIPT, folder=tmp_path, LOCAL_RANK="3", NNODES="4", GPUS="8", **GIVEN)
    assert said.calls[-1].arguments[:2] == ("-m", "verl_megatron.train")


def test_ray_is_asked_for_by_name(tmp_path):
    """Where it is not installed."""
    blocked = tmp_path / "blocked/ray"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError(\"No module named 'ray'\")")
    said = say(sys.executable, LAUNCH / "ray.py", RECIPE, folder=tmp_path, PYTHONPATH=str(blocked.parent))
    assert said.code == 1 and "pip install verl-megatron[ray]" in said.stderr


def test_variables_around_the_tests_do_not_count():
    assert "NNODES" not in environment() and environment(NNODES="2")["NNODES"] == "2"
