"""The configuration tree: every field is documented, and a wrong key or value is told with the nearest right one."""

import msgspec
import pytest

from outrider import config
from outrider.config import RunConfig, parse
from outrider.errors import ConfigError
from outrider.sections import fields, section_in

MINIMAL = {"tasks": {"train": "tasks.jsonl"}, "harness": {"command": ["agent"]}}


def tree(**extra):
    return {**{key: dict(value) for key, value in MINIMAL.items()}, **extra}


def every_field(section, where=""):
    for name, kind, meta, default in fields(section):
        yield f"{where}{name}", meta, default
        inner = section_in(kind)
        if inner is not None:
            yield from every_field(inner, f"{where}{name}.")


def test_every_field_has_a_sentence():
    for name, meta, _ in every_field(RunConfig):
        assert meta.description, f"{name} has no description"
        assert meta.description.endswith("."), f"{name}: not a sentence: {meta.description!r}"


def test_every_time_and_size_names_its_unit():
    for name, meta, _ in every_field(RunConfig):
        if name.endswith("_s"):
            assert "seconds" in meta.description, name
        if name.endswith("_mb"):
            assert "MiB" in meta.description, name


def test_defaults_satisfy_their_own_constraints():
    assert parse(tree()) == msgspec.convert(msgspec.to_builtins(parse(tree())), RunConfig)


def test_overrides_reach_nested_keys_and_keep_toml_types():
    got = parse(tree(), ["train.lr=1e-5", "train.steps=3", "model.name=bare word", 'harness.preload=["openai"]'])
    assert (got.train.lr, got.train.steps, got.model.name) == (1e-5, 3, "bare word")
    assert got.harness.preload == ("openai",)


@pytest.mark.parametrize(
    ("extra", "overrides", "said"),
    [
        ({"trian": {}}, (), "trian: there is no such key. Did you mean train?"),
        ({}, ("train.stpes=1",), "train.stpes: there is no such key. Did you mean train.steps?"),
        ({"lr": 1.0}, (), "lr: there is no such key. Did you mean train.lr?"),
        ({}, ("train.steps=many",), "train.steps: expected int, got str."),
        ({}, ("train.group_size=0",), "train.group_size: expected int >= 1."),
        ({}, ("train.dual_clip=0.9",), "train.dual_clip: must be above 1, or 0 for none."),
        ({}, ("train.lr=0.0",), "train.lr: expected float > 0.0."),
        ({}, ("train.lr",), "section.key=value"),
        ({}, ("seed.x=1",), "seed: expected int, got object."),
        ({}, ("harness.function=a:b",), "not both"),
        ({}, ("harness.command=python",), 'harness.command: expected a list, got text; write it as ["one", "two"].'),
        ({}, ("train.schedule=async",), "train.schedule: 'async' is none of sync, collocated, disaggregated. Did"),
        ({}, ("train.kl=k9",), "train.kl: 'k9' is none of k1, k2, k3."),
        ({}, ("train.leave_out=[{name='x'}]",), "train.leave_out[0]: rule 'x' has no condition"),
        ({}, ("train.leave_out=[{name='x', system='('}]",), "train.leave_out[0].system: '(' is no regular expression"),
        ({}, ("train.leave_out=[{name='x', modle='a'}]",), "train.leave_out[0].modle: there is no such key. Did you"),
        ({}, ("train.leave_out=[{no_tools=true}]",), "train.leave_out[0]: object missing required field name"),
    ],
)
def test_mistakes_name_the_field_and_the_fix(extra, overrides, said):
    with pytest.raises(ConfigError) as error:
        parse(tree(**extra), overrides)
    assert said in str(error.value)


def test_a_missing_and_a_broken_file_are_told(tmp_path):
    with pytest.raises(ConfigError, match="no such run file"):
        config.load(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        config.load(broken)


@pytest.mark.parametrize("name", config.GROUP_BASELINES)
def test_R10_a_group_of_one_is_refused_where_the_baseline_is_its_group(name):
    with pytest.raises(ConfigError, match=rf"train\.group_size: {name} compares rollouts of a group"):
        parse(tree(), ("train.group_size=1", f"train.advantage={name}"))
    parse(tree(), ("train.group_size=1", "train.advantage=reinforce_running"))
