"""Hugging Face models as they come: default cache, default attention, labels in, loss out. Tiny random ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import assert_same_as_eager, seeded

import memfit

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

VOCABULARY = 37


def gpt2(**options: Any) -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=1,
            eos_token_id=2,
            **options,
        )
    )


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            **options,
        )
    )


def bert(**options: Any) -> Any:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            **options,
        )
    )


def bert_classifier() -> Any:
    return transformers.BertForSequenceClassification(bert().config)


def t5(**options: Any) -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            **options,
        )
    )


def vit(**options: Any) -> Any:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
            num_labels=5,
            **options,
        )
    )


def ids(n: int, length: int = 7) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (n, length))


def padding(n: int, length: int = 7) -> torch.Tensor:
    """A mask that hides the last tokens of each row but the first."""
    kept = torch.tensor([length, *(length - 1 - i % 3 for i in range(n - 1))])
    return (torch.arange(length) < kept[:, None]).long()


def left_padding(n: int) -> torch.Tensor:
    return padding(n).flip(1)


def plain(n: int) -> dict[str, torch.Tensor]:
    tokens = ids(n)
    return {"input_ids": tokens, "labels": tokens.clone()}


def full_mask(n: int) -> dict[str, torch.Tensor]:
    return plain(n) | {"attention_mask": torch.ones(n, 7, dtype=torch.long)}


def padded(n: int) -> dict[str, torch.Tensor]:
    given = plain(n) | {"attention_mask": padding(n)}
    given["labels"] = given["labels"].masked_fill(given["attention_mask"] == 0, -100)
    return given


def left_padded(n: int) -> dict[str, torch.Tensor]:
    return plain(n) | {"attention_mask": left_padding(n)}


def with_positions(n: int) -> dict[str, torch.Tensor]:
    return plain(n) | {"position_ids": torch.arange(7).expand(n, 7)}


def images(n: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(n, 3, 8, 8), "labels": torch.randint(0, 5, (n,))}


def pairs(n: int) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(n), "labels": ids(n, 5)}


def padded_pairs(n: int) -> dict[str, torch.Tensor]:
    return pairs(n) | {"attention_mask": padding(n)}


def classes(n: int) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(n), "attention_mask": padding(n), "labels": torch.randint(0, 2, (n,))}


def typed(n: int) -> dict[str, torch.Tensor]:
    return padded(n) | {"token_type_ids": torch.randint(0, 2, (n, 7))}


CASES = {
    "gpt2": (gpt2, plain),
    "gpt2, full mask": (gpt2, full_mask),
    "gpt2, padded": (gpt2, padded),
    "gpt2, left padded": (gpt2, left_padded),
    "gpt2, positions": (gpt2, with_positions),
    "gpt2, eager attention": (lambda: gpt2(attn_implementation="eager"), padded),
    "gpt2, no dropout": (lambda: gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), plain),
    "gpt2, untied": (lambda: gpt2(tie_word_embeddings=False), plain),
    "llama": (llama, plain),
    "llama, full mask": (llama, full_mask),
    "llama, padded": (llama, padded),
    "llama, positions": (llama, with_positions),
    "llama, eager attention": (lambda: llama(attn_implementation="eager"), padded),
    "llama, tied": (lambda: llama(tie_word_embeddings=True), plain),
    "llama, attention dropout": (lambda: llama(attention_dropout=0.1), plain),
    "bert": (bert, plain),
    "bert, padded": (bert, padded),
    "bert, types": (bert, typed),
    "bert, eager attention": (lambda: bert(attn_implementation="eager"), padded),
    "bert classifier": (bert_classifier, classes),
    "t5": (t5, pairs),
    "t5, padded": (t5, padded_pairs),
    "t5, gated": (lambda: t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False), pairs),
    "vit": (vit, images),
    "vit, dropout": (lambda: vit(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1), images),
    "vit, eager attention": (lambda: vit(attn_implementation="eager"), images),
}


@pytest.mark.parametrize("name", CASES)
def test_models_with_labels_match(name: str) -> None:
    build, inputs = CASES[name]
    other_batch = 2 if name in ("gpt2, padded", "llama, padded", "bert", "t5", "vit") else None
    assert_same_as_eager(seeded(build), inputs, loss=lambda output, model: output.loss, other_batch=other_batch)


@pytest.mark.parametrize(
    ("build", "inputs"), [(gpt2, padded), (llama, padded), (t5, padded_pairs), (vit, images), (bert, padded)]
)
def test_models_under_autocast_match(build: Any, inputs: Any) -> None:
    assert_same_as_eager(
        seeded(build),
        inputs,
        loss=lambda output, model: output.loss,
        around=lambda: torch.autocast("cpu", torch.bfloat16),
        other_batch=None,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


@pytest.mark.parametrize("build", [gpt2, llama])
def test_models_asked_for_everything_match(build: Any) -> None:
    def inputs(n: int) -> dict[str, Any]:
        return plain(n) | {"output_hidden_states": True, "use_cache": False}

    assert_same_as_eager(seeded(build), inputs, loss=lambda o, m: o.loss + o.hidden_states[1].square().mean())


@pytest.mark.parametrize("build", [gpt2, llama])
def test_models_that_return_plain_tuples_match(build: Any) -> None:
    assert_same_as_eager(
        seeded(build), lambda n: plain(n) | {"return_dict": False}, loss=lambda output, model: output[0]
    )


@pytest.mark.parametrize("build", [gpt2, llama])
def test_logits_for_a_loss_outside_the_model_match(build: Any) -> None:
    def loss(output: Any, model: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            output.logits.flatten(0, 1), torch.ones(output.logits.shape[:2], dtype=torch.long).flatten()
        )

    assert_same_as_eager(seeded(build), lambda n: {"input_ids": ids(n)}, loss=loss)


def test_masks_of_other_kinds_from_step_to_step_match() -> None:
    """The model looks at the mask and takes another path; each answer has a capture of its own."""
    makers = [full_mask, padded, full_mask, padded, plain, padded]
    calls = {"n": 0}

    def inputs(n: int) -> dict[str, torch.Tensor]:
        calls["n"] += 1
        return makers[(calls["n"] - 1) % len(makers)](n)

    for build in (gpt2, llama):
        calls["n"] = 0
        assert_same_as_eager(seeded(build), inputs, steps=6, other_batch=None, loss=lambda output, model: output.loss)


def test_a_partly_frozen_model_matches() -> None:
    model = seeded(gpt2)
    model.transformer.wte.requires_grad_(False)
    model.transformer.h[0].requires_grad_(False)
    assert_same_as_eager(model, padded, loss=lambda output, model: output.loss)


def test_a_config_changed_between_steps_is_seen() -> None:
    def between(model: Any, step: int) -> None:
        model.config.use_return_dict_marker = step
        model.transformer.h[0].mlp.dropout.p = 0.1 * step

    assert_same_as_eager(seeded(gpt2), plain, between=between, loss=lambda output, model: output.loss)


def test_gradient_checkpointing_is_refused_with_the_way_out() -> None:
    model = seeded(lambda: llama(use_cache=False))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with pytest.raises(memfit.MemfitError, match="Turn checkpointing off"):
        memfit.fit(model)(**plain(3))


def test_gradient_accumulation_over_padded_batches_matches() -> None:
    assert_same_as_eager(
        seeded(gpt2), padded, micro_batches=3, other_batch=None, loss=lambda output, model: output.loss
    )
