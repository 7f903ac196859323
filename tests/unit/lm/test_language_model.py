from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters
from transformers import PreTrainedTokenizerFast

from gradmm.config.settings import ModelSettings
from gradmm.errors import InputError
from gradmm.lm import loading
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.last_mlp import layers_of
from gradmm.lm.loading import check_model, forget_large_model, load_language_model
from gradmm.lm.model_reference import ModelReference, resolve_model
from tests.conftest import tiny_language_model


@pytest.mark.parametrize("family", ["phi", "llama", "gpt2", "gpt_neox", "opt"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_head_of_hidden_is_the_models_own_logits(tokenizer, family: str, dtype: torch.dtype) -> None:
    model = tiny_language_model(tokenizer, family, dtype=dtype)
    check_model(model, family)
    ids = torch.tensor([model.encode("the soup was warm and fresh .")])
    ours = model.logits(model.augment(model.hidden_states(input_ids=ids)))
    assert ours.dtype == torch.promote_types(dtype, torch.float32)
    theirs = model.model(input_ids=ids).logits
    assert torch.allclose(ours, theirs.to(ours.dtype), atol=3e-2 if dtype == torch.bfloat16 else 1e-5)


def test_soft_capped_logits_are_refused(tokenizer) -> None:
    model = tiny_language_model(tokenizer, "gemma2", final_logit_softcapping=30.0)
    with pytest.raises(InputError, match=r"model\.name: 'capped' post-processes its logits"):
        check_model(model, "capped")


def test_scaled_logits_are_refused(tokenizer) -> None:
    from transformers import AutoModelForCausalLM, GraniteConfig

    config = GraniteConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, logits_scaling=8.0, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    model = LanguageModel(AutoModelForCausalLM.from_config(config).eval().requires_grad_(False), tokenizer)
    with pytest.raises(InputError, match="post-processes its logits"):
        check_model(model, "scaled")


def test_a_model_that_treats_embeddings_unlike_their_tokens_is_refused(phi: LanguageModel) -> None:
    from copy import deepcopy

    odd = deepcopy(phi.model)
    odd.model.embed_tokens.register_forward_hook(lambda _m, _i, out: 2 * out)
    with pytest.raises(InputError, match="treats embeddings unlike their tokens"):
        check_model(LanguageModel(odd, phi.tokenizer), "odd")


def test_fused_activations_change_nothing_but_rounding(tiny_model: ModelReference) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.activations import NewGELUActivation

    ours = load_language_model(tiny_model).model
    plain = AutoModelForCausalLM.from_pretrained(tiny_model.source)
    assert any(isinstance(m, NewGELUActivation) for m in plain.modules())
    assert not any(isinstance(m, NewGELUActivation) for m in ours.modules())
    ids = torch.arange(40)[None]
    assert torch.allclose(ours(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5)


def test_loaded_model_is_frozen_and_shared(tiny_model: ModelReference) -> None:
    first, second = load_language_model(tiny_model, "cpu"), load_language_model(tiny_model, "cpu")
    assert first is second
    assert not any(p.requires_grad for p in first.model.parameters())
    assert first.prefix_ids == ()


def test_a_large_model_is_not_kept_beside_one_that_is_trained(
    tiny_model: ModelReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_language_model(tiny_model, "cpu")
    forget_large_model(first)
    assert load_language_model(tiny_model, "cpu") is first  # it is small
    monkeypatch.setattr(loading, "LARGE_MODEL", first.weight_bytes - 1)
    forget_large_model(first)
    kept = weakref.ref(first)
    del first
    gc.collect()
    assert kept() is None


def test_dtype_comes_from_the_settings_not_the_checkpoint(tiny_model: ModelReference) -> None:
    model = load_language_model(tiny_model.model_copy(update={"dtype": "bfloat16"}), "cpu")
    assert model.body_dtype == torch.bfloat16
    assert model.head_dtype == torch.float32


def test_digest_depends_on_the_content_not_the_path(tiny_model: ModelReference, tmp_path: Path) -> None:
    source = Path(tiny_model.name)
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert resolve_model(ModelSettings(name=str(copy))).key == tiny_model.key
    (copy / "config.json").write_text((copy / "config.json").read_text().replace("{", "{ ", 1))
    assert resolve_model(ModelSettings(name=str(copy))).key != tiny_model.key


def test_nan_weights_are_refused_by_name(tiny_model: ModelReference, tmp_path: Path) -> None:
    for file in Path(tiny_model.name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.fc1.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"has NaN or infinite weights in model\.layers\.1\.mlp\.fc1\.weight"):
        load_language_model(resolve_model(ModelSettings(name=str(tmp_path))), "cpu")


def test_a_missing_folder_and_a_folder_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model\.name: no folder '/no/such/model'"):
        resolve_model(ModelSettings(name="/no/such/model"))
    empty = resolve_model(ModelSettings(name=str(tmp_path)))
    with pytest.raises(InputError, match=r"cannot be loaded"):
        load_language_model(empty, "cpu")


@pytest.mark.filterwarnings("default:The .grad attribute:UserWarning")  # torch reads it while it compiles
@pytest.mark.parametrize("family", ["phi", "gpt2"])
def test_compiled_layers_compute_the_same_and_are_gone_afterwards(
    tokenizer: PreTrainedTokenizerFast, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the backend that only traces: compiling takes half a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = tiny_language_model(tokenizer, family)
    plain_layers = [layer.forward for layer in layers_of(model.model.base_model)]
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    for rows in (ids, ids[:1]):
        x = model.embed(rows).requires_grad_(True)
        plain = model.hidden_states(inputs_embeds=x)
        with model.compiled_layers():
            compiled, (*_, middle, last) = model.hidden_states(inputs_embeds=x), model.layers(inputs_embeds=x)
        torch.testing.assert_close(compiled, plain, atol=1e-10, rtol=0)
        torch.testing.assert_close(middle, model.layers(inputs_embeds=x)[1], atol=1e-10, rtol=0)
        torch.testing.assert_close(last, plain, atol=1e-10, rtol=0)
        slopes = [torch.autograd.grad(each.sin().sum(), [x])[0] for each in (compiled, plain)]
        torch.testing.assert_close(*slopes, atol=1e-9, rtol=0)
    assert counters["stats"]["unique_graphs"] > 0
    assert [layer.forward for layer in layers_of(model.model.base_model)] == plain_layers
