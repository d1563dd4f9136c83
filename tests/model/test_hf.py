"""Hugging Face models behind the policy: a tiny random Llama, and the real SmolLM2 (services)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from model import hf
from model.batch import Sequence, batch_of, pack
from model.chat import Message
from model.tokenizer import Tokenizer


class PlainTokenizer(hf.HFTokenizer):
    """Our own tokenizer in place of a family's."""

    def __init__(self) -> None:
        self.own = Tokenizer()

    def encode(self, text: str) -> list[int]:
        return self.own.encode(text)

    def special(self, name: str) -> int:
        return {"<|im_start|>": 3, "<|im_end|>": 7}[name]


@pytest.fixture(scope="module")
def policy() -> hf.HFPolicy:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: Any = transformers.LlamaForCausalLM(config)
    return hf.HFPolicy("tiny", module.eval(), PlainTokenizer())


def want(policy: hf.HFPolicy, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return policy.module(input_ids=torch.tensor([tokens])).logits[0]


def test_ragged_extend_equals_one_shot(policy):
    draw = random.Random(0)
    texts = [draw.choices(range(64), k=n) for n in (5, 17, 9)]
    cache = policy.open_cache(4, 40)
    rows = [3, 0, 2]
    got = cache.extend(rows, [t[:-4] for t in texts])
    for row, text in enumerate(texts):
        torch.testing.assert_close(got[row], want(policy, text)[len(text) - 5], atol=1e-4, rtol=0)
    got = cache.extend([2, 3], [texts[2][-4:-1], texts[0][-4:-3]])
    torch.testing.assert_close(got[0], want(policy, texts[2])[-2], atol=1e-4, rtol=0)
    torch.testing.assert_close(got[1], want(policy, texts[0])[-4], atol=1e-4, rtol=0)
    cache.fork(2, 1)
    cache.free(2)
    cache.extend([2], [[1, 2, 3]])
    got = cache.extend([1], [texts[2][-1:]])
    torch.testing.assert_close(got[0], want(policy, texts[2])[-1], atol=1e-4, rtol=0)
    assert (cache.length(1), cache.length(2), cache.starts(1)) == (9, 3, 0)


def test_hidden_of_packed_rows_leaks_nothing(policy):
    draw = random.Random(1)
    texts = [draw.choices(range(64), k=n) for n in (7, 12, 5)]
    (batch,) = pack([Sequence(t) for t in texts], 64, row_tokens=32)
    with torch.no_grad():
        logits = policy.hidden(batch) @ policy.head().T
    for index, got in batch.gather(logits).items():
        torch.testing.assert_close(got, want(policy, texts[index]), atol=1e-4, rtol=0)
    assert not logits[batch.segments_BT == 0].any()


def test_hidden_carries_gradient(policy):
    policy.hidden(batch_of([Sequence([1, 2, 3])])).sum().backward()
    assert all(p.grad is not None for p in policy.module.parameters())
    policy.module.zero_grad()


def test_a_folder_that_is_none_is_a_user_error(tmp_path: Path):
    with pytest.raises(ValueError, match="save_pretrained"):
        hf.HFPolicy.open(tmp_path)


@pytest.mark.services
@pytest.mark.timeout(600)
def test_smollm2_from_its_wheel_answers(tmp_path: Path):
    policy = hf.load_smollm2(tmp_path)
    prompt = policy.chat.render([Message("user", "What is the capital of France?")], open=True)
    template = policy.tokenizer.inner.apply_chat_template(
        [
            {"role": "system", "content": "x"},
            {"role": "user", "content": "What is the capital of France?"},
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    ours = policy.chat.render(
        [Message("system", "x"), Message("user", "What is the capital of France?")], open=True
    )
    assert ours == template
    cache = policy.open_cache(1, 128)
    logits = cache.extend([0], [prompt])
    said: list[int] = []
    while len(said) < 24 and (token := int(logits[0].argmax())) not in policy.chat.stop_ids:
        said.append(token)
        logits = cache.extend([0], [[token]])
    assert "Paris" in policy.tokenizer.decode(said)
