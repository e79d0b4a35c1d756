"""Model folders against their roles: missing, foreign or unserved parts are refused by name up front."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel import device
from tests.tiny import SERVED, write_hf, write_tokenizer
from verl_megatron.checks.folders import check_weights, find_not_finite, inspect_folders, roles_of
from verl_megatron.config import TrainerConfig
from verl_megatron.data.tokenizer import load_tokenizer
from verl_megatron.rollout.vllm_cpu import HEAD_SIZES

SERVED_LLAMA = SERVED["llama"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An actor, a critic and a reward model as transformers writes them, and one tokenizer for all."""
    root = tmp_path_factory.mktemp("folders")
    for name, head in (
        ("actor", "ForCausalLM"),
        ("critic", "ForTokenClassification"),
        ("reward", "ForSequenceClassification"),
    ):
        write_hf(root / name, "llama", head, **SERVED_LLAMA)
        write_tokenizer(root / name)
    return root


@pytest.fixture
def copies(folders, tmp_path):
    """The folders again, to be changed."""
    for name in ("actor", "critic", "reward"):
        (tmp_path / name).mkdir()
        for file in (folders / name).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    return tmp_path


def roles(root):
    return {
        "actor": (str(root / "actor"), "lm"),
        "critic": (str(root / "critic"), "token"),
        "reward": (str(root / "reward"), "sequence"),
    }


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def only_problem(root, *, rollout=True):
    problems = inspect_folders(roles(root), rollout=rollout).problems
    assert len(problems) == 1, problems
    return problems[0]


def test_nothing_is_wrong_with_what_transformers_writes(folders):
    findings = inspect_folders(roles(folders), rollout=True)
    assert (findings.problems, findings.notes) == ([], [])
    assert find_not_finite(roles(folders), [torch.bfloat16]) == []


def test_roles_of_a_run():
    config = TrainerConfig()
    config.actor.path = "a"
    assert roles_of(config) == {"actor": ("a", "lm"), "critic": ("a", "token")}
    config.critic.path, config.reward.path = "c", "r"
    assert roles_of(config) == {"actor": ("a", "lm"), "critic": ("c", "token"), "reward": ("r", "sequence")}
    config.algorithm.name = "grpo"
    assert set(roles_of(config)) == {"actor", "reward"}


def test_a_reward_model_has_a_score_head(folders, copies):
    with pytest.raises(
        ValueError,
        match=r"actor has no score\.weight, so as a reward model it would give every sample 0; name .* "
        r"LlamaForSequenceClassification",
    ):
        check_weights(str(folders / "actor"), "sequence")
    edit_weights(copies / "reward", lambda tensors: tensors.pop("score.weight"))
    assert "reward.path=" in only_problem(copies) and "has no score.weight" in only_problem(copies)
    with pytest.raises(
        ValueError, match=r"unknown: score\.bias"
    ):  # a score a token, and a bias that no row's score has
        check_weights(str(folders / "critic"), "sequence")


def test_a_critic_says_what_starts_new(folders, copies):
    assert check_weights(str(folders / "critic"), "token") == []
    assert check_weights(str(folders / "actor"), "token") == ["score.weight", "score.bias"]
    assert check_weights(str(folders / "reward"), "token") == ["score.bias"]
    findings = inspect_folders(roles(folders) | {"critic": (str(folders / "actor"), "token")}, rollout=True)
    assert findings.problems == [] and findings.notes == [
        f"critic.path={folders / 'actor'} has no score.weight and no score.bias: the critic starts "
        f"with a new one, all zeros"
    ]
    edit_weights(copies / "critic", lambda tensors: tensors.pop("score.weight"))
    assert "has no score.weight, which its LlamaForTokenClassification needs" in only_problem(copies)
    edit_weights(copies / "critic", lambda tensors: tensors.pop("score.bias"))
    assert "has no score.weight, which its LlamaForTokenClassification needs" in only_problem(copies)


def test_a_head_of_two_labels_is_refused(copies):
    edit_weights(copies / "reward", lambda tensors: tensors.update({"score.weight": torch.zeros(2, 128)}))
    assert "score.weight is [2, 128]" in only_problem(copies) and "one label" in only_problem(copies)


