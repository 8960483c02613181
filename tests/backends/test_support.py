"""What a probe on a few tokens can't show is read in the configuration."""

from __future__ import annotations

import pytest
import torch
import transformers

from outrider.backends import tree_attention
from outrider.backends.packing import Chain
from outrider.backends.support import ignored, logit_changes, unsupported_layers
from outrider.backends.tiles import TiledTree

LAYERS = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (["full_attention", "sliding_attention"], ""),
        (["chunked_attention", "full_attention"], "it has layers of kind chunked_attention"),
        (["mamba", "linear_attention"], "it has layers of kind linear_attention, mamba"),
        (None, ""),
    ],
)
def test_layers_that_are_not_ordinary_attention(kinds, said):
    config = transformers.PreTrainedConfig()
    config.layer_types = kinds
    assert unsupported_layers(config) == said


def test_a_window_that_no_layer_asked_for():
    window = transformers.MistralConfig(sliding_window=4096, **LAYERS)
    some = transformers.Gemma3TextConfig(
        sliding_window=512, layer_types=["sliding_attention", "full_attention"], **LAYERS
    )
    none = transformers.LlamaConfig(**LAYERS)
    assert ignored(window, {4096}) == ignored(some, {None, 512}) == ignored(none, {None}) == ""
    assert ignored(window, {None}) == "its sliding window of 4096 is not handed to its attention"
    assert ignored(some, {None}) == "its sliding window of 512 is not handed to its attention"
    assert ignored(none, set()) == "its attention cannot be replaced"


def test_logits_that_are_changed_after_the_projection():
    assert logit_changes(transformers.LlamaConfig(**LAYERS)) == ""
    assert logit_changes(transformers.GraniteConfig(logits_scaling=1.0, **LAYERS)) == ""
    assert logit_changes(transformers.GraniteConfig(logits_scaling=8.0, **LAYERS)) == (
        "its logits are changed by logits_scaling"
    )


def test_a_mask_that_a_layer_made_itself_is_not_ignored_in_silence():
    """Sparse attention picks its keys with a mask of its own; so few tokens as a probe has may all be picked."""
    heads = [torch.zeros(1, 2, 3, 4)] * 3
    chain = Chain(start=0, stop=3, path=torch.arange(3).numpy())
    plans = TiledTree([chain], torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="a mask of their own"):
        tree_attention.attend(None, *heads, torch.zeros(1, 1, 3, 3), outrider_tree=plans)
    assert tree_attention.attend(None, *heads, None, outrider_tree=plans)[0].shape == (1, 3, 2, 4)
