"""Config: layers, overrides, suggestions, and a dump that parses back equal."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.config import (
    Config,
    ToyKind,
    demo_preset,
    dotted_keys,
    dump_toml,
    load_config,
    table_classes,
    tables_of,
)
from insitu.errors import ConfigError
from insitu.tasks.toy import FAMILIES

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", "unknown key train.lrr; did you mean train.lr?"),
        ("trian.lr=1", "unknown key trian.lr; did you mean train.lr?"),
        ("model.lr=1", "unknown key model.lr; did you mean train.lr?"),
        ("run.zzz=1", "unknown key run.zzz"),
        ("eval.k4.count=2", "no eval named 'k4'; there are: heldout"),
        ("tasks.own.weight=2", "no tasks named 'own'; there are: none with a name"),
        ("engine.input_price=1", "unknown key engine.input_price; it is now engine.prices.input"),
        ("lr=1", "'lr=1' is not of the form table.key=value; did you mean train.lr?"),
        ("train.lr", "'train.lr' is not of the form table.key=value"),
        ("run.seed=x", "run.seed: input should be a valid integer, got 'x'"),
        ("run.seed=3.5", "run.seed: input should be a valid integer, got 3.5"),
        ("run.steps=-1", "run.steps: input should be greater than or equal to 0, got -1"),
        (
            "harness.agent=pie",
            "harness.agent: unknown name 'pie' of kind agents; did you mean pi? known: pi, script",
        ),
        ("train.lr=nan", "train.lr: input should be a finite number, got nan"),
        ("collect.group_min=9", "collect.group_min is larger than collect.group_size"),
        ("limits.max_call_tokens=4096", "leaves no room for a prompt"),
        ("train.min_groups=13", "no step could train"),
        ("grade.min_trust=strng", "or 'strong', got 'strng'; did you mean strong?"),
        ('tasks.kinds=["nope"]', "tasks.kinds.0: input should be 'operator', "),
        (
            "sandbox.max_sandboxes=12",
            "sandbox.max_sandboxes = 12 is too few: 8 harness.workers and 2 grade.workers need 13",
        ),
        (
            "sandbox.image=debian:12",
            "sandbox: image has no effect with backend = 'local', only with docker or harbor",
        ),
        ("sandbox.fallback=local", "sandbox: fallback is the backend itself: local"),
        ("sandbox.backend=harbor", "sandbox: harbor needs sandbox.environment: one of Harbor's"),
        ("engine.temperature=0.04", "engine.temperature: input should be greater than or equal to 0.05"),
        ("sandbox.memory_mb=100", "sandbox.memory_mb: input should be greater than or equal to 512, got 100"),
    ],
)
def test_wrong_overrides_give_one_exact_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_choices_that_exclude_each_other_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^train: advantage maxrl needs rewards >= 0; truncated"):
        load_config(None, ["train.advantage=maxrl", "train.truncated=penalise"])
    load_config(None, ["train.advantage=maxrl", "train.truncated=mask"])


def test_a_function_for_replies_needs_an_agent_that_calls_it() -> None:
    function = "tasks.parse_answer=json:dumps"
    with pytest.raises(
        ConfigError, match=r"^tasks.parse_answer has no effect without the agent single_turn$"
    ):
        load_config(None, [function, "harness.agent=script"])
    for used in (
        'tasks.agents=[{ agent = "script" }, { agent = "single_turn" }]',
        "eval.harness.agent=single_turn",
    ):
        load_config(None, [function, "harness.agent=script", used])


def test_a_provider_keeps_or_drops_reasoning_by_its_own_rules() -> None:
    with pytest.raises(ConfigError, match=r"model\.keep_reasoning has no effect with engine\.kind upstream"):
        load_config(
            None,
            [
                "model.keep_reasoning=template",
                "engine.kind=upstream",
                "engine.urls=http://a",
                "engine.model=m",
            ],
        )
    assert load_config(None, ["model.keep_reasoning=template"]).model.keep_reasoning == "template"


def test_permits_that_are_enough_or_left_to_the_run_are_taken() -> None:
    for enough in ("sandbox.max_sandboxes=13", "sandbox.max_sandboxes=0", "harness.workers=500"):
        config = load_config(None, [enough])
        assert config.sandbox.max_sandboxes in (0, config.sandboxes_needed)


def test_the_families_are_those_of_the_toy_source() -> None:
    assert set(get_args(ToyKind)) == set(FAMILIES)


def test_unknown_keys_of_a_file_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[run]\nsede = 3\n")
    with pytest.raises(ConfigError, match=r"a\.toml: unknown key run\.sede; did you mean run\.seed\?"):
        load_config(file)
    file.write_text("[runn]\nsede = 3\nsteps = 1\n")
    with pytest.raises(ConfigError, match=r"unknown table \[runn\]; did you mean run\?"):
        load_config(file)
    file.write_text("run = 3\n")
    with pytest.raises(ConfigError, match=r"run must be a table"):
        load_config(file)
    file.write_text("run = \n")
    with pytest.raises(ConfigError, match="cannot read .*line 1"):
        load_config(file)
    with pytest.raises(ConfigError, match="cannot read .*No such file"):
        load_config(tmp_path / "none.toml")


def test_layers_later_wins_and_keys_beside_stay(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[run]\nseed = 2\nsteps = 5\n")
    config = load_config(file, ["run.steps=6"], base={"run": {"seed": 1, "keep_checkpoints": 4}})
    assert (config.run.seed, config.run.steps, config.run.keep_checkpoints) == (2, 6, 4)
    assert config.eval[0].count == Config().eval[0].count


@pytest.mark.parametrize("profile", get_args(table_classes()["run"].model_fields["profile"].annotation)[1:])
def test_a_profile_sets_what_nothing_else_sets(tmp_path: Path, profile: str) -> None:
    usual, given = Config(), load_config(None, [f"run.profile={profile}"])
    assert given.harness.workers != usual.harness.workers or given.train.lr != usual.train.lr
    assert load_config(base=tomllib.loads(dump_toml(given)), stored=True) == given
    file = tmp_path / "a.toml"
    file.write_text(f'[run]\nprofile = "{profile}"\n[train]\nlr = 0.5\n[collect]\ngroup_size = 5\n')
    own = load_config(file, ["collect.group_size=6"])
    assert (own.train.lr, own.collect.group_size) == (0.5, 6)
    assert own.model.max_context_tokens == given.model.max_context_tokens != usual.model.max_context_tokens


def test_a_profile_needs_keys_that_are_not_set() -> None:
    whole = load_config(None, ["run.profile=laptop"])
    assert load_config(None, ["run.steps=3"], whole.model_dump()).train.lr == whole.train.lr
    with pytest.raises(ConfigError, match=r"^run\.profile has no effect on a whole configuration"):
        load_config(None, ["run.profile=cluster"], whole.model_dump())
    with pytest.raises(ConfigError, match=r"^run\.profile: .*; did you mean one-gpu\?$"):
        load_config(None, ["run.profile=one_gpu"])


def test_overrides_take_toml_values_and_bare_strings() -> None:
    texts = [
        "run.dir=/tmp/a b",
        "harness.agent=script",
        'tasks.kinds=["swapped", "extreme"]',
        "train.lr=1",
        "sft.held_out=true",
    ]
    config = load_config(None, texts)
    assert config.run.dir == "/tmp/a b"
    assert config.harness.agent == "script"
    assert config.task_set.kinds == ("swapped", "extreme")
    assert config.train.lr == 1.0
    assert config.sft.held_out is True


@pytest.mark.parametrize("text", ["2024-01-01", "3", "true", "", "a=b", "0x1f", "[x"])
def test_text_fields_take_what_stands_there(text: str) -> None:
    assert load_config(None, [f"run.dir={text}"]).run.dir == text
    assert load_config(None, ['run.dir="quoted"']).run.dir == "quoted"


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = ["run.dir", "model.path", "sft.run", "gateway.tools", "engine.publish_dir", "train.reference"]
    keys += [f"tasks.{key}" for key in ("path", "assets", "images", "allowlist")]
    for key in keys:
        table, _, name = key.partition(".")
        more = {"kind": "sglang", "urls": ["http://h:1"]} if table == "engine" else {}
        more |= {"source": "swe_pro", "path": "p"} if table == "tasks" else {}
        more |= {"loss": "dppo", "kl": "k3", "kl_weight": 0.1} if name == "reference" else {}
        base = {table: more, "model": {"path": "m"}}
        given = f"{key}=~/x y"
        read = dict(tables_of(load_config(None, [given], base)))[table]
        assert read.__dict__[name] == f"{tmp_path}/x y", key
    assert load_config(None, ["run.dir=./~"]).run.dir == "./~"
    with pytest.raises(ConfigError, match=r"^run\.dir: no such home folder; write \./~ .*, got '~no"):
        load_config(None, ["run.dir=~no-such-user/x"])


@given(
    text=st.text(alphabet=st.characters(exclude_categories=["Cs"])).filter(lambda text: text[:1] != "~"),
    kinds=st.lists(st.sampled_from(get_args(ToyKind)), max_size=3),
    lr=st.floats(min_value=1e-12, max_value=1e6),
    comments=st.booleans(),
)
def test_the_dump_parses_back_equal(text: str, kinds: list[str], lr: float, comments: bool) -> None:
    base = {"run": {"dir": text}, "tasks": {"kinds": kinds}, "train": {"lr": lr}}
    config = load_config(base=base)
    assert load_config(base=tomllib.loads(dump_toml(config, comments=comments))) == config


def test_the_dump_holds_every_key_and_says_what_it_means() -> None:
    parsed = tomllib.loads(dump_toml(Config()))
    tables = {table: keys[0] if isinstance(keys, list) else keys for table, keys in parsed.items()}
    assert tuple(f"{table}.{key}" for table, keys in tables.items() for key in keys) == dotted_keys()
    values = [line for line in dump_toml(Config()).splitlines() if "=" in line]
    assert all("  # " in line and line.endswith(".") for line in values)


def test_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().run.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("file", sorted((REPOSITORY / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_examples_load(file: Path) -> None:
    load_config(file)


def test_the_demo_runs_its_example() -> None:
    assert load_config(base=demo_preset()) == load_config(REPOSITORY / "examples" / "demo.toml")


def test_what_is_wrong_between_keys_is_said_without_the_whole_table() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["train.loss=dppo", "train.correction=tis"])
    assert str(caught.value).startswith("train: correction has no effect with loss = 'dppo', only with ")
    assert "got" not in str(caught.value)
    assert "{" not in str(caught.value)


def test_imitation_needs_no_engine_for_its_policy() -> None:
    config = load_config(None, ["policy.kind=tinker", "policy.lora_rank=8", "sft.run=/runs/source"])
    assert config.policy_trouble.startswith('policy.kind = "tinker" needs engine.kind = "tinker"')
    assert not load_config(None, ["sft.run=/runs/source"]).policy_trouble


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["policy.kind=tinker", "policy.lora_rank=8"], 'needs engine.kind = "tinker"'),
        (["policy.lora_rank=8"], "lora_rank has no effect with kind = 'builtin'"),
        (
            ["policy.kind=hf", "engine.kind=vllm", "engine.urls=http://x", "policy.lora_alpha=8.0"],
            "lora_alpha has no effect with lora_rank = 0",
        ),
    ],
)
def test_policy_keys_that_mean_nothing_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engine.publish=delta"], "publish has no effect with kind = 'embedded'"),
        (["engine.kind=sglang", "engine.urls=x", "engine.publish=nccl"], "is for vllm, not for sglang"),
        (
            ["engine.kind=vllm", "engine.urls=http://x", "engine.publish=ipc", "engine.publish_dir=/x"],
            "publish_dir and publish_dtype have no effect with 'ipc'",
        ),
        (
            "engine.kind=vllm engine.urls=x engine.publish=delta policy.kind=hf policy.lora_rank=4".split(),
            "must be disk with policy.lora_rank",
        ),
        (
            "engine.kind=vllm engine.urls=x engine.publish=ipc policy.kind=hf policy.lora_rank=4".split(),
            "publish ipc does not support policy.lora_rank",
        ),
        (
            "engine.kind=vllm engine.urls=x engine.publish_lora=merged".split(),
            "publish_lora has no effect without policy.lora_rank",
        ),
        (
            ("engine.kind=vllm engine.urls=x engine.publish_mode=wait policy.kind=hf"
             " policy.lora_rank=4").split(),
            "publish_mode wait has no effect with adapters: running calls keep their adapter$",
        ),
        (
            ["engine.kind=sglang", "engine.urls=x", "engine.publish_mode=keep", "collect.max_staleness=1"],
            "engine.publish_mode keep is for vllm, not for sglang",
        ),
        (
            ["engine.kind=vllm", "engine.urls=x", "engine.publish_mode=keep"],
            "engine.publish_mode keep has no effect with collect.max_staleness = 0",
        ),
    ],
)  # fmt: skip
def test_ways_to_publish_that_do_not_fit(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(overrides=overrides)


def test_the_stored_configuration_of_a_provider_is_read_again(tmp_path: Path) -> None:
    config = load_config(None, ["engine.kind=upstream", "engine.urls=http://a", "engine.model=m"])
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "config.toml") == config


def test_all_wrong_keys_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[run]\nsed = 1\n[trian]\nlr = 2\nlrr = 3\n[[tasks]]\nkind = 1\nmodel.pth = 1\n")
    with pytest.raises(ConfigError) as raised:
        load_config(file, ["x", "train.lrr=1", "eval.foo=2"])
    for wrong in (
        "run.sed",
        "[trian]",
        "'x' is not",
        "train.lrr",
        "eval.foo",
        "tasks.kind",
        "tasks.model",
    ):
        assert wrong in str(raised.value), wrong
    assert "\n" not in str(raised.value)


def test_a_dry_run_lists_the_values_of_every_key_that_has_few() -> None:
    def values(kind: Any) -> tuple[str, ...]:
        if get_origin(kind) is Literal:
            return get_args(kind)
        return next(filter(None, map(values, get_args(kind))), ())

    lines = dump_toml(Config()).splitlines()
    seen = 0
    for name, kind in table_classes().items():
        own = lines[next(n for n, line in enumerate(lines) if line.strip("[]") == name) :]
        for key, field in kind.model_fields.items():
            meaning = next(line for line in own if line.startswith(f"{key} = ")).partition("#")[2]
            for value in values(field.annotation):
                seen += 1
                assert re.search(rf"\b{value}\b", meaning), f"{name}.{key}: {value}"
    assert seen > 80


def test_an_address_may_be_a_port_and_an_engine_needs_one() -> None:
    assert load_config(None, {"gateway.listen": 8765}).gateway.listen == "8765"
    with pytest.raises(ConfigError, match=r"engine\.listen: is neither HOST:PORT nor a port, got ''"):
        load_config(None, ["engine.kind=external", "engine.listen="])


def test_a_key_that_is_gone_gets_no_similar_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown key sandbox\.mode; it is gone$"):
        load_config(None, ["sandbox.mode=fresh"])


@pytest.mark.parametrize("command", [5, "pi", {"a": 1}])
def test_a_command_of_a_task_set_that_is_no_list_is_refused_in_a_line(command: object) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.harness\.command: Input should be a valid tuple"):
        load_config(None, {}, {"tasks": [{"harness": {"command": command}}]})
