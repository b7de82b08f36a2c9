"""Files that are no profile, or a broken one: each is one clear ValueError of a few words."""

import json
import math

import pytest

from rainfusion import Profile
from rainfusion.profiles import FORMAT

MANY = 300_000
GOOD = dict(format=FORMAT, sparsities={"a": [0.5, 0.25]}, sparsity=0.375, options={"predictor": "mean"}, notes={})


def load(tmp_path, **changes):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**GOOD, **changes}))
    return Profile.load(path)


def test_the_profile_that_the_others_are_changed_from_is_good(tmp_path):
    assert load(tmp_path).of("a") == (0.5, 0.25)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(sparsities=[0.5]), "must have sparsities, as `rainfusion calibrate` writes them"),
        (dict(sparsities="a"), "must have sparsities, as"),
        (dict(sparsities=None), "must have sparsities, as"),
        (dict(sparsities={"a": "0.5"}), "must have a, as"),
        (dict(sparsities={"a": {"0": 0.5}}), "must have a, as"),
        (dict(sparsities={"a": []}), r"sparsities\['a'\] must have numbers from 0 to 1, one for each head, got \(\)"),
        (dict(sparsities={"a": [0.5, True]}), r"sparsities\['a'\] must have .*, got True for head 1"),
        (dict(sparsities={"a": [math.nan]}), r"got nan for head 0"),
        (dict(sparsities={"a": [None]}), r"got None for head 0"),
        (dict(sparsities={"a": [[0.5]]}), r"got \[0.5\] for head 0"),
        (dict(sparsity=math.nan), "sparsity must be a number from 0 to 1, got nan"),
        (dict(sparsity=7), "sparsity must be a number from 0 to 1, got 7"),
        (dict(sparsity=True), "sparsity must be a number from 0 to 1, got True"),
        (dict(sparsity=-0.1), "sparsity must be a number from 0 to 1, got -0.1"),
        (dict(sparsity="0.5"), "must have sparsity, as"),
        (dict(options=["predictor"]), "must have options, as"),
        (dict(options={"predictor": True}), "predictor must be one of"),
        (dict(options={"compensate": 1}), "compensate must be True or False"),
        (dict(options={"token_order": [2, 8]}), "token_order must have three numbers"),
        (dict(options={"precision": "fp8"}), "options must be some of token_order, .*, got precision"),
        (dict(notes="made by hand"), "notes must be a mapping, got 'made by hand'"),
        (dict(format="rainfusion profile 2"), "is it another file"),
    ],
)
def test_a_broken_profile_says_what_is_wrong_and_where(changes, says, tmp_path):
    with pytest.raises(ValueError, match=says) as caught:
        load(tmp_path, **changes)
    assert str(caught.value).startswith(str(tmp_path / "profile.json"))


def text(**changes):
    return json.dumps({**GOOD, **changes})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * MANY, "got one nested too deeply"),
        (text().replace("0.375", "1" * 10_000), "must be a JSON file"),
        (text(sparsities={"a": [0.5] * MANY + [2.0]}), "got 2.0 for head 300000"),
        (text(sparsities={"a": [2.0] * MANY}), "got 2.0 for head 0"),
        (text(sparsities={"a": [[0.5] * MANY]}), r"got \[0.5, 0.5, .*\.\.\.\] for head 0"),
        (text(sparsities={"a" * MANY: [2.0]}), "must have numbers from 0 to 1"),
        (text(sparsities={str(i): None for i in range(100_000)}), "must have 0, 1, 2, ..., as"),
        (text(options={str(i): None for i in range(100_000)}), "options must be some of .*, got 0, 1, 2, ..."),
        (text(options={"token_order": "x" * MANY}), "token_order must be 'window'"),
        (text(options={"predictor": [0] * MANY}), "predictor must be one of"),
        (text(notes=[0] * MANY), r"notes must be a mapping, got \[0, 0, "),
    ],
    ids=range(11),
)
def test_a_large_broken_file_is_a_short_message(content, says, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=says) as caught:
        Profile.load(path)
    assert len(str(caught.value)) < 1000


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "p.json").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ValueError, match="must be a JSON file of `rainfusion calibrate`, got 'utf-8' codec"):
        Profile.load(tmp_path / "p.json")


@pytest.mark.parametrize("share", [math.nan, True, 1.5, -1, "0.5", None, 10**5000], ids=range(7))
def test_a_profile_made_by_hand_is_checked_too(share):
    with pytest.raises(ValueError, match=r"sparsities\['a'\] must have numbers from 0 to 1"):
        Profile({"a": (0.5, share)}, 0.5, {})
    with pytest.raises(ValueError, match="sparsity must be a number from 0 to 1"):
        Profile({"a": (0.5,)}, share, {})


def test_an_unknown_layer_is_named_in_few_words():
    profile = Profile({f"blocks.{i}": (0.5,) for i in range(1000)}, 0.5, {})
    with pytest.raises(
        ValueError, match=r"no layer 'x+.*; it has 1000: blocks.0, blocks.1, blocks.2, \.\.\."
    ) as caught:
        profile.of("x" * 100_000)
    assert len(str(caught.value)) < 1000