def test_a_smaller_vocabulary_is_refused(copies):
    for file in (copies / "reward").glob("tokenizer*"):
        file.unlink()
    assert inspect_folders(roles(copies), rollout=True).problems == []
    edit(copies / "reward" / "config.json", vocab_size=149)
    edit_weights(
        copies / "reward",
        lambda tensors: tensors.update(
            {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"][:149].clone()}
        ),
    )
    problem = only_problem(copies)
    assert (
        "has vocab_size=149, and the actor generates tokens below its vocab_size=150" in problem
        and "resize_token_embeddings(150)" in problem
    )


def test_another_tokenizer_is_refused(copies):
    path = copies / "critic" / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["w7"], words["w8"] = 8, 7
    path.write_text(json.dumps(content))
    problem = only_problem(copies)
    assert problem.startswith(
        f"critic.path='{copies / 'critic'}': its tokenizer is not the actor's: 2 of the actor's 150 "
        f"tokens have another id here"
    )
    assert "'w7', 7 for the actor and 8 here" in problem
    words["w7"], words["w8"], words["more"] = 7, 8, 150  # tokens of its own are no harm
    path.write_text(json.dumps(content))
    assert inspect_folders(roles(copies), rollout=True).problems == []
    words.pop("w149")
    path.write_text(json.dumps(content))
    assert "'w149', 149 for the actor and none here" in only_problem(copies)


def test_values_that_are_no_numbers_are_found_by_the_ranks_together(copies):
    edit_weights(
        copies / "critic",
        lambda tensors: tensors["model.layers.2.mlp.up_proj.weight"].__setitem__((5, 6), torch.nan),
    )
    edit_weights(copies / "reward", lambda tensors: tensors["score.weight"].fill_(torch.inf))
    found = [find_not_finite(roles(copies), [torch.float32], place=rank, of=3) for rank in range(3)]
    told = sorted(problem.split(" holds ")[0] for problems in found for problem in problems)
    assert told == sorted(
        [
            f"model.layers.2.mlp.up_proj.weight in {copies}/critic/model.safetensors",
            f"score.weight in {copies}/reward/model.safetensors",
        ]
    )


def test_a_head_size_that_vllm_does_not_serve_here(tmp_path, monkeypatch):
    write_hf(tmp_path / "actor", "qwen3")  # heads of 16
    write_tokenizer(tmp_path / "actor")
    actor = {"actor": (str(tmp_path / "actor"), "lm")}
    [problem] = inspect_folders(actor, rollout=True).problems
    assert "vLLM's attention on CPUs has no heads of size 16 (head_dim); it has 32, 64, 80" in problem
    assert inspect_folders(actor, rollout=False).problems == []
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    assert inspect_folders(actor, rollout=True).problems == []


def test_a_plan_passes_over_what_is_not_there(copies):
    for name in ("critic", "reward"):
        for file in (copies / name).iterdir():
            if file.name != "config.json":
                file.unlink()
    assert inspect_folders(roles(copies), rollout=True, dry=True).problems == []
    assert len(inspect_folders(roles(copies), rollout=True).problems) == 2
    edit(copies / "critic" / "config.json", vocab_size=100)
    [problem] = inspect_folders(roles(copies), rollout=True, dry=True).problems
    assert "has vocab_size=100" in problem


def test_head_sizes_are_vllms():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == HEAD_SIZES


@pytest.mark.parametrize(("changes", "words"), [
    (dict(architectures=None), 'vLLM serves a LlamaForCausalLM, and config.json has '
                               'architectures=[]; set it to ["LlamaForCausalLM"]'),
    (dict(architectures=["LlamaModel"]), "architectures=['LlamaModel']"),
    (dict(bos_token_id="one"), "cannot be read by transformers"),
    (dict(id2label=3), "cannot be read by transformers"),
    (dict(dtype="float33"), "cannot be read by transformers"),
    (dict(rms_norm_eps=1), "cannot be read by transformers"),
])  # fmt: skip
def test_what_vllm_or_transformers_cannot_read(copies, changes, words):
    edit(copies / "actor" / "config.json", **changes)
    assert words in only_problem(copies)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        "\x00",
        '{"eos_token_id": 150}',
        '{"eos_token_id": [2, -1]}',
        '{"eos_token_id": "</s>"}',
        '{"eos_token_id": true}',
    ],
)
def test_generation_settings_that_vllm_would_pass_over(copies, content):
    (copies / "actor" / "generation_config.json").write_text(content)
    assert "generation_config.json" in only_problem(copies) and (
        "eos_token_id=" in only_problem(copies) or "is not a JSON object" in only_problem(copies)
    )
    assert inspect_folders(roles(copies), rollout=False).problems == []


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"\xff\xfe", b'"a"', b"{}x", b'{"a": ' * 10**5],
    ids=["empty", "list", "cut", "binary", "text", "tail", "deep"],
)
def test_broken_tokenizer_files_are_named(folders, tmp_path, name, content):
    for file in (folders / "actor").glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} is not a JSON object"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        dict(eos_token=3),
        dict(pad_token=[]),
        dict(tokenizer_class=1),
        dict(model_max_length="x"),
        dict(extra_special_tokens=[1]),
    ],
    ids=str,
)
def test_tokenizer_settings_of_another_type_are_named(folders, tmp_path, change):
    for file in (folders / "actor").glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit(tmp_path / "tokenizer_config.json", **change)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json does not go with tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_chat_template_that_is_no_text_is_named(folders, tmp_path):
    for file in (folders / "actor").glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is no UTF-8 text"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_cut_tokenizer_is_named(folders, tmp_path, share):
    for file in (folders / "actor").glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = (tmp_path / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a JSON object"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer(tmp_path)
